"""The reports: what is in them, what they look like to a browser, and that they cost no results."""

import errno
import io
import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import pytest
import runs
import yaml
from browser import look, needs_browser
from pages import Page
from runs import quiet

from qrot.cli import app
from qrot.cli.run import run_and_report
from qrot.errors import InputError
from qrot.learn.objectives import OBJECTIVES
from qrot.report.page import STYLE
from qrot.report.results import cells
from qrot.report.run import report, write_report
from qrot.run import run as module
from qrot.run.config import to_yaml
from qrot.run.read import read_config
from qrot.run.results import read_results
from qrot.run.run import run

SPITE = "a<img src=x onerror=alert(1)>&\"'"


@pytest.fixture(scope="module")
def ran(tiny, tmp_path_factory):
    """The folder of a run from the command line, and what that printed."""
    folder = tmp_path_factory.mktemp("report")
    methods = ("full_precision", "no_rotation", "random_hadamard", "learned")
    config = replace(runs.tiny_config(tiny, folder / "run"), methods=methods)
    (folder / "tiny.yaml").write_text(to_yaml(config))
    jax.config.update("jax_disable_most_optimizations", True)
    with pytest.MonkeyPatch.context() as patch:
        shown = io.StringIO()
        patch.setattr("sys.stdout", shown)
        app(["run", str(folder / "tiny.yaml")], standalone_mode=False)
    jax.config.update("jax_disable_most_optimizations", False)
    return folder / "run", shown.getvalue()


@pytest.fixture
def compared(tmp_path):
    """Two runs of three seeds with names that would be tags, and the report of their comparison."""
    protocol = dict.fromkeys(
        ("model", "note", "text", "count", "window", "stride", "bos", "logits", "norms"), SPITE
    )
    for name, nll in (("a", 4.0), ("b", 3.5)):
        rows = [made_row("learned", seed, nll + seed / 10 + seed * nll / 1000) for seed in range(3)]
        (tmp_path / "runs" / name).mkdir(parents=True)
        results = json.dumps({"protocol": protocol, "rows": rows, "environment": {"jax": "9.9"}})
        (tmp_path / "runs" / name / "results.json").write_text(results)
        config = {"out": name, "objective": name + SPITE}
        (tmp_path / "runs" / name / "config.yaml").write_text(yaml.safe_dump(config))
    return tmp_path / "runs", tmp_path / "compared.html"


def made_row(method, seed, nll, **more):
    bits = {"weights": 4, "activations": 4, "keys": 4, "values": 4, "seconds": 2.0}
    return {"method": method, "seed": seed, "nll": nll, "perplexity": math.exp(nll), **bits, **more}


def test_a_run_leaves_a_report(ran):
    folder, shown = ran
    text = (folder / "report.html").read_text()
    found = Page(text)
    words = " ".join(found.text)
    results = read_results(folder / "results.json")
    for line in cells(results["rows"]):
        assert all(cell in words for cell in line)
    for heading in ("Results", "Perplexity", "One activation", "Outliers by layer",
                    "Rounding error by layer", "Learning", "Cost"):  # fmt: skip
        assert f"<h2>{heading}</h2>" in text
    assert "evaluate_every: 2" in words  # config.yaml
    assert results["environment"]["jax"] in words
    assert results["protocol"]["digest"] in words
    drawn = [row for row in results["rows"] if row["method"] == "random_hadamard"]
    assert len(drawn) == 2
    assert all(f"seed {row['seed']}: {row['perplexity']:,.2f}" in words for row in drawn)
    held_out = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    best = min(line["held_out"] for line in held_out if "held_out" in line)
    assert f"{best:.4g}" in words
    unit = OBJECTIVES["cross_entropy"].unit
    assert f"{unit[0].upper()}{unit[1:]}. With dots" in words
    assert (folder / "learning.png").read_bytes().startswith(b"\x89PNG")
    assert "learning.png" in shown.replace("\n", " ").split(f"{folder}:")[1]
    assert len(text.encode()) < 400_000
    assert "report.html" in shown.replace("\n", " ").split(f"{folder}:")[1]
    assert not list(folder.rglob("*.partial"))


