"""Rotations carried over to other weights: measured, decided, and judged in a run of its own."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from learning import matrix
from runs import quiet
from safetensors.numpy import load_file, save_file

from qrot.calibrate.capture import capture
from qrot.cli import main
from qrot.errors import InputError
from qrot.export.source import open_source
from qrot.quantize.keep import read_about
from qrot.report.run import write_report
from qrot.rotation.store import load_rotations, read_metadata
from qrot.run import moved
from qrot.run.moved import hellinger
from qrot.run.read import read_config
from qrot.run.refresh import decided, is_aligned, refresh
from qrot.run.results import read_refresh
from qrot.run.run import run
from qrot.run.thresholds import Refresh

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture
def parent(config):
    """A run that learned rotations."""
    run(replace(config, methods=("learned",)), quiet())
    return Path(config.out)


@pytest.fixture
def others(tiny, tmp_path):
    """(name, change) -> a model whose tensors were changed."""

    def make(name, change):
        folder = tmp_path / name
        shutil.copytree(tiny / "model", folder)
        file = folder / "model.safetensors"
        tensors = {k: np.ascontiguousarray(change(k, x)) for k, x in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
        return str(folder)

    return make


def nudged(key, x):
    return x * np.float32(1.0001)


def louder(key, x):
    """A few channels of the residual stream are written a hundred times as loud."""
    if key.endswith(("embed_tokens.weight", "o_proj.weight", "down_proj.weight")):
        x = x.copy()
        (x if key.startswith("model.embed") else x.T)[..., :3] *= 100
    return x


def test_weights_that_hardly_differ_keep_the_rotations(parent, others, tmp_path):
    model, out = others("nudged", nudged), tmp_path / "new"
    found = refresh(parent, model, out, ["refresh.keep=1.5"], quiet())
    assert found.found["decision"] == "keep"
    assert [row["method"] for row in found.results["rows"]] == ["full_precision", "saved"]
    as_they_are = found.config.saved == str(parent / "rotations.safetensors")
    assert ("mismatch" in found.results["rows"][1]) == as_they_are
    assert found.found == read_refresh(out / "refresh.json")
    of = found.found["of"]
    assert of["before"] != of["after"]
    assert of["difference"].startswith("lm_head") or "model." in of["difference"]
    # It stands on its own: exported, and refreshed again, without its parent.
    shutil.rmtree(parent)
    source = open_source(out)
    assert source.rotations == out / "saved.safetensors"
    assert read_metadata(out / "saved.safetensors")["model"] == model
    assert read_about(out / "network.safetensors")["fingerprint"]["total"] == of["after"]
    again = refresh(out, model, tmp_path / "again", [], quiet())
    assert again.found["moved"]["kl"]["before"] == again.found["moved"]["kl"]["after"]
    assert again.found["decision"] == "keep"
    assert again.found["of"]["difference"] is None


def test_what_was_measured_of_the_old_weights_is_not_measured_again(
    parent, others, tmp_path, monkeypatch
):
    model = others("louder", louder)
    first = refresh(parent, model, tmp_path / "first", ["refresh.keep=1e9"], quiet()).found
    gradients = []

    def seen(*arguments, **options):
        gradients.append(options["gradients"])
        return capture(*arguments, **options)

    monkeypatch.setattr(moved, "capture", seen)
    second = refresh(parent, model, tmp_path / "second", ["refresh.keep=1e9"], quiet()).found
    assert gradients == [False, True]
    assert second["moved"] == first["moved"]
    # Other settings of learning: other windows.
    other = ["refresh.keep=1e9", "learn.held_out=1"]
    third = refresh(parent, model, tmp_path / "third", other, quiet()).found
    assert gradients[2:] == [True, True]
    assert third["moved"]["kl"]["before"] != first["moved"]["kl"]["before"]
    (parent / "before.json").write_text("{}")
    with pytest.raises(InputError, match=r"before\.json: damaged"):
        refresh(parent, model, tmp_path / "fourth", [], quiet())


def test_weights_with_other_outliers_have_it_learned_anew(parent, others, tmp_path):
    model, out = others("louder", louder), tmp_path / "new"
    found = refresh(parent, model, out, ["refresh.keep=1", "refresh.relearn=0.001"], quiet())
    assert found.found["decision"] == "relearn"
    assert found.config.learn == read_config(parent / "config.yaml").learn
    assert {row["method"] for row in found.results["rows"]} >= {"saved", "learned"}
    moved = found.found["moved"]["sites"]
    assert min(moved["qkv"]["distance"]) > 0.1
    write_report(out)
    page = (out / "report.html").read_text()
    assert "Refreshed" in page
    assert "rotations are learned from scratch" in page
    assert page.count('class="cells"') >= 3


def test_in_between_learning_starts_with_the_old_ones(parent, others, tmp_path):
    model, out = others("louder", louder), tmp_path / "new"
    limits = ["refresh.keep=1", "refresh.relearn=1000", "refresh.steps=0.5"]
    found = refresh(parent, model, out, limits, quiet())
    assert found.found["decision"] == "warm"
    assert (found.config.learn.start, found.config.learn.steps) == ("saved", 2)
    # A kill and a second call: nothing is compared or learned again.
    (out / "results.json").unlink()
    again = refresh(parent, model, out, limits, quiet())
    assert again.found["seconds"] == found.found["seconds"]
    assert [r["nll"] for r in again.results["rows"]] == [r["nll"] for r in found.results["rows"]]


@pytest.mark.parametrize(
    ("after", "aligned", "decision"),
    [
        (1.0, 9, "keep"),
        (0.95, 9, "keep"),
        (0.5, 9, "warm"),
        (9, 1.1, "keep"),
        (1.2, 1.1, "warm"),
        (4, 3.5, "relearn"),
    ],
)
def test_the_rule(after, aligned, decision):
    kl = {"before": 1.0, "after": after, "aligned": aligned}
    assert decided(kl, Refresh(keep=1.1, relearn=3.0)) == decision


def test_aligned_rotations_count_where_they_are_clearly_better():
    kl = {"before": 1.0, "after": 1.2, "aligned": 1.0}
    assert is_aligned(kl, Refresh())
    assert decided(kl, Refresh()) == "keep"
    assert not is_aligned(kl, Refresh(align=0.5))
    assert decided(kl, Refresh(align=0.5)) == "warm"


def swapped(order, key, x):
    """The channels of the residual stream in another order: the same function."""
    if key.endswith(("embed_tokens.weight", "q_proj.weight", "k_proj.weight", "v_proj.weight")):
        return x[:, order]
    if key.endswith(("gate_proj.weight", "up_proj.weight")):
        return x[:, order]
    if key.endswith(("o_proj.weight", "down_proj.weight")):
        return x[order]
    return x[order] if key.endswith("norm.weight") else x


def test_channels_in_another_order_are_aligned(parent, others, tmp_path):
    """Then the network sees what it saw before, without learning."""
    order = np.random.default_rng(0).permutation(48)
    model, out = others("swapped", partial(swapped, order)), tmp_path / "new"
    found = refresh(parent, model, out, ["refresh.align=1"], quiet())
    kl = found.found["moved"]["kl"]
    assert kl["aligned"] == pytest.approx(kl["before"], rel=0.02)
    assert kl["after"] > 1.03 * kl["before"]
    assert found.found["decision"] == "keep"
    assert found.config.saved == str(out / "aligned.safetensors")
    files = parent / "rotations.safetensors", out / "saved.safetensors"
    old, new = (matrix(load_rotations(file)[0], "residual") for file in files)
    np.testing.assert_allclose(new, old[order], atol=1e-3)
    assert "mismatch" not in found.results["rows"][1]
    assert read_metadata(out / "saved.safetensors")["fingerprint"]["total"] == of_weights(found)


def of_weights(found):
    """The fingerprint of the new weights."""
    return found.found["of"]["after"]


def test_hellinger_by_hand():
    p, q = np.array([[0.5, 0.5], [1.0, 0.0]]), np.array([[0.5, 0.5], [0.0, 1.0]])
    np.testing.assert_allclose(hellinger(p, q), [0, 1])
    half = hellinger(np.array([[1.0, 0.0]]), np.array([[0.5, 0.5]]))
    assert half == pytest.approx(np.sqrt(1 - np.sqrt(0.5)))


def test_what_cannot_be_refreshed_is_one_sentence(parent, others, tmp_path, capsys, monkeypatch):
    model = others("nudged", nudged)

    def refused(*arguments):
        monkeypatch.setattr("sys.argv", ["qrot", "refresh", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 2
        return capsys.readouterr().err

    assert "no run folder" in refused(tmp_path / "nowhere", "--model", model)
    assert "--adapter: goes with --model" in refused(parent, "--adapter", "x")
    assert "unknown key 'refresh.kep'" in refused(parent, "--model", model, "refresh.kep=2")
    assert "refresh.keep: 0.5 is below 1" in refused(parent, "--model", model, "refresh.keep=0.5")
    settings = json.loads((Path(model) / "config.json").read_text())
    (Path(model) / "config.json").write_text(json.dumps({**settings, "rms_norm_eps": 1e-4}))
    assert "--model: has rms_norm_eps 0.0001" in refused(parent, "--model", model)
    assert not Path(f"{parent}-refreshed").exists()
    shutil.rmtree(parent / "network.safetensors", ignore_errors=True)
    for file in parent.glob("*.safetensors"):
        file.unlink()
    assert "without learned rotations" in refused(parent, "--model", model)


def test_a_start_that_is_not_of_the_settings_is_refused(parent, config):
    saved = parent / "rotations.safetensors"
    learn = replace(config.learn, start="saved")
    again = replace(config, methods=("learned",), saved=str(saved), out=f"{parent}-more")
    found = run(replace(again, learn=learn), quiet())
    assert found["rows"][0]["start"] == "saved"
    for changes, words in (
        ({"clips": False}, "what was saved has clips"),
        ({"value_heads": True}, "rotations.value.* was saved with shape"),
    ):
        settings = replace(again, learn=replace(learn, **changes), out=f"{parent}-{words[:9]}")
        with pytest.raises(InputError, match=words):
            run(settings, quiet())
