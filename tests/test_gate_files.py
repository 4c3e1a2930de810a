"""What a verdict does to files: which are read, and what is exported."""

import json
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest
from exports import export as exported
from gates import gated_run, measures_nothing, passing
from runs import quiet

from qrot.errors import InputError
from qrot.quantize.keep import read_about
from qrot.run.gate import gate_run
from qrot.run.results import read_gate
from qrot.run.run import run
from qrot.run.verdict import junit

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


DAMAGE = [
    (("passed",), False),
    (("limits", 0, "passed"), False),
    (("limits", 0, "value"), 1e9),
    (("limits",), []),
    (("limits", 0, "name"), "\x1b[31m"),
    (("measured", "texts", 0, "kl"), "none"),
    (("measured", "site_costs"), {"qkv": -1.0}),
    (("of", "digest"), 3),
]


@pytest.mark.parametrize(("path", "value"), DAMAGE, ids=str)
def test_a_verdict_that_does_not_hold_together_is_refused(ran, path, value):
    found = json.loads((ran / "gate.json").read_text())
    section = found
    for key in path[:-1]:
        section = section[key]
    section[path[-1]] = value
    (ran / "gate.json").write_text(json.dumps(found))
    with pytest.raises(InputError, match=r"gate\.json: damaged \(.*delete it to measure again"):
        read_gate(ran / "gate.json")


def test_junit_of_names_that_xml_has_no_form_for(done):
    found = read_gate(done / "gate.json")
    assert found
    found["of"]["row"] = "a\x00\x1b<&>\"'"
    suite = ElementTree.fromstring(junit(found).encode())
    assert suite.get("failures") == "0"
    assert suite.find("testsuite/properties/property").get("value") == "a\ufffd\ufffd<&>\"'"


# Export


def test_what_passed_is_exported_with_its_verdict(ran, tmp_path, monkeypatch):
    out = tmp_path / "out"
    assert exported(monkeypatch, ran, "--out", out, "--format", "torch") == 0
    row = read_about(ran / "network.safetensors")["row"]
    readme = (out / "README.md").read_text()
    assert f"{row} passed the gate of its run: perplexity_ratio " in readme


def test_what_failed_is_not_exported(ran, tmp_path, monkeypatch, capsys, unmeasured):
    gate_run(ran, ["kl=0.001"], quiet())
    for source in (ran, ran / "network.safetensors"):
        assert exported(monkeypatch, source, "--out", tmp_path / "out", "--format", "torch") == 2
        err = capsys.readouterr().err
        assert "its gate failed (kl on files is " in err
        assert "--ungated exports it all the same" in err
    assert not (tmp_path / "out").exists()
    arguments = (ran, "--out", tmp_path / "out", "--format", "torch", "--ungated")
    assert exported(monkeypatch, *arguments) == 0
    assert "Exported with --ungated: its gate failed" in (tmp_path / "out/README.md").read_text()


def test_what_was_not_judged_is_not_exported(ran, tmp_path, monkeypatch, capsys):
    def said(*arguments):
        arguments = (*arguments, "--out", tmp_path / "out", "--format", "torch")
        assert exported(monkeypatch, *arguments) == 2
        return capsys.readouterr().err

    assert "--weights makes another network" in said(ran, "--weights", "rtn")
    verdict = (ran / "gate.json").read_bytes()
    (ran / "gate.json").unlink()
    assert "has a gate that was not measured yet (`qrot gate " in said(ran)
    (ran / "gate.json").write_bytes(verdict)
    network = ran / "network.safetensors"
    content = bytearray(network.read_bytes())
    content[-1] ^= 1
    network.write_bytes(content)
    assert "in network.safetensors, which network.safetensors is not" in said(network)


def test_another_row_is_not_exported(config, tmp_path, monkeypatch, capsys):
    run(passing(config, keep="all"), quiet())
    folder = Path(config.out)
    found = read_gate(folder / "gate.json")
    assert found
    out = ("--out", tmp_path / "out", "--format", "torch")
    for file in (folder / "networks").iterdir():
        code = exported(monkeypatch, folder, "--row", file.stem, *out)
        assert code == (0 if file.samefile(folder / found["of"]["network"]) else 2)
        if code:
            assert f"its gate passed {found['of']['row']} in networks/" in capsys.readouterr().err
