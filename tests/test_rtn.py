"""Round-to-nearest, and the search for a weight's clip ratio."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import without_weights

from qrot.errors import InputError
from qrot.grid import Grid, fake_quantise
from qrot.sites import PROJECTIONS
from qrot.quantize.rtn import best_clip, mean_best_clip, round_weight, rtn
from qrot.scheme import Override, Scheme

pytestmark = pytest.mark.usefixtures("quick_compile")
GRANULARITIES = {"channel": None, "group": 8, "tensor": None}


def weight(*shape, seed=0):
    """Heavy tails, so that clipping pays."""
    return np.random.default_rng(seed).standard_t(4, shape).astype(np.float32)


def split(w, grid):
    """[..., values that share a scale, ...] and the axes of these values."""
    if grid.granularity == "group":
        return w.reshape(-1, grid.group, w.shape[-1]), (1,)
    return w, (0,) if grid.granularity == "channel" else (0, 1)


def squared_error(w, grid, clip):
    """For each scale, in numpy: as published, with nothing of qrot's."""
    w, axes = split(np.asarray(w, np.float64), grid)
    if grid.kind == "asymmetric":
        low, high = (f(e(w, axis=axes, keepdims=True), 0) * clip for f, e in EXTREMES)
        scale = (high - low) / (2**grid.bits - 1)
        zero = np.rint(-low / scale)
        first, last = -zero, 2**grid.bits - 1 - zero
    else:
        half = 2 ** (grid.bits - 1)
        steps = half - (1 if grid.kind == "symmetric" else 0.5)
        scale = np.abs(w).max(axes, keepdims=True) * clip / steps
        first, last = -half, half - 1
    error = np.clip(np.rint(w / scale), first, last) * scale - w
    return (error**2).sum(axes, keepdims=True)


EXTREMES = ((np.minimum, np.min), (np.maximum, np.max))


