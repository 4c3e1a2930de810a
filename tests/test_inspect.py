"""Outliers: the figures by hand, and what a rotation does to a model that is known to have them."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from models import write_variant
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel

from qrot.cli import app
from qrot.errors import InputError
from qrot.evaluate.outliers import outliers
from qrot.run.inspect import SITES, STEPS, inspect
from qrot.grid import Grid
from qrot.calibrate.capture import capture
from qrot.learn.site_wise import fisher
from qrot.network import fold_norms
from qrot.model.io.load import load
from qrot.sites import PROJECTIONS
from qrot.rotation.random import random_rotations
from qrot.rotation.forms import Learned, Rotations
from qrot.scheme import Override, Scheme

pytestmark = pytest.mark.usefixtures("quick_compile")
A4 = Grid(4, "asymmetric")
SCHEME = Scheme(activations=A4, keys=A4, values=A4, overrides=(Override("*.down", activations=8),))
ROWS = np.random.default_rng(1).integers(0, 97, (3, 16), np.int32)


def test_figures_by_hand():
    x = np.random.default_rng(0).standard_normal((50, 24))
    x[:, 7] *= 30
    x[4, 3] = -500
    found = outliers(jnp.asarray(x, jnp.float32))
    size = np.abs(x)
    np.testing.assert_allclose(found.largest, size.max(0), rtol=1e-6)
    np.testing.assert_allclose(found.tops, size.max(1), rtol=1e-6)
    np.testing.assert_allclose(found.ratio, 500 / np.median(size.max(0)), rtol=1e-6)
    crest = size.max(1) / np.sqrt(np.mean(x**2, 1))
    np.testing.assert_allclose(found.crest, np.median(crest), rtol=1e-6)
    share = size.max(1) / np.linalg.norm(x, axis=1)
    np.testing.assert_allclose(found.incoherence, np.median(share), rtol=1e-6)
    np.testing.assert_allclose(found.kurtosis, np.mean(x**4) / np.mean(x**2) ** 2, rtol=1e-5)


def test_extremes():
    np.testing.assert_allclose(outliers(jnp.ones((3, 16))).incoherence, 0.25)
    np.testing.assert_allclose(outliers(jnp.eye(16)).incoherence, 1)
    np.testing.assert_allclose(outliers(jnp.eye(16) * 1e30).kurtosis, 16, rtol=1e-5)
    assert np.isfinite(float(outliers(jnp.zeros((3, 4))).kurtosis))


@pytest.fixture(scope="module")
def looked_at(variant):
    """(folded model with two loud channels, rotations, what inspect finds)."""
    model = fold_norms(variant("llama-biases"))
    params = model.params
    loud = jnp.ones(48).at[jnp.array([5, 30])].set(40.0)
    model = model.replace(params=params.replace(embed=params.embed * loud))
    learned, ticks = Learned(random_rotations(model.config, 0)), []
    found = inspect(model, ROWS, learned, SCHEME, advance=lambda: ticks.append(1))
    assert len(ticks) == STEPS
    return model, learned, found


def test_a_rotation_spreads_loud_channels(looked_at):
    _, _, found = looked_at
    assert set(found["sites"]) == {"residual", *SITES}
    residual = found["sites"]["residual"]
    assert len(residual) == 4  # the input of each layer, and the output of the last
    for layer in residual:
        assert layer["before"]["ratio"] > layer["after"]["ratio"]
        assert layer["before"]["crest"] > layer["after"]["crest"]
    assert {i for i, _ in residual[0]["before"]["channels"][:2]} == {5, 30}
    assert residual[0]["before"]["ratio"] > 10 * residual[0]["after"]["ratio"]
    for layer in found["sites"]["qkv"]:
        assert layer["before"]["error"] > layer["after"]["error"] > 0
    text, place, size = residual[0]["before"]["tokens"][0]
    assert isinstance(text, str)
    assert 0 <= place < 16
    assert size == pytest.approx(residual[0]["before"]["channels"][0][1], rel=1e-2)


def test_the_costs_add_up_to_the_objective(looked_at):
    model, learned, found = looked_at
    captured, _ = capture(model, ROWS, taps=16, seed=0, gradients=True)
    for when, state in (("before", Learned(Rotations())), ("after", learned)):
        expected = fisher(state, model.params, captured, model.config, SCHEME)
        total = sum(layer[when]["cost"] for site in SITES for layer in found["sites"][site])
        np.testing.assert_allclose(total, expected, rtol=1e-4)


def test_weights_are_told_by_output(looked_at):
    model, _, found = looked_at
    assert set(found["weights"]) == set(PROJECTIONS)
    weight = np.asarray(model.params.layers.up.weight[1])
    largest = found["weights"]["up"][1]["before"]["channels"][0]
    inputs = np.abs(weight).max(1)
    assert largest == [int(inputs.argmax()), pytest.approx(float(inputs.max()))]


def test_the_command(tmp_path, capsys):
    write_variant(tmp_path / "model", "llama-tied")
    text, out = tmp_path / "text.txt", tmp_path / "found.json"
    text.write_text(" ".join(f"w{i % 40}" for i in range(200)))
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "model" / "tokenizer.json"))
    arguments = ["inspect", str(tmp_path / "model"), "--text", str(text), "--length", "16"]
    app([*arguments, "--windows", "2", "--out", str(out)], standalone_mode=False)
    printed = capsys.readouterr().out
    for word in ("residual", "gate_up", "What it will cost most to round", "Weights"):
        assert word in printed
    assert set(json.loads(out.read_text())) == {"sites", "weights"}
    model = load(str(tmp_path / "model"))
    assert len(json.loads(out.read_text())["sites"]["down"]) == model.config.num_hidden_layers
    with pytest.raises(InputError, match="absent is no folder"):
        app([*arguments, "--out", str(tmp_path / "absent" / "x")], standalone_mode=False)
    with pytest.raises(InputError, match="cannot be read as text"):
        app(["inspect", str(tmp_path / "model"), "--text", "/absent"], standalone_mode=False)
