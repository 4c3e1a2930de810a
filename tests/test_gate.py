"""The gate: what it measures, what it lets through, and what comes of it."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml
from gates import LOOSE, gated_run, measures_nothing, passing
from pages import Page
from runs import CHEAP, quiet
from tasks import write_tasks
from test_cli import run as command

from qrot.calibrate.capture import capture
from qrot.errors import InputError
from qrot.evaluate.perplexity import Windows, cut_windows
from qrot.evaluate.zeroshot import ZeroShot
from qrot.grid import Grid
from qrot.learn.objectives.fisher import fisher
from qrot.progress import Stages
from qrot.quantize.keep import read_about
from qrot.run import run as run_module
from qrot.run.config import to_yaml
from qrot.run.gate import gate_run
from qrot.run.limits import Gate
from qrot.run.methods import METHODS
from qrot.run.prepare import prepare
from qrot.run.read import read_config
from qrot.run.results import read_gate
from qrot.run.run import run
from qrot.run.verdict import failures, lines, zeroshot_drop
from qrot.text import Data

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture(scope="module")
def done(tiny, tmp_path_factory):
    """The folder of a run whose gate passed."""
    return gated_run(tiny, tmp_path_factory.mktemp("gated"))


@pytest.fixture
def ran(done, tmp_path):
    """A copy of it."""
    return Path(shutil.copytree(done, tmp_path / "run"))


@pytest.fixture
def unmeasured(monkeypatch):
    """Fail where anything is measured."""
    measures_nothing(monkeypatch)


# What is measured


def test_what_is_judged_is_the_file_that_is_exported(done):
    found, rows = read_gate(done / "gate.json"), json.loads((done / "results.json").read_text())
    assert found
    exact, *others = rows["rows"]
    best = min(others, key=lambda row: row["nll"])
    (text,) = found["measured"]["texts"]
    assert (text["exact_nll"], text["nll"]) == (exact["nll"], best["nll"])  # by another way
    assert text["tokens"] == rows["protocol"]["scored_tokens"]
    assert text["text"] == rows["protocol"]["text"]
    assert text["nats"] == best["nll"] - exact["nll"]
    assert text["perplexity_ratio"] == pytest.approx(best["perplexity"] / exact["perplexity"])
    about = read_about(done / found["of"]["network"])
    assert found["of"]["row"] == about["row"]
    assert found["of"]["fingerprint"] == about["fingerprint"]["total"]
    assert found["passed"]
    assert [line["name"] for line in found["limits"]] == list(LOOSE.limits)


def test_costs_of_sites_are_those_of_fisher(config):
    gate = Gate(site_cost=9.0)
    config = replace(config, methods=("random_hadamard",), seeds=(1,), gate=gate)
    rows = run(config, quiet())["rows"]
    found = read_gate(Path(config.out) / "gate.json")
    assert found
    assert "texts" not in found["measured"]  # no limit asks for them
    costs, learn = found["measured"]["site_costs"], config.learn
    with Stages(quiet()) as stages:
        inputs = prepare(config, Path(config.out), stages)
    transform = METHODS["random_hadamard"].recall(inputs, rows[0])
    assert transform is not None
    tokens = cut_windows(inputs.calibration, Windows(learn.length, None))[learn.held_out :]
    captured, _ = capture(
        inputs.network, tokens[: learn.windows], vectors=learn.vectors, seed=0, gradients=True
    )
    whole = fisher(transform, inputs.network.replace(scheme=config.scheme), captured)
    assert sum(costs.values()) == pytest.approx(float(whole), rel=1e-3)
    (line,) = found["limits"]
    assert costs[line["site"]] == max(costs.values())


def test_a_cost_that_is_not_known_is_said_to_be_so(config):
    config = replace(config, methods=("slicegpt",), gate=Gate(site_cost=1.0))
    config = replace(config, calibration=replace(config.calibration, windows=6, length=16))
    with pytest.raises(InputError, match=r"gate\.site_cost: cannot be measured, since what slice"):
        run(config, quiet())
    assert not (Path(config.out) / "gate.json").exists()
    found = gate_run(Path(config.out), ["site_cost=null", "kl=99"], quiet())
    assert found["passed"]


def test_a_drop_of_scores_with_its_interval():
    exact = {
        "zeroshot": {"a": {"acc": 0.6, "acc_stderr": 0.03}, "b": {"acc": 0.5, "acc_stderr": 0.04}}
    }
    row = {
        "zeroshot": {"a": {"acc": 0.5, "acc_stderr": 0.03}, "b": {"acc": 0.5, "acc_stderr": 0.04}}
    }
    found = zeroshot_drop(exact, row)
    assert found["text"] == "a, b"
    assert found["value"] == pytest.approx(0.05)
    half = 1.959964 * np.sqrt(2 * 0.03**2 + 2 * 0.04**2) / 2
    assert found["interval"] == pytest.approx([0.05 - half, 0.05 + half])
    row["zeroshot"]["b"]["acc_stderr"] = None
    assert zeroshot_drop(exact, row)["interval"] is None
    (line,) = lines(Gate(zeroshot_drop=0.04), {}, found)
    assert failures([line]) == ["zeroshot_drop on a, b is 0.05, 0.01 above its limit of 0.04"]


def test_a_run_with_tasks(config, tmp_path):
    folder = write_tasks(tmp_path)
    tasks = ZeroShot((str(folder / "last.jsonl"),), count=3)
    config = replace(config, methods=CHEAP, zeroshot=tasks, gate=Gate(zeroshot_drop=1.0))
    rows = run(config, quiet())["rows"]
    found = read_gate(Path(config.out) / "gate.json")
    assert found
    (line,) = found["limits"]
    scores = [row["zeroshot"]["last"]["acc"] for row in rows]
    assert line["value"] == pytest.approx(scores[0] - scores[1])
    assert line["text"] == "last"
    assert len(line["interval"]) == 2


# Texts, files and rows


def test_every_text_has_to_pass(ran, tiny, tmp_path):
    (tmp_path / "own.txt").write_text((tiny / "evaluation.txt").read_text()[500:])
    before = read_gate_kl(ran)
    texts = [
        {"source": "files", "path": str(tiny)},
        {"source": "files", "path": str(tmp_path), "evaluation": "own.txt"},  # alone
    ]
    found = gate_run(ran, [f"texts={json.dumps(texts)}"], quiet())
    of_kl = [line for line in found["limits"] if line["name"] == "kl"]
    assert [line["text"].split(",")[0] for line in of_kl] == ["evaluation.txt", "own.txt"]
    kl = [line["value"] for line in of_kl]
    assert kl[0] == before
    assert kl[1] != before
    assert not gate_run(ran, [f"texts={json.dumps(texts)}", f"kl={min(kl)}"], quiet())["passed"]
    assert gate_run(ran, [f"texts={json.dumps(texts)}", f"kl={max(kl)}"], quiet())["passed"]
    with pytest.raises(InputError, match=r"short\.txt: cannot be read"):
        gate_run(ran, ["texts=[{source: files, evaluation: short.txt}]"], quiet())
    (tmp_path / "short.txt").write_text("w1 w2 w3")
    short = json.dumps([{**texts[1], "evaluation": "short.txt"}])
    with pytest.raises(InputError, match=r"gate: short\.txt, sha256 \w+: the text has 3 tokens"):
        gate_run(ran, [f"texts={short}"], quiet())


def read_gate_kl(folder):
    found = read_gate(folder / "gate.json")
    return found["measured"]["texts"][0]["kl"]


def test_of_all_networks_the_best_is_judged(config):
    run(passing(config, keep="all"), quiet())
    folder = Path(config.out)
    found = read_gate(folder / "gate.json")
    assert found
    files = {read_about(file)["nll"]: file for file in (folder / "networks").iterdir()}
    assert folder / found["of"]["network"] == files[min(files)]


def test_with_a_gate_what_is_not_rounded_is_kept_too_but_never_full_precision(config):
    scheme = replace(config.scheme, weights=Grid(16))
    config = passing(config, scheme=scheme)
    rows = run(config, quiet())["rows"]
    about = read_about(Path(config.out) / "network.safetensors")
    assert about["nll"] == min(row["nll"] for row in rows[1:])
    assert about["method"] != "full_precision"
    kept = Path(config.out) / "network.safetensors"
    again = replace(config, methods=("saved",), saved=str(kept), out=config.out + "-again")
    run(again, quiet())  # whole networks of other runs, too
    assert read_gate_kl(Path(again.out)) == read_gate_kl(Path(config.out))


def test_another_network_takes_the_verdict_away(config, monkeypatch):
    config = replace(config, methods=("random_orthogonal",), seeds=(0, 1, 2))
    original, judged = run_module.judge, []

    def judge(inputs, name, network):
        judged.append(name)
        if len(judged) == 2:
            raise KeyboardInterrupt
        found = original(inputs, name, network)
        return {**found, "nll": found["nll"] - len(judged)}  # each better than the one before

    monkeypatch.setattr(run_module, "judge", judge)
    with pytest.raises(KeyboardInterrupt):
        run(config, quiet())
    folder = Path(config.out)
    gate_run(folder, ["kl=99"], quiet())
    assert {"gate.json", "gate.xml"} <= {path.name for path in folder.iterdir()}
    run(config, quiet())
    assert not {"gate.json", "gate.xml"} & {path.name for path in folder.iterdir()}


def test_other_limits_are_no_other_run(ran, unmeasured):
    config = read_config(ran / "config.yaml")
    config = replace(config, out=str(ran), gate=Gate(kl=1e-6))
    before = (ran / "results.json").read_bytes()
    run(config, quiet())
    assert (ran / "results.json").read_bytes() == before
    assert read_config(ran / "config.yaml").gate == config.gate
    found = read_gate(ran / "gate.json")
    assert found
    assert not found["passed"]
    assert found["settings"]["kl"] == 1e-6


def test_nothing_is_measured_or_written_again(ran, unmeasured):
    before = {path: path.stat().st_mtime_ns for path in ran.glob("gate.*")}
    assert gate_run(ran, [], quiet())["passed"]
    assert {path: path.stat().st_mtime_ns for path in ran.glob("gate.*")} == before
    (ran / "gate.xml").unlink()
    gate_run(ran, [], quiet())
    assert (ran / "gate.xml").exists()
    network = ran / "network.safetensors"
    content = bytearray(network.read_bytes())
    content[-1] ^= 1  # of a weight
    network.write_bytes(content)
    with pytest.raises(AssertionError, match="measured again"):
        gate_run(ran, [], quiet())


def test_files_of_other_methods_may_be_gone(config):
    run(replace(config, methods=("equalised",)), quiet())
    moved = Path(config.out) / "equalised.safetensors"
    again = replace(config, methods=("saved",), saved=str(moved), out=config.out + "-again")
    run(again, quiet())
    moved.unlink()
    assert gate_run(Path(again.out), ["kl=99"], quiet())["passed"]


# The command line


def test_a_run_that_passes_and_one_that_fails(config, tmp_path, monkeypatch, capsys):
    file, folder = tmp_path / "config.yaml", Path(config.out)
    file.write_text(to_yaml(passing(config)))
    assert command(monkeypatch, "run", file) == 0
    said = capsys.readouterr().out
    assert "Gate passed: " in said
    assert "gate.xml" in said
    assert command(monkeypatch, "run", file, "gate.kl=0.001") == 3
    out, err = capsys.readouterr()
    assert "is above 1 of 5 limits." in out
    assert "gate: " not in out  # nothing was measured
    value = read_gate_kl(folder)
    line = f"kl on files is {value:.4g}, {value - 0.001:.3g} above its limit of 0.001"
    assert err.splitlines()[-1] == f"qrot: gate failed: {line}"
    assert (folder / "network.safetensors").exists()
    assert command(monkeypatch, "run", file, "gate.kl=0.001") == 3  # again
    cases = ElementTree.parse(folder / "gate.xml").getroot().findall("testsuite/testcase")
    assert [case.get("name", "").split()[0] for case in cases] == list(LOOSE.limits)
    failed = [case for case in cases if case.find("failure") is not None]
    assert [case.find("failure").get("message") for case in failed] == [line]
    page = Page((folder / "report.html").read_text())
    classes = [attrs.get("class", "") for _, attrs in page.elements]
    assert "verdict failed" in classes
    assert "verdict passed" not in classes
    assert any("above its limit of 0.001" in text for text in page.text)


def test_the_gate_on_its_own(ran, monkeypatch, capsys, unmeasured):
    assert command(monkeypatch, "gate", ran) == 0
    assert "Gate passed" in capsys.readouterr().out
    assert "verdict passed" in (ran / "report.html").read_text()
    assert command(monkeypatch, "gate", ran, "flips=0", "nats=1") == 3
    out, err = capsys.readouterr()
    assert re.search(r"flips +FAILED +0\.\d+ +0 +files", out)
    assert err.startswith("qrot: gate failed: flips on files is ")
    assert command(monkeypatch, "gate", ran) == 0  # what is on the command line is not kept


BAD = [
    (["klx=1"], "unknown key 'gate.klx', did you mean 'gate.kl'?"),
    (["kl=much"], "gate.kl: expected a number or null, not 'much'"),
    (["kl=-1"], "gate.kl: -1.0 is negative"),
    (["flips=2"], "gate.flips: 2.0 is above 1"),
    (["kl"], "an override has the form"),
    (["zeroshot_drop=0.1"], "gate.zeroshot_drop: goes with tasks"),
    (["texts=[{}, {}]"], "gate.texts: names one twice"),
    ([f"{name}=null" for name in LOOSE.limits], "gate: sets no limit"),
]


@pytest.mark.parametrize(("limits", "said"), BAD, ids=lambda x: str(x)[:40])
def test_limits_that_are_none(ran, monkeypatch, capsys, limits, said):
    before = (ran / "gate.json").read_bytes()
    assert command(monkeypatch, "gate", ran, *limits) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert (ran / "gate.json").read_bytes() == before


def test_folders_that_have_nothing_to_judge(ran, tmp_path, monkeypatch, capsys):
    def said(*arguments):
        assert command(monkeypatch, "gate", *arguments) == 2
        return capsys.readouterr().err

    assert "absent: no run folder" in said(tmp_path / "absent", "kl=1")
    (ran / "gate.json").write_text("{")
    assert "gate.json: damaged" in said(ran)
    (ran / "gate.json").unlink()
    (ran / "network.safetensors").unlink()
    assert "kept no network" in said(ran)
    (ran / "results.json").unlink()
    assert "has no results.json yet" in said(ran)
    settings = yaml.safe_load((ran / "config.yaml").read_text())
    (ran / "config.yaml").write_text(yaml.safe_dump({**settings, "gate": None}))
    assert "has no gate; give limits, such as kl=0.1" in said(ran)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"keep": "none"}, "keep is none"),
        ({"methods": ("full_precision",)}, "no method to judge beside full precision"),
        ({"gate": Gate(zeroshot_drop=0.1)}, "goes with tasks"),
        (
            {
                "gate": Gate(zeroshot_drop=0.1),
                "zeroshot": ZeroShot(("a.jsonl",)),
                "methods": ("no_rotation",),
            },
            "full precision is not among the methods",
        ),
        ({"gate": Gate(kl=1.0, texts=(Data("files", "absent"),))}, "cannot be read"),
    ],
)
def test_a_gate_that_could_judge_nothing_is_refused_before_the_run(config, change, said):
    with pytest.raises(InputError, match=said):
        run(replace(passing(config), **change), quiet())
    assert not Path(config.out).exists()
