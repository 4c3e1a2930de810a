"""Outliers: the figures by hand, and what a rotation does to a model that is known to have them."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from models import write_variant
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel

from qrot.calibrate.capture import capture
from qrot.cli import app
from qrot.errors import InputError
from qrot.evaluate.outliers import outliers
from qrot.grid import Grid
from qrot.learn.objectives.fisher import fisher
from qrot.model.io.load import load
from qrot.network import fold
from qrot.rotation.random import random_rotations
from qrot.rotation.transform import Transform
from qrot.run.inspect import STEPS, inspect
from qrot.scheme import Override, Scheme
from qrot.sites import PROJECTIONS, SITES

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
    """(folded network with two loud channels, rotations, what inspect finds)."""
    model = variant("llama-biases")
    network = fold(model.network).replace(scheme=SCHEME)
    loud = jnp.ones(48).at[jnp.array([5, 30])].set(40.0)
    params = network.params.replace(embed=network.params.embed * loud)
    network = network.replace(params=params)
    transform, ticks = Transform(random_rotations(network.config, 7)), []
    model = model.replace(network=network)
    found = inspect(model, ROWS, transform, advance=lambda: ticks.append(1))
    assert len(ticks) == STEPS
    return network, transform, found


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
    network, transform, found = looked_at
    captured, _ = capture(network, ROWS, vectors=16, seed=0, gradients=True)
    for when, state in (("before", Transform()), ("after", transform)):
        expected = fisher(state, network, captured)
        total = sum(layer[when]["cost"] for site in SITES for layer in found["sites"][site])
        np.testing.assert_allclose(total, expected, rtol=1e-4)


def test_weights_are_told_by_output(looked_at):
    network, _, found = looked_at
    assert set(found["weights"]) == set(PROJECTIONS)
    weight = np.asarray(network.params.layers.up.weight[1])
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
    config = load(str(tmp_path / "model")).network.config
    assert len(json.loads(out.read_text())["sites"]["down"]) == config.num_hidden_layers
    with pytest.raises(InputError, match="absent is no folder"):
        app([*arguments, "--out", str(tmp_path / "absent" / "x")], standalone_mode=False)
    with pytest.raises(InputError, match="/absent: cannot be read"):
        app(["inspect", str(tmp_path / "model"), "--text", "/absent"], standalone_mode=False)
