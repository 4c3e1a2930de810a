"""LLM-QAT: the text a network writes, the gradient through its grids, what training comes to."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import without_weights

from qrot.errors import InputError
from qrot.grid import Grid
from qrot.learn import qat as module
from qrot.quantize.qat import Qat, clip_ratios, generate_text, qat, student_loss
from qrot.model.forward import forward
from qrot.network import fold_norms, fuse
from qrot.sites import PROJECTIONS
from qrot.quantize.rtn import rtn
from qrot.rotation.random import random_rotations
from qrot.scheme import Override, Scheme

pytestmark = pytest.mark.usefixtures("quick_compile")
W3A8 = Scheme(Grid(3), Grid(8), Grid(8), Grid(8, "asymmetric"))
SETTINGS = Qat(steps=12, batch=4, length=16, learning_rate=3e-3)


def written(model, seed=0, count=SETTINGS.steps * SETTINGS.batch):
    return generate_text(model.params, model.config, count=count, length=16, seed=seed)


@pytest.fixture(scope="module")
def model(variant):
    return fold_norms(variant("llama-biases"))


@pytest.fixture(scope="module")
def rows(model):
    return written(model)


@pytest.fixture(scope="module")
def rotated(model):
    """(parameters with all rotations fused, what is left online)."""
    params, online, _ = fuse(model.params, random_rotations(model.config, 0), model.config)
    return params, online


def trained(model, rows, scheme=W3A8, params=None, settings=SETTINGS, **options):
    params = params or model.params
    return qat(params, scheme, model.config, rows, settings=settings, **options)


def kl(after, before, rows, config, scheme, online=None):
    """From the full-precision network's predictions to those of `after` on its grids, in numpy."""
    p, q = (
        np.asarray(forward(x, jnp.asarray(rows), config, rotations=online, scheme=s), np.float64)
        for x, s in ((before, None), (after, scheme))
    )
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (p, q))
    return (np.exp(p) * (p - q)).sum(-1).mean()


def test_the_text_begins_as_the_paper_says(model, rows):
    assert rows.shape == (48, 16)
    assert rows.dtype == np.int32
    assert len(np.unique(rows[:, 0])) > 20
    best = np.asarray(forward(model.params, jnp.asarray(rows), model.config)).argmax(-1)
    for i, row in enumerate(rows):
        greedy = (3, 4, 5)[i % 3]
        np.testing.assert_array_equal(row[1:greedy], best[i, : greedy - 1])
    drawn = (rows[:, 5:] != best[:, 4:-1]).mean()
    assert drawn > 0.2


def test_the_text_is_by_seed(model, rows, monkeypatch):
    np.testing.assert_array_equal(written(model), rows)
    assert (written(model, seed=1) != rows).any(1).all()
    told = []
    monkeypatch.setattr(module, "AT_ONCE", 20)
    generate_text(model.params, model.config, count=48, length=6, seed=0, advance=told.append)
    assert told == [20, 20, 8]


@pytest.mark.parametrize("clip", [0.9, "mse"])
def test_the_gradient_reaches_all_that_is_in_the_layers(variant, clip):
    model = fold_norms(variant("qwen3-biases"))
    scheme = replace(W3A8, weights=Grid(3, clip=clip))
    layers = model.params.layers
    rows = jnp.asarray(np.random.default_rng(0).integers(0, 97, (2, 8)), jnp.int32)
    gradient = jax.grad(student_loss)(
        layers, model.params, clip_ratios(layers, scheme), rows, model.config, scheme
    )
    for name in PROJECTIONS:
        felt = np.abs(np.asarray(getattr(gradient, name).weight)).max(1)
        assert (felt > 0).mean() > 0.9
    for leaf in jax.tree.leaves(gradient):
        assert np.isfinite(leaf).all()
        assert (np.abs(np.asarray(leaf)).reshape(3, -1).max(1) > 0).all()