def test_nothing_is_fetched_and_nothing_runs(ran, compared):
    runs_folder, file = compared
    app(["compare", str(runs_folder), "--report", str(file)], standalone_mode=False)
    for text in ((ran[0] / "report.html").read_text(), file.read_text()):
        found = Page(text)
        assert all(value.startswith("data:image/png;base64,") for value in found.references())
        tags = {tag for tag, _ in found.elements}
        assert not tags & {"script", "link", "iframe", "object", "embed", "base", "form", "img"}
        assert not any(name.startswith("on") for _, attrs in found.elements for name in attrs)
        assert not re.search(r"url\(|@import", text)
        bare = re.sub(r"data:image/png;base64,[\w+/=]+", "", text)
        assert "//" not in bare.replace('xmlns="http://www.w3.org/2000/svg"', "")
        policy = [a["content"] for t, a in found.elements if "http-equiv" in a]
        assert policy == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]


def test_names_are_escaped():
    protocol = {"model": SPITE, "note": SPITE, "text": SPITE, "count": 1, "window": 2, "stride": 2}
    protocol |= {"bos": False, "logits": SPITE, "norms": SPITE}
    rows = [made_row("full_precision", None, 1.0), made_row(SPITE, 0, 2.0, weight_method=SPITE)]
    text = report(
        {"protocol": protocol, "rows": rows, "environment": {SPITE: SPITE}}, [], None, SPITE
    )
    found = Page(text)
    assert "img" not in {tag for tag, _ in found.elements}
    assert " ".join(found.text).count(SPITE) >= 6
    labels = [a["aria-label"] for _, a in found.elements if "aria-label" in a]
    assert any(SPITE in label for label in labels)


def test_pictures_have_words_for_those_who_do_not_see_them(ran):
    found = Page((ran[0] / "report.html").read_text())
    pictures = [attrs for tag, attrs in found.elements if tag == "svg"]
    assert len(pictures) > 10
    assert all(a["role"] == "img" and len(a["aria-label"]) > 20 for a in pictures)
    assert found.elements[0] == ("html", {"lang": "en"})


def test_dark_and_phone(ran):
    text = (ran[0] / "report.html").read_text()
    assert "@media (prefers-color-scheme: dark)" in text
    assert "@media (max-width: 640px)" in text
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text


def test_text_can_be_read_in_both_modes():
    """Contrast as WCAG 2.2 has it: 4.5 for text, 3 for marks."""

    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    def contrast(a, b):
        low, high = sorted((luminance(a), luminance(b)))
        return (high + 0.05) / (low + 0.05)

    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    modes = re.findall(r":root \{(.*?)\}", STYLE.read_text(), re.S)
    assert len(modes) == 2
    for mode in modes:
        colours = dict(re.findall(r"--(\w+): (#\w{6})", mode))
        for name, least in {"ink": 4.5, "soft": 4.5, "plain": 3, "best": 3, "before": 3,
                            "violet": 3, "teal": 3, "good": 4.5, "bad": 4.5}.items():  # fmt: skip
            assert contrast(colours[name], colours["paper"]) >= least, name


def test_what_was_not_recorded_is_left_out(ran, tmp_path):
    folder = ran[0]
    for name in ("results.json", "config.yaml"):
        (tmp_path / name).write_text((folder / name).read_text())
    results = read_results(folder / "results.json")
    kept = ("method", "seed", "nll", "perplexity", "weights", "activations", "keys", "values")
    results["rows"] = [
        {k: row[k] for k in kept} | {"seconds": 1.0}
        for row in results["rows"]
        if row["method"] != "learned"
    ]
    del results["environment"]
    (tmp_path / "results.json").write_text(json.dumps(results))
    write_report(tmp_path)
    text = (tmp_path / "report.html").read_text()
    Page(text)
    assert "<h2>Perplexity</h2>" in text
    for absent in ("One activation", "Outliers", "Rounding error", "<h2>Learning", "peak, GiB"):
        assert absent not in text
    assert "rounding weights" not in text


