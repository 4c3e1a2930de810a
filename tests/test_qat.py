"""LLM-QAT: the text a network writes, the gradient through its grids, what training comes to."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrot.errors import InputError
from qrot.grid import Grid
from qrot.model.forward import forward
from qrot.network import fold, fuse
from qrot.quantize import qat as module
from qrot.quantize.qat import Qat, clip_ratios, generate_text, qat, student_loss
from qrot.quantize.rtn import rtn
from qrot.rotation.random import random_rotations
from qrot.rotation.transform import Transform
from qrot.scheme import Override, Scheme
from qrot.sites import PROJECTIONS

pytestmark = pytest.mark.usefixtures("quick_compile")
W3A8 = Scheme(Grid(3), Grid(8), Grid(8), Grid(8, "asymmetric"))
SETTINGS = Qat(steps=12, batch=4, length=16, learning_rate=3e-3)


def written(network, seed=0, count=SETTINGS.steps * SETTINGS.batch):
    return generate_text(network, count=count, length=16, seed=seed)


@pytest.fixture(scope="module")
def network(variant):
    return fold(variant("llama-biases").network)


@pytest.fixture(scope="module")
def rows(network):
    return written(network)


def random(network):
    return Transform(random_rotations(network.config, 0))


@pytest.fixture(scope="module")
def fused(network):
    """All rotations fused."""
    return fuse(network, random(network))


def trained(network, rows, scheme=W3A8, settings=SETTINGS, **options):
    return qat(network.replace(scheme=scheme), rows, settings, **options)


def plainly(network, scheme=W3A8):
    return rtn(network.replace(scheme=scheme))


def kl(after, before, rows):
    """From the full-precision network's predictions to those of `after` on its grids, in numpy."""
    pair = before.replace(scheme=Scheme()), after
    p, q = (np.asarray(forward(x, jnp.asarray(rows)), np.float64) for x in pair)
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (p, q))
    return (np.exp(p) * (p - q)).sum(-1).mean()


def weights(network, name):
    return np.asarray(network.params.layers.linear(name).weight, np.float64)


def test_the_text_begins_as_the_paper_says(network, rows):
    assert rows.shape == (48, 16)
    assert rows.dtype == np.int32
    assert len(np.unique(rows[:, 0])) > 20
    best = np.asarray(forward(network, jnp.asarray(rows))).argmax(-1)
    for i, row in enumerate(rows):
        greedy = (3, 4, 5)[i % 3]
        np.testing.assert_array_equal(row[1:greedy], best[i, : greedy - 1])
    drawn = (rows[:, 5:] != best[:, 4:-1]).mean()
    assert drawn > 0.2


def test_the_text_is_by_seed_and_at_full_precision(network, rows, monkeypatch):
    np.testing.assert_array_equal(written(network.replace(scheme=W3A8)), rows)
    assert (written(network, seed=1) != rows).any(1).all()
    done = []
    monkeypatch.setattr(module, "AT_ONCE", 20)
    generate_text(network, count=48, length=6, seed=0, advance=done.append)
    assert done == [20, 20, 8]


@pytest.mark.parametrize("clip", [0.9, "mse"])
def test_the_gradient_reaches_all_that_is_in_the_layers(variant, clip):
    scheme = replace(W3A8, weights=Grid(3, clip=clip))
    network = fold(variant("qwen3-biases").network).replace(scheme=scheme)
    layers = network.params.layers
    rows = jnp.asarray(np.random.default_rng(0).integers(0, 97, (2, 8)), jnp.int32)
    gradient = jax.grad(student_loss)(layers, network, clip_ratios(layers, scheme), rows)
    for name in PROJECTIONS:
        reached = np.abs(np.asarray(gradient.linear(name).weight)).max(1)
        assert (reached > 0).mean() > 0.9
    for leaf in jax.tree.leaves(gradient):
        assert np.isfinite(leaf).all()
        assert (np.abs(np.asarray(leaf)).reshape(3, -1).max(1) > 0).all()


def test_the_loss_is_the_kl_of_the_rounded_network(fused, rows):
    network = fused.replace(scheme=W3A8)
    layers = network.params.layers
    ratios = clip_ratios(layers, W3A8)
    loss = student_loss(layers, network, ratios, jnp.asarray(rows[:4]))
    assert float(loss) == pytest.approx(kl(rtn(network), network, rows[:4]), rel=1e-4)