def test_the_loss_is_the_kl_of_the_rounded_network(rotated, model, rows):
    params, online = rotated
    loss = student_loss(
        params.layers,
        params,
        clip_ratios(params.layers, W3A8),
        jnp.asarray(rows[:4]),
        model.config,
        W3A8,
        rotations=online,
    )
    expected = kl(rtn(params, W3A8), params, rows[:4], model.config, W3A8, online)
    assert float(loss) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("turned", [False, True])
def test_training_brings_the_predictions_nearer(model, rows, rotated, turned):
    """On text that was not trained on, than rounding to nearest; the same twice."""
    params, online = rotated if turned else (model.params, None)
    losses = []
    after = trained(model, rows, params=params, rotations=online, advance=losses.append)
    assert len(losses) == SETTINGS.steps
    held_out = written(model, seed=1, count=32)
    found, plain = (
        kl(x, params, held_out, model.config, W3A8, online) for x in (after, rtn(params, W3A8))
    )
    assert found < 0.8 * plain
    again = trained(model, rows, params=params, rotations=online)
    for a, b in zip(*map(jax.tree.leaves, (again, after)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_comes_out_is_on_its_grid_and_only_layers_change(model, rows):
    overrides = (Override("layers.1.*", weights=8), Override("*.down", weights=16))
    scheme = replace(W3A8, overrides=overrides)
    settings = replace(SETTINGS, steps=2)
    after = trained(model, rows, scheme, settings=settings)
    for name in PROJECTIONS:
        weight = np.asarray(getattr(after.layers, name).weight, np.float64)
        for i in range(3):
            levels = max(len(np.unique(column)) for column in weight[i].T)
            assert levels > 40 if name == "down" else levels <= (48 if i == 1 else 8)
    for name in ("embed", "norm", "head"):
        np.testing.assert_array_equal(getattr(after, name), getattr(model.params, name))
    bare = without_weights(after).layers, without_weights(model.params).layers
    for a, b in zip(*map(jax.tree.leaves, bare), strict=True):
        assert (np.asarray(a) != np.asarray(b)).any()


@pytest.mark.parametrize("grid", [Grid(3), Grid(3, granularity="group", group=4, clip="mse")])
def test_a_rate_of_nearly_nothing_is_rounding_to_nearest(model, rows, grid):
    scheme, settings = Scheme(weights=grid), replace(SETTINGS, steps=1, learning_rate=1e-30)
    after, plain = trained(model, rows, scheme, settings=settings), rtn(model.params, scheme)
    for a, b in zip(*map(jax.tree.leaves, (after, plain)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_weights_in_bfloat16_are_trained_in_float32(model, rows):
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.params)
    settings = replace(SETTINGS, steps=2)
    after = trained(model, rows, W3A8, narrow, settings)
    assert {x.dtype for x in jax.tree.leaves(after)} == {jnp.dtype(jnp.bfloat16)}
    assert (after.layers.q.weight != rtn(narrow, W3A8).layers.q.weight).any()


def test_what_cannot_be_trained(model, rows):
    with pytest.raises(ValueError, match="fuse first"):
        trained(model, rows, rotations=random_rotations(model.config, 0))
    broken = model.params.replace(embed=model.params.embed * np.inf)
    with pytest.raises(InputError, match="the loss of step 1 is not finite"):
        trained(model, rows, params=broken)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"steps": 0}, "qat.steps: 0 is not positive"),
        ({"batch": 0}, "qat.batch: 0 is not positive"),
        ({"length": 5}, "qat.length: of 5 tokens none would be drawn"),
        ({"learning_rate": 0.0}, "qat.learning_rate: 0.0 is not positive"),
        ({"seed": -1}, "qat.seed: a seed is not negative"),
    ],
)
def test_settings_out_of_range(change, sentence):
    with pytest.raises(InputError) as error:
        Qat(**change)
    assert str(error.value) == sentence
