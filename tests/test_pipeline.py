"""A pipeline: merged, refreshed, gated, exported once, and again only where something changed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from runs import quiet
from test_refresh import nudged, others, parent  # noqa: F401  (fixtures)

from qrot.cli import main
from qrot.errors import InputError
from qrot.run import pipeline as module
from qrot.run.pipeline import LOCK, read_pipeline, run_pipeline

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture
def file(parent, others, tmp_path):  # noqa: F811
    """A pipeline of other weights, with a gate that lets anything pass."""
    settings = {
        "parent": str(parent),
        "model": others("nudged", nudged),
        "out": str(tmp_path / "made"),
        "settings": {"gate": {"kl": 100.0}, "refresh": {"keep": 4.0}},
        "exports": [{"format": "torch"}],
    }
    path = tmp_path / "pipeline.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def change(file, **settings):
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | settings))


def command(file, monkeypatch):
    monkeypatch.setattr("sys.argv", ["qrot", "pipeline", str(file)])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code


def test_it_does_all_once(file, monkeypatch, capsys):
    assert command(file, monkeypatch) == 0
    printed = capsys.readouterr().out
    assert "the old rotations are kept" in " ".join(printed.split())
    assert "Gate passed" in printed
    out = Path(yaml.safe_load(file.read_text())["out"])
    lock = json.loads((out / LOCK).read_text())
    assert lock["gate"] is True
    (export,) = lock["exports"]
    assert set(lock["made"]) >= {f"{lock['run']}/results.json", f"{export}/qrot.json"}
    card = json.loads((out / export / "qrot.json").read_text())
    assert card["fingerprint"] == lock["consumed"]["model"]
    assert card["gate"]["passed"]
    assert card["row"] == "saved"
    # Again: nothing is done, and nothing but the files is read.
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    monkeypatch.setattr(module, "refresh", None)
    monkeypatch.setattr(module, "export", None)
    assert command(file, monkeypatch) == 0
    assert "nothing changed" in " ".join(capsys.readouterr().out.split())
    after = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    assert after == before


def test_it_does_what_is_left(file, monkeypatch):
    settings = read_pipeline(file)
    out = Path(settings.out)

    def killed(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "export", killed)
        with pytest.raises(KeyboardInterrupt):
            run_pipeline(settings, quiet())
    assert not (out / LOCK).exists()
    (run,) = out.glob("run-*")
    results = (run / "results.json").stat().st_mtime_ns
    found, done = run_pipeline(settings, quiet())
    assert done
    assert (run / "results.json").stat().st_mtime_ns == results
    # A file that was taken away is made again; other settings are made beside the old ones.
    (out / found["exports"][0] / "README.md").unlink()
    found, done = run_pipeline(settings, quiet())
    assert done
    more = replace(settings, settings={**settings.settings, "batch": 1})
    other, done = run_pipeline(more, quiet())
    assert done
    assert other["run"] != found["run"]
    assert len(list(out.glob("run-*"))) == 2


def test_a_gate_that_fails_exports_nothing(file, monkeypatch, capsys):
    change(file, settings={"gate": {"kl": 0.0}, "refresh": {"keep": 4.0}})
    for _ in range(2):
        assert command(file, monkeypatch) == 3
        assert "gate failed: kl" in capsys.readouterr().err
    out = Path(yaml.safe_load(file.read_text())["out"])
    lock = json.loads((out / LOCK).read_text())
    assert lock["gate"] is False
    assert lock["exports"] == []
    assert not list(out.glob("torch-*"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"parent": ""}, "parent: is empty"),
        ({"exports": [{"format": "troch"}]}, "exports.0.format: there is no 'troch'; did you mean"),
        ({"expotrs": []}, "unknown key 'expotrs', did you mean 'exports'?"),
        ({"model": None}, "model: expected a text or a section"),
        ({"exports": [{"format": "torch"}] * 2}, "exports: names one twice"),
    ],
)
def test_bad_settings_are_named_in_one_sentence(tmp_path, settings, words):
    path = tmp_path / "pipeline.yaml"
    path.write_text(yaml.safe_dump({"parent": "a", "model": "b", "out": "c", **settings}))
    with pytest.raises(InputError) as error:
        read_pipeline(path)
    assert words in str(error.value)


def test_a_pipeline_without_a_parent_leaves_nothing(file, tmp_path, monkeypatch, capsys):
    change(file, parent=str(tmp_path / "nowhere"))
    assert command(file, monkeypatch) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "made").exists()
