"""A refusal is one sentence and exit code 2, and leaves everything as it was."""

import json
import sys
import warnings

import numpy as np
import pytest
from exports import save, write_model

from qrot import cli
from qrot.rotation.forms import Dense
from qrot.rotation.transform import Transform
from qrot.scheme import Scheme


def tree(folder):
    return {
        str(path.relative_to(folder)): (path.lstat().st_mode, path.read_bytes())
        if path.is_file()
        else path.lstat().st_mode
        for path in folder.rglob("*")
    }


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Models, good and bad, rotations, a text, configurations and what is in the way of an out."""
    place = tmp_path_factory.mktemp("place")
    for name in ("model", "other", "unknown", "truncated"):
        write_model(place / name, "llama-tied" if name == "other" else "llama")
    settings = json.loads((place / "unknown" / "config.json").read_text())
    (place / "unknown" / "config.json").write_text(json.dumps({**settings, "is_causal": False}))
    weights = place / "truncated" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    turn = np.linalg.qr(np.random.default_rng(0).normal(size=(48, 48)))[0].astype(np.float32)
    save(place / "model", Transform({"residual": Dense(turn)}), Scheme())
    (place / "garbage.safetensors").write_bytes(b"garbage, and no safetensors file at all")
    (place / "R.bin").write_bytes(b"garbage")
    (place / "text.txt").write_text("a few words")
    (place / "runs").mkdir()
    (place / "full").mkdir()
    (place / "full" / "a").write_text("mine")
    (place / "bad.yaml").write_text("model: model\nmodel: other\n")
    (place / "good.yaml").write_text("model: model\nmethods: [no_rotation]\nout: out\n")
    return place


EXPORT = "export model.safetensors --out"
IMPORT = "--model model --weight-bits 4 --out"
REFUSALS = [
    f"{EXPORT} full",
    f"{EXPORT} text.txt",
    f"{EXPORT} text.txt/below",
    f"{EXPORT} .",
    f"{EXPORT} /",
    f"{EXPORT} {'x' * 300}",
    f"{EXPORT} a/b/c --format onnx",
    f"{EXPORT} a/b/c --dtype int8",
    f"{EXPORT} a/b/c --weights awk",
    f"{EXPORT} a/b/c --model other",
    f"{EXPORT} a/b/c --model absent",
    f"{EXPORT} a/b/c --model unknown",
    f"{EXPORT} a/b/c --model truncated",
    f"{EXPORT} a/b/c --format compressed-tensors --scheme W4A4 --online",
    "export absent --out out",
    "export garbage.safetensors --out out",
    "export runs --out out",
    "export model --out out",
    f"import R.bin {IMPORT} out",
    f"import absent.bin {IMPORT} out",
    f"import R.bin {IMPORT} text.txt",
    f"import R.bin {IMPORT} absent/out",
    f"import R.bin {IMPORT} full",
    f"import R.bin {IMPORT} {'x' * 300}",
    "inspect model --out absent/found.json",
    "inspect model --out full",
    "inspect model --out /dev/null/found.json",
    "inspect absent --out found.json",
    "inspect unknown --out found.json",
    "inspect truncated --out found.json",
    "inspect model --rotations absent --out found.json",
    "inspect model --rotations garbage.safetensors --out found.json",
    "inspect model --text absent --out found.json",
    "inspect model --text text.txt --out found.json",
    "generate absent the",
    "generate unknown the",
    "generate garbage.safetensors the",
    "compare runs",
    "compare absent",
    "compare runs --report absent/report.html",
    "compare runs --report full",
    "compare runs --format html",
    "run absent.yaml",
    "run bad.yaml",
    "run good.yaml model=absent",
    "run good.yaml model=unknown",
    "run good.yaml modell=model",
    "run good.yaml out=text.txt",
    "run good.yaml out=full",
    "run good.yaml methods=[nothing]",
    "run good.yaml scheme.weights.bits=1",
    "run good.yaml data.source=files data.path=absent",
    "bench kernels --size 33",
]


@pytest.mark.parametrize("command", REFUSALS, ids=lambda command: command[:60])
def test_refused(place, monkeypatch, capsys, command):
    before = tree(place)
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "argv", ["qrot", *command.split()])
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    with pytest.raises(SystemExit) as end:
        cli.main()
    said = capsys.readouterr().err
    assert end.value.code == 2
    assert said.startswith("qrot: ")
    assert said.count("\n") == 1
    assert tree(place) == before
