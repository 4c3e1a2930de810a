"""Networks that stay in a run folder, and judging them again."""

import json
import re
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from runs import CHEAP, quiet

from qrot.errors import InputError
from qrot.grid import Grid
from qrot.quantize.keep import load_network, read_about
from qrot.quantize.mixed import Mixed
from qrot.report.results import notes
from qrot.rotation.random import RotationSites
from qrot.rotation.store import load_rotations
from qrot.run import run as module
from qrot.run.run import run
from qrot.scheme import Scheme

ROTATED = ("full_precision", "no_rotation", "random_hadamard")


@pytest.fixture
def judged(monkeypatch):
    """The networks that were judged, by row."""
    networks, original = {}, module.judge

    def judge(inputs, name, network):
        networks[name] = network
        return original(inputs, name, network)

    monkeypatch.setattr(module, "judge", judge)
    return networks


def same(a, b):
    assert (a.config, a.scheme) == (b.config, b.scheme)
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def test_the_best_row_is_kept_as_it_was_judged(config, judged):
    found = run(replace(config, methods=ROTATED), quiet())
    best = min((row for row in found["rows"] if row["weights"] < 16), key=lambda row: row["nll"])
    name = {None: "no rotation"}.get(best["seed"], f"random hadamard, seed {best['seed']}")
    network, about = load_network(Path(config.out) / "network.safetensors")
    same(network, judged[name])
    assert about["row"] == name
    assert (about["method"], about["seed"], about["nll"]) == (
        best["method"],
        best["seed"],
        best["nll"],
    )
    assert (about["model"], about["digest"]) == (config.model, found["protocol"]["digest"])
    assert about["weights"] == {"method": "rtn"}
    assert about["data"]["source"] == "files"
    assert about["calibration"] == {"windows": 64, "length": 512}
    assert about["scheme"]["weights"]["clip"] == "mse"
    assert about["grids"][0][:2] == [0, 3]


def test_every_row_is_kept_or_none(config, judged):
    found = run(replace(config, methods=ROTATED, keep="all"), quiet())
    files = sorted((Path(config.out) / "networks").iterdir())
    names = ["no-rotation", "random-hadamard-seed-0", "random-hadamard-seed-1"]
    assert [file.stem for file in files] == names  # full precision is the model itself
    assert [read_about(file)["nll"] for file in files] == [r["nll"] for r in found["rows"][1:]]
    for file in files:
        same(load_network(file)[0], judged[read_about(file)["row"]])
    none = replace(config, methods=CHEAP, keep="none", out=config.out + "-none")
    run(none, quiet())
    assert not list(Path(none.out).rglob("network*"))


def test_nothing_is_kept_where_no_weight_is_rounded(config):
    scheme = replace(config.scheme, weights=Grid(16))
    run(replace(config, scheme=scheme, methods=CHEAP), quiet())
    assert not list(Path(config.out).rglob("network*"))


def test_a_resumed_run_keeps_the_best_of_all_its_rows(config, monkeypatch):
    config = replace(config, methods=ROTATED)
    whole = run(replace(config, out=config.out + "-whole"), quiet())
    expected = read_about(Path(config.out + "-whole") / "network.safetensors")["row"]
    original, writes = module.write_results, []

    def write_results(path, results):
        writes.append(path)
        if len(writes) == 3:  # the network of this row is kept, and results.json does not say so
            raise KeyboardInterrupt
        original(path, results)

    monkeypatch.setattr(module, "write_results", write_results)
    with pytest.raises(KeyboardInterrupt):
        run(config, quiet())
    monkeypatch.setattr(module, "write_results", original)
    found = run(config, quiet())
    assert [row["nll"] for row in found["rows"]] == [row["nll"] for row in whole["rows"]]
    about = read_about(Path(config.out) / "network.safetensors")
    assert about["row"] == expected
    assert about["nll"] == min(row["nll"] for row in found["rows"][1:])


def test_a_kept_network_is_judged_as_it_is(config, judged):
    mixed = Mixed(3.5, (2, 3, 4, 8), windows=3)
    config = replace(config, methods=("random_hadamard",), seeds=(1,), mixed=mixed)
    config = replace(config, calibration=replace(config.calibration, windows=6, length=16))
    (row,) = run(config, quiet())["rows"]
    kept = Path(config.out) / "network.safetensors"
    again = replace(
        config,
        out=config.out + "-again",
        methods=("full_precision", "saved"),
        saved=str(kept),
        mixed=None,
        scheme=Scheme(),
        rotations=RotationSites(down=False),
    )
    _, found = run(again, quiet())["rows"]
    same(judged["saved"], judged["random hadamard, seed 1"])
    assert found["nll"] == row["nll"]
    keys = ("weights", "activations", "keys", "values", "mixed")
    assert [found[key] for key in keys] == [row[key] for key in keys]
    assert found["rotation_seed"] == 1
    assert found["network"] == str(kept)
    assert not (Path(again.out) / "network.safetensors").exists()  # it is kept where it was built
    assert json.loads((Path(again.out) / "anatomy.json").read_text())["after"] == ""


@pytest.mark.parametrize(
    ("method", "file"),
    [("no_rotation", "network.safetensors"), ("equalised", "equalised.safetensors")],
)
def test_what_is_of_another_model_is_refused_or_told_of(config, tiny, tmp_path, method, file):
    run(replace(config, methods=(method,)), quiet())
    kept, other = Path(config.out) / file, tmp_path / "other"
    other.mkdir()
    for part in (tiny / "model").iterdir():
        content = part.read_bytes()
        changed = content[:-4] + b"\0\0\0\0" if part.suffix == ".safetensors" else content
        (other / part.name).write_bytes(changed)
    again = {"methods": ("saved",), "saved": str(kept), "out": config.out + "-again"}
    said = r"\.safetensors: fitted to .* not to this model \(.* differs, and so do 0 of the other"
    with pytest.raises(InputError, match=said):
        run(replace(config, model=str(other), **again), quiet())
    assert not Path(again["out"]).exists()
    allowed = replace(config, model=str(other), allow_mismatch=True, **again)
    with pytest.warns(UserWarning, match=said):
        results = run(allowed, quiet())
    (row,) = results["rows"]
    assert re.search(said, row["mismatch"])
    assert f"Made with allow_mismatch: {row['mismatch']}." in notes(results)


def test_the_revision_of_the_hub_is_kept(config, monkeypatch):
    original = module.prepare

    def prepare(*arguments):
        inputs = original(*arguments)
        return replace(inputs, model=inputs.model.replace(revision="0123abc"))

    monkeypatch.setattr(module, "prepare", prepare)
    run(replace(config, methods=("no_rotation", "equalised")), quiet())
    assert read_about(Path(config.out) / "network.safetensors")["revision"] == "0123abc"
    _, metadata = load_rotations(Path(config.out) / "equalised.safetensors")
    assert metadata["revision"] == "0123abc"