@pytest.mark.parametrize("kind", ["symmetric", "symmetric_half", "asymmetric"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_best_clip_is_the_best_of_all(granularity, kind):
    w = weight(64, 6)
    grid = Grid(4, kind, granularity, GRANULARITIES[granularity], clip="mse")
    found = np.asarray(best_clip(jnp.asarray(w), grid))
    assert found.shape == {"channel": (1, 6), "group": (8, 1, 6), "tensor": (1, 1)}[granularity]
    candidates = [1 - 0.02 * i for i in range(31)]
    errors = np.stack([squared_error(w, grid, c) for c in candidates])
    here = squared_error(w, grid, found.astype(np.float64))
    np.testing.assert_allclose(here, errors.min(0), rtol=1e-4)
    assert (here <= errors[0] * (1 + 1e-4)).all()
    assert (here < errors[0] * 0.99).any()  # clipping does pay here
    assert 0.4 - 1e-6 <= found.min() < found.max() + 1e-6 <= 1 + 2e-6


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_the_best_clip_is_used(granularity):
    w = jnp.asarray(weight(64, 6))
    grid = Grid(4, granularity=granularity, group=GRANULARITIES[granularity], clip="mse")
    clip = best_clip(w, grid)
    rounded = round_weight(w, grid)
    np.testing.assert_array_equal(rounded, fake_quantise(w, grid, axis=-2, clip=clip))
    parts, axes = split(np.asarray(rounded - w, np.float64), grid)
    error = (parts**2).sum(axes, keepdims=True)
    np.testing.assert_allclose(error, squared_error(w, grid, np.asarray(clip)), rtol=1e-3)


def test_best_clip_of_bfloat16_weights():
    """Errors are compared in float32, whatever the weights are."""
    w = jnp.asarray(weight(512, 6), jnp.bfloat16)
    grid = Grid(4, granularity="channel", clip="mse")
    wide = w.astype(jnp.float32)
    found, exact = (np.asarray(best_clip(x, grid), np.float64) for x in (w, wide))
    errors = [squared_error(wide, grid, c) for c in (found, exact)]
    np.testing.assert_allclose(errors[0], errors[1], rtol=1e-3)


def test_zeros_have_a_clip():
    w = jnp.zeros((8, 3))
    np.testing.assert_array_equal(best_clip(w, Grid(4, granularity="channel", clip="mse")), 1)
    np.testing.assert_array_equal(round_weight(w, Grid(4, granularity="channel", clip="mse")), 0)


def test_the_search_is_constant_for_the_derivative():
    w = jnp.asarray(weight(16, 3))
    grid = Grid(4, granularity="channel", clip="mse")
    clip = best_clip(w, grid)
    ours, theirs = (
        jax.grad(lambda w, f=f: (f(w) ** 2).sum())(w)
        for f in (
            lambda w: round_weight(w, grid),
            lambda w: fake_quantise(w, grid, axis=-2, clip=clip),
        )
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)


# Whole models


def errors(before, after, name):
    """Mean squared change of one projection, by layer."""
    a, b = (np.asarray(getattr(p.layers, name).weight, np.float64) for p in (before, after))
    return ((a - b) ** 2).mean((1, 2))


@pytest.fixture(scope="module")
def params(variant):
    return variant("llama-biases").params


def test_every_projection_is_rounded_and_nothing_else(params):
    after = rtn(params, Scheme(weights=Grid(4)))
    for name in PROJECTIONS:
        w, q = (np.asarray(getattr(p.layers, name).weight) for p in (params, after))
        for layer in range(3):
            axes = {"axis": 0, "keepdims": True}
            scale = np.abs(w[layer]).max(**axes) / 7
            expected = np.clip(np.rint(w[layer] / scale), -8, 7) * scale
            np.testing.assert_allclose(q[layer], expected, rtol=1e-5, atol=1e-6)
    bare = map(without_weights, (params, after))
    for a, b in zip(*map(jax.tree.leaves, bare), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("clip", [1.0, "mse"])
def test_the_error_falls_with_every_bit(params, clip):
    steps = [
        rtn(params, Scheme(weights=Grid(bits, clip=clip, kind="symmetric_half")))
        for bits in (2, 3, 4, 6, 8)
    ]
    for name in PROJECTIONS:
        falling = np.stack([errors(params, after, name) for after in steps])
        assert (falling[1:] < falling[:-1]).all()
        assert falling[-1].min() > 0


def test_clip_search_beats_no_clip(params):
    plain, searched = (rtn(params, Scheme(weights=Grid(3, clip=clip))) for clip in (1.0, "mse"))
    for name in PROJECTIONS:
        assert (errors(params, searched, name) < errors(params, plain, name)).all()


def test_overrides(params):
    overrides = (Override("layers.1.*", weights=8), Override("*.down", weights=16))
    after = rtn(params, Scheme(weights=Grid(3), overrides=overrides))
    for name in PROJECTIONS:
        change = errors(params, after, name)
        if name == "down":
            assert (change == 0).all()
        else:
            assert 0 < change[1] < 0.01 * min(change[0], change[2])
    assert jax.tree.structure(after) == jax.tree.structure(params)


def test_16_bits_leave_everything_alone(params):
    for a, b in zip(*map(jax.tree.leaves, (rtn(params, Scheme()), params)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("clip", [1.0, "mse"])
def test_a_group_has_to_divide(params, clip):
    grid = Grid(4, granularity="group", group=16, clip=clip)  # hidden 48, but intermediate 56
    with pytest.raises(InputError, match="16 does not divide 56"):
        rtn(params, Scheme(weights=grid))


def test_mean_best_clip(params):
    scheme = Scheme(weights=Grid(4, clip="mse"))
    found = [
        np.asarray(best_clip(getattr(params.layers, n).weight[i], scheme.weights)).mean()
        for i in range(3)
        for n in PROJECTIONS
    ]
    sizes = [getattr(params.layers, n).weight.shape[-1] for n in PROJECTIONS] * 3
    mean = mean_best_clip(params, scheme)
    np.testing.assert_allclose(mean, np.average(found, weights=sizes), rtol=1e-5)
    assert 0.4 < mean < 1
