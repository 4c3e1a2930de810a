"""The derivatives of rounding, in its input and its clip ratio, against a plain reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grids import KINDS, normal, quantise

from qrot.grid import Grid, fake_quantise

pytestmark = pytest.mark.usefixtures("quick_compile")


def exact(x, y):
    """x / y, which XLA may not make a product: at clip 1 the largest value of absmax/7.5 lies just
    between two levels."""
    return x / jnp.where(jnp.isnan(x), x, y)


def straight_through(x, clip, grid, axes):
    """The same function in plain jnp; JAX differentiates everything but the rounding.

    A number on the grid moves with x and with the scale; a clipped one with the end of the interval
    alone, whose zero point is not rounded for the derivative.
    """
    hold = jax.lax.stop_gradient
    if grid.kind == "asymmetric":
        low = clip * jnp.minimum(x.min(axes, keepdims=True), 0)
        high = clip * jnp.maximum(x.max(axes, keepdims=True), 0)
        scale = (high - low) / (2**grid.bits - 1)
        zero = hold(jnp.round(-low / scale))
        first, last = -zero, 2**grid.bits - 1 - zero
    else:
        scale = exact(clip * jnp.abs(x).max(axes, keepdims=True), grid.q_range)
        first, last = -(2 ** (grid.bits - 1)), 2 ** (grid.bits - 1) - 1
        low, high = first * scale, last * scale
    t = exact(x, scale)
    inside = scale * (t + hold(jnp.round(t) - t))
    below, above = jnp.round(t) < first, jnp.round(t) > last
    result = jnp.where(below, low, jnp.where(above, high, inside))
    value = jnp.clip(jnp.round(t), first, last) * scale
    return result + hold(value - result)


def gradients(function, x, clip):
    """Of a weighted sum of the results, with respect to x and clip; and the results."""
    weights = jnp.asarray(np.random.default_rng(9).normal(size=x.shape))

    def total(x, clip):
        result = function(x, clip)
        return (result * weights.astype(result.dtype)).sum(), result

    (_, result), both = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(x, clip)
    return result, *both


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("per", ["tensor", "channel"])
@pytest.mark.parametrize("clip", [1.0, 0.9, 0.5])
@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_gradient_is_that_of_a_straight_through_reference(kind, bits, clip, per, x64):
    x = jnp.asarray(normal(16, 6), jnp.float64)
    if per == "channel":  # one clip ratio for each scale
        clip = clip * jnp.asarray(np.linspace(0.9, 1, 6)[None], jnp.float32)
    else:
        clip = jnp.float32(clip)
    grid = Grid(bits, kind, "channel")

    def ours(x, clip):
        return fake_quantise(x, grid, axis=-2, clip=clip)

    def reference(x, clip):
        return straight_through(x, clip, grid, (0,))

    (value, g_x, g_clip), (value_r, r_x, r_clip) = (
        gradients(f, x, clip) for f in (ours, reference)
    )
    np.testing.assert_allclose(value, value_r, rtol=1e-12)
    np.testing.assert_allclose(g_x, r_x, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(g_clip, r_clip, rtol=1e-5, atol=1e-6)  # clip is float32
    assert np.abs(g_clip).min() > 0
    plain = gradients(lambda x, clip: x, x, clip)[1]
    assert np.abs(g_x - plain).max() > 1e-2  # not merely the identity


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_of_groups_and_heads(kind, x64):
    x = jnp.asarray(normal(2, 3, 2, 8), jnp.float64)
    clip = jnp.full((2, 3, 2, 2, 1), 0.8, jnp.float32)
    group, token = Grid(4, kind, "group", group=4), Grid(4, kind, "token")
    ours = gradients(lambda x, c: fake_quantise(x, group, clip=c), x, clip)

    def reference(x, c):
        return straight_through(x.reshape(2, 3, 2, 2, 4), c, group, (4,)).reshape(x.shape)

    theirs = gradients(reference, x, clip)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    ours = gradients(lambda x, c: fake_quantise(x, token, clip=c), x, jnp.float32(0.8))
    theirs = gradients(lambda x, c: straight_through(x, c, token, (2, 3)), x, jnp.float32(0.8))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_where_several_attain_the_extremes(kind, x64):
    x = jnp.asarray([[3.0, -3.0, 3.0, 0.7, -1.1], [2.0, 2.0, 2.0, 0.3, 1.2]], jnp.float64)
    grid = Grid(4, kind, "token")
    ours = gradients(lambda x, c: fake_quantise(x, grid, clip=c), x, jnp.float32(0.9))
    theirs = gradients(lambda x, c: straight_through(x, c, grid, (1,)), x, jnp.float32(0.9))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_with_the_scale_held_is_the_identity(kind):
    x = jnp.asarray(normal(4, 8))
    grid = Grid(4, kind, "token")
    options = {"scale_gradient": False}
    result, g_x, g_clip = gradients(
        lambda x, c: fake_quantise(x, grid, clip=c, **options), x, jnp.float32(0.8)
    )
    np.testing.assert_allclose(result, quantise(x, grid, clip=0.8))
    np.testing.assert_array_equal(g_x, gradients(lambda x, c: x, x, jnp.float32(0.8))[1])
    assert g_clip == 0


def test_gradient_is_homogeneous():
    """Q(a x) = a Q(x), so with the scale followed <x, dQ> = Q (Euler); held, it is not."""
    x, grid = jnp.asarray(normal(4, 8)), Grid(4, "symmetric", "token", clip=0.9)

    def along(**options):
        _, change = jax.vjp(lambda x: fake_quantise(x, grid, **options), x)
        return float((change(jnp.ones_like(x))[0] * x).sum())

    total = float(fake_quantise(x, grid).sum())
    np.testing.assert_allclose(along(), total, rtol=1e-4)
    assert abs(along(scale_gradient=False) - total) > 1e-2


def test_the_derivative_of_an_outlier_is_one():
    x = normal(3, 8)
    x[1, 2] = 50
    grid = Grid(4, granularity="token", threshold=6.0)
    weights = jnp.asarray(normal(3, 8, seed=1))
    found = jax.grad(lambda x: (fake_quantise(x, grid) * weights).sum())(jnp.asarray(x))
    np.testing.assert_array_equal(found[:, 2], weights[:, 2])
