"""Round-to-nearest, and the search for a weight's clip ratio."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import without_weights

from qrot.errors import InputError
from qrot.grid import Grid, fake_quantise
from qrot.network import fold, fuse
from qrot.quantize.rtn import best_clip, fuse_and_round, mean_best_clip, round_weight, rtn
from qrot.rotation.random import random_rotations
from qrot.rotation.transform import Transform, of_layer
from qrot.scheme import Override, Scheme, layer_scheme
from qrot.sites import PROJECTIONS

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


def weights(network, name):
    return np.asarray(network.params.layers.linear(name).weight)


def errors(before, after, name):
    """Mean squared change of one projection, by layer."""
    a, b = (np.float64(weights(network, name)) for network in (before, after))
    return ((a - b) ** 2).mean((1, 2))


@pytest.fixture(scope="module")
def network(variant):
    return variant("llama-biases").network


def rounded(network, scheme):
    return rtn(network.replace(scheme=scheme))


def test_every_projection_is_rounded_and_nothing_else(network):
    after = rounded(network, Scheme(weights=Grid(4)))
    for name in PROJECTIONS:
        w, q = (weights(x, name) for x in (network, after))
        for layer in range(3):
            axes = {"axis": 0, "keepdims": True}
            scale = np.abs(w[layer]).max(**axes) / 7
            expected = np.clip(np.rint(w[layer] / scale), -8, 7) * scale
            np.testing.assert_allclose(q[layer], expected, rtol=1e-5, atol=1e-6)
    bare = map(without_weights, (network.params, after.params))
    for a, b in zip(*map(jax.tree.leaves, bare), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("clip", [1.0, "mse"])
def test_the_error_falls_with_every_bit(network, clip):
    steps = [
        rounded(network, Scheme(weights=Grid(bits, clip=clip, kind="symmetric_half")))
        for bits in (2, 3, 4, 6, 8)
    ]
    for name in PROJECTIONS:
        falling = np.stack([errors(network, after, name) for after in steps])
        assert (falling[1:] < falling[:-1]).all()
        assert falling[-1].min() > 0


def test_clip_search_beats_no_clip(network):
    schemes = (Scheme(weights=Grid(3, clip=clip)) for clip in (1.0, "mse"))
    plain, searched = (rounded(network, scheme) for scheme in schemes)
    for name in PROJECTIONS:
        assert (errors(network, searched, name) < errors(network, plain, name)).all()


def test_overrides(network):
    overrides = (Override("layers.1.*", weights=8), Override("*.down", weights=16))
    after = rounded(network, Scheme(weights=Grid(3), overrides=overrides))
    for name in PROJECTIONS:
        change = errors(network, after, name)
        if name == "down":
            assert (change == 0).all()
        else:
            assert 0 < change[1] < 0.01 * min(change[0], change[2])
    bare = [jax.tree.structure(without_weights(x.params)) for x in (network, after)]
    assert bare[0] == bare[1]


def test_16_bits_leave_everything_alone(network):
    for a, b in zip(*map(jax.tree.leaves, (rounded(network, Scheme()), network)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("clip", [1.0, "mse"])
def test_a_group_has_to_divide(network, clip):
    grid = Grid(4, granularity="group", group=16, clip=clip)  # hidden 48, but intermediate 56
    with pytest.raises(InputError, match="16 does not divide 56"):
        rounded(network, Scheme(weights=grid))


def test_mean_best_clip(network):
    scheme = Scheme(weights=Grid(4, clip="mse"))
    found = [
        np.asarray(best_clip(jnp.asarray(weights(network, n)[i]), scheme.weights)).mean()
        for i in range(3)
        for n in PROJECTIONS
    ]
    sizes = [weights(network, n).shape[-1] for n in PROJECTIONS] * 3
    mean = mean_best_clip(network.replace(scheme=scheme))
    np.testing.assert_allclose(mean, np.average(found, weights=sizes), rtol=1e-5)
    assert 0.4 < mean < 1


GRIDS = {
    "channel": Grid(4, clip="mse"),
    "group": Grid(3, "symmetric_half", "group", 4, 0.9),
    "tensor": Grid(8, granularity="tensor"),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("granularity", GRIDS)
def test_weights_are_integers_times_the_scales_that_they_carry(variant, granularity, dtype):
    grid = GRIDS[granularity]
    overrides = (Override("layers.1.*", weights=2), Override("layers.2.up", weights=16))
    network = variant("llama", dtype).network
    after = rounded(network, Scheme(weights=grid, overrides=overrides))
    for name in PROJECTIONS:
        linear = after.params.layers.linear(name)
        w, scale = np.asarray(linear.weight), np.asarray(linear.scale)
        groups = w.shape[1] // grid.group if grid.group else 1
        assert scale.shape == (3, groups, w.shape[2])
        assert scale.dtype == np.float32
        for i in range(3):
            if (name, i) == ("up", 2):
                np.testing.assert_array_equal(scale[i], 1)
                np.testing.assert_array_equal(w[i], weights(network, name)[i])
                continue
            each = np.repeat(scale[i], w.shape[1] // groups, axis=0)
            codes = np.rint(w[i].astype(np.float32) / each)
            half = 2 ** ((2 if i == 1 else grid.bits) - 1)
            assert (codes.min() >= -half) & (codes.max() < half)
            np.testing.assert_array_equal((codes * each).astype(w.dtype), w[i])


def test_weights_on_their_grid_are_not_folded_or_fused(network):
    after = rounded(fold(network), Scheme(weights=Grid(4)))
    for change in (fold, lambda network: fuse(network, Transform())):
        with pytest.raises(ValueError, match="before they are rounded"):
            change(after)


def test_no_scales_where_there_is_no_symmetric_grid(network):
    for grid in (Grid(4, "asymmetric"), Grid()):
        after = rounded(network, Scheme(weights=grid))
        assert all(after.params.layers.linear(name).scale is None for name in PROJECTIONS)


def test_one_layer_as_learning_trains_by_is_the_layer_that_is_fused_and_rounded(network):
    network = fold(network)
    scheme, config = Scheme(Grid(4, clip=0.9)), network.config
    draw = np.random.default_rng(0)
    transform = Transform(
        random_rotations(config, 0),
        {"down": jnp.asarray(0.1 * draw.normal(size=(3, config.intermediate_size)), jnp.float32)},
        {"o": jnp.asarray(draw.normal(size=(3, config.hidden_size)), jnp.float32)},
        {"qkv": jnp.full(3, 0.8)},
    )
    whole = rounded(fuse(network, transform), scheme)
    layer = jax.tree.map(lambda x: x[1], network.params.layers)
    grids, own = layer_scheme(scheme, 1), of_layer(transform, 1)
    found, online = jax.jit(fuse_and_round, static_argnames=("grids", "config"))(
        layer, own, grids, config=config
    )
    for name in PROJECTIONS:
        a, b = np.asarray(found.linear(name).weight), weights(whole, name)[1]
        assert (np.abs(a - b) > 1e-5).mean() < 0.01  # a last bit decides between two levels
    assert found.q.scale is None
    expected = of_layer(whole.online, 1)
    assert jax.tree.structure(online) == jax.tree.structure(expected)
    for a, b in zip(*map(jax.tree.leaves, (online, expected)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