def test_a_full_disk_takes_the_report_and_no_results(ran, monkeypatch):
    folder = ran[0]
    config = read_config(folder / "config.yaml")
    before = {name: (folder / name).read_bytes() for name in ("results.json", "report.html")}
    original = Path.write_text

    def write_text(path, text, **options):
        if path.name.startswith("report.html."):
            original(path, text[: len(text) // 2], **options)
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return original(path, text, **options)

    looked = (folder / "anatomy.json").stat().st_mtime_ns
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", write_text)
        with pytest.raises(InputError, match=r"cannot be written \(No space left on device\)"):
            run_and_report(config, quiet())
    assert {name: (folder / name).read_bytes() for name in before} == before
    assert not list(folder.rglob("*.partial"))
    (folder / "report.html").unlink()
    run_and_report(config, quiet())  # nothing is measured again, and the report is the same
    assert (folder / "report.html").read_bytes() == before["report.html"]
    assert (folder / "anatomy.json").stat().st_mtime_ns == looked


def test_no_module_of_the_reports_needs_jax():
    code = (
        "import importlib, pkgutil, sys, qrot.report\n"
        "for module in pkgutil.iter_modules(qrot.report.__path__):\n"
        "    importlib.import_module(f'qrot.report.{module.name}')\n"
        "    print(module.name)\n"
        "assert 'jax' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {"run", "results", "comparison", "plot"} <= set(done.stdout.split())


def test_runs_of_older_versions_are_read(ran, tmp_path):
    """They do not say what the unit of a loss is."""
    for name in ("config.yaml", "anatomy.json", "metrics.jsonl"):
        (tmp_path / name).write_text((ran[0] / name).read_text())
    results = read_results(ran[0] / "results.json")
    for row in results["rows"]:
        row.pop("unit", None)
    (tmp_path / "results.json").write_text(json.dumps(results))
    write_report(tmp_path)
    assert "Cross entropy. With dots" in " ".join(Page((tmp_path / "report.html").read_text()).text)
    assert (tmp_path / "learning.png").exists()
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "lo')
    with pytest.raises(InputError, match=r"metrics\.jsonl: damaged"):
        write_report(tmp_path)


def test_rows_measured_elsewhere_say_where():
    protocol = dict.fromkeys(
        ("model", "note", "text", "count", "window", "stride", "bos", "logits", "norms"), "x"
    )
    rows = [made_row("full_precision", None, 1.0), made_row("random_hadamard", 3, 2.0)]
    results = {"protocol": protocol, "rows": rows, "environment": {"jax": "9.9"}}
    assert "measured elsewhere" not in report(results, [], None, "")
    rows[1]["environment"] = {"jax": "9.10", "device": "another"}
    words = " ".join(Page(report(results, [], None, "")).text)
    for told in ("Rows measured elsewhere", "random hadamard, seed 3", "9.10", "another"):
        assert told in words


def test_results_are_there_before_anything_is_looked_at(config, monkeypatch):
    monkeypatch.setattr(module, "keep_anatomy", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(replace(config, methods=("full_precision", "no_rotation")), quiet())
    results = read_results(Path(config.out) / "results.json")
    assert [row["method"] for row in results["rows"]] == ["full_precision", "no_rotation"]


def test_the_report_of_a_comparison(compared, capsys):
    folder, file = compared
    app(["compare", str(folder), "--report", str(file), "--format", "csv"], standalone_mode=False)
    out, err = capsys.readouterr()
    assert out.startswith("row,seeds,perplexity")
    assert err.strip() == str(file)
    found = Page(file.read_text())
    words = " ".join(found.text)
    assert "img" not in {tag for tag, _ in found.elements}
    for line in (f"learned, objective=a{SPITE}", "-0.500", "better", "Student", "9.9", "objective"):
        assert line in words
    with pytest.raises(InputError, match="absent is no folder"):
        app(["compare", str(folder), "--report", str(folder / "absent" / "x")],
            standalone_mode=False)  # fmt: skip
    with pytest.raises(InputError, match="cannot be written"):
        app(["compare", str(folder), "--report", str(folder)], standalone_mode=False)


@needs_browser
def test_the_browser_tells_of_faults(tmp_path):
    """What the next test relies on can fail."""
    file = tmp_path / "bad.html"
    file.write_text(
        '<!doctype html><body><div style="width: 500px">x</div>'
        '<img src="http://outside.invalid/x.png"><script>nothing()</script>'
    )
    seen = look(file, 390)
    assert seen.asked[1:] == ["http://outside.invalid/x.png"]
    assert any("nothing is not defined" in fault for fault in seen.faults)
    assert (seen.inner, seen.scrolled > 500) == (390, True)


@needs_browser
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_in_a_browser(ran, compared, width, dark):
    folder, file = compared
    app(["compare", str(folder), "--report", str(file)], standalone_mode=False)
    for page in (ran[0] / "report.html", file):
        seen = look(page, width, dark=dark)
        assert seen.faults == []
        asked = [address for address in seen.asked if not address.startswith("data:")]
        assert asked == [page.resolve().as_uri()]
        assert (seen.inner, seen.scrolled) == (width, width)  # nothing sticks out
        assert seen.background == ("rgb(21, 23, 27)" if dark else "rgb(255, 255, 255)")
        assert "Perplexity" in seen.text