@pytest.mark.parametrize("rotated", [False, True])
def test_training_brings_the_predictions_nearer(network, rows, fused, rotated):
    """On text that was not trained on, than rounding to nearest; the same twice."""
    before, notes = fused if rotated else network, []
    after = trained(before, rows, advance=lambda note: notes.append(note))
    assert len(notes) == SETTINGS.steps
    assert all(note.startswith("loss ") for note in notes)
    held_out = written(network, seed=1, count=32)
    found, plain = (kl(x, before, held_out) for x in (after, plainly(before)))
    assert found < 0.8 * plain
    again = trained(before, rows)
    for a, b in zip(*map(jax.tree.leaves, (again, after)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_comes_out_is_on_its_grid_and_only_layers_change(network, rows):
    overrides = (Override("layers.1.*", weights=8), Override("*.down", weights=16))
    scheme = replace(W3A8, overrides=overrides)
    after = trained(network, rows, scheme, replace(SETTINGS, steps=2))
    for name in PROJECTIONS:
        for i in range(3):
            levels = max(len(np.unique(column)) for column in weights(after, name)[i].T)
            assert levels > 40 if name == "down" else levels <= (48 if i == 1 else 8)
        linear = after.params.layers.linear(name)
        if name == "down":
            assert linear.scale is None
            continue
        w, scale = np.asarray(linear.weight), np.asarray(linear.scale)
        np.testing.assert_array_equal(np.rint(w / scale) * scale, w)
        assert np.abs(np.rint(w / scale)).max() <= 128
    for name in ("embed", "norm", "head"):
        a, b = (getattr(x.params, name) for x in (after, network))
        np.testing.assert_array_equal(a, b)
    for name in PROJECTIONS:
        a, b = (x.params.layers.linear(name).bias for x in (after, network))
        assert (np.asarray(a) != np.asarray(b)).any()
    for name in ("attention_norm", "mlp_norm"):
        a, b = (getattr(x.params.layers, name) for x in (after, network))
        assert (np.asarray(a) != np.asarray(b)).any()


@pytest.mark.parametrize("grid", [Grid(3), Grid(3, granularity="group", group=4, clip="mse")])
def test_a_rate_of_nearly_nothing_is_rounding_to_nearest(network, rows, grid):
    scheme, settings = Scheme(weights=grid), replace(SETTINGS, steps=1, learning_rate=1e-30)
    after, plain = trained(network, rows, scheme, settings), plainly(network, scheme)
    for a, b in zip(*map(jax.tree.leaves, (after, plain)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_weights_in_bfloat16_are_trained_in_float32(network, rows):
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), network.params)
    narrow = network.replace(params=params)
    after = trained(narrow, rows, W3A8, replace(SETTINGS, steps=2))
    layers = after.params.layers
    bare = layers.replace(**{n: layers.linear(n).replace(scale=None) for n in PROJECTIONS})
    leaves = jax.tree.leaves(after.params.replace(layers=bare))
    assert {x.dtype for x in leaves} == {jnp.dtype(jnp.bfloat16)}
    assert (weights(after, "q") != weights(plainly(narrow), "q")).any()


def test_what_cannot_be_trained(network, rows):
    with pytest.raises(ValueError, match="fuse first"):
        trained(network.replace(online=random(network)), rows)
    params = network.params
    broken = network.replace(params=params.replace(embed=params.embed * np.inf))
    with pytest.raises(InputError, match="the loss of step 1 is not finite"):
        trained(broken, rows)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"steps": 0}, "weights.steps: 0 is not positive"),
        ({"batch": 0}, "weights.batch: 0 is not positive"),
        ({"length": 5}, "weights.length: of 5 tokens none would be drawn"),
        ({"learning_rate": 0.0}, "weights.learning_rate: 0.0 is not positive"),
        ({"seed": -1}, "weights.seed: a seed is not negative"),
    ],
)
def test_settings_out_of_range(change, sentence):
    with pytest.raises(InputError) as error:
        Qat(**change)
    assert str(error.value) == sentence
