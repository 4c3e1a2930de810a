"""What a quantised number is: levels and scales, against independent arithmetic."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grids import KINDS, normal, quantise
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from qrot.errors import InputError
from qrot.grid import Grid, fake_quantise

pytestmark = pytest.mark.usefixtures("quick_compile")


def by_hand(x, kind, bits, axes, clip=1.0):
    """The published formulas in numpy, float64: rounded values and scales."""
    x = np.asarray(x, np.float64)
    if kind == "asymmetric":
        low = clip * np.minimum(x.min(axes, keepdims=True), 0)
        high = clip * np.maximum(x.max(axes, keepdims=True), 0)
        scale = (high - low) / (2**bits - 1)
        scale = np.where(scale == 0, 1, scale)
        zero = np.rint(-low / scale)
        q = np.clip(np.rint(x / scale) + zero, 0, 2**bits - 1)
        return (q - zero) * scale, scale
    half = 2 ** (bits - 1)
    steps = half - (1 if kind == "symmetric" else 0.5)
    scale = clip * np.abs(x).max(axes, keepdims=True) / steps
    scale = np.where(scale == 0, 1, scale)
    return np.clip(np.rint(x / scale), -half, half - 1) * scale, scale


@pytest.mark.parametrize("clip", [1.0, 0.8])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_levels_are_the_published_ones(kind, bits, clip):
    x = normal(6, 32)
    expected, _ = by_hand(x, kind, bits, (1,), clip)
    grid = Grid(bits, kind, "token", clip=clip)
    np.testing.assert_allclose(quantise(x, grid), expected, rtol=1e-5, atol=1e-6)


def test_the_two_symmetric_grids_and_the_asymmetric_one_differ():
    x = np.array([7.5, -7.5, 3.2, 0.6, 0.0], np.float32)
    np.testing.assert_allclose(
        quantise(x, Grid(4, "symmetric_half", "token")), [7, -8, 3, 1, 0]
    )  # scale 7.5 / 7.5, rounding half to even and clamping to [-8, 7]
    s = 7.5 / 7
    np.testing.assert_allclose(
        quantise(x, Grid(4, "symmetric", "token")), [7 * s, -7 * s, 3 * s, s, 0], rtol=1e-6
    )
    x = np.array([1.0, 16.0, 5.4], np.float32)  # zero is held: scale 16 / 15 and not 15 / 15
    s = 16 / 15
    np.testing.assert_allclose(
        quantise(x, Grid(4, "asymmetric", "token")), [s, 15 * s, 5 * s], rtol=1e-6
    )
    x = np.array([-1.0, 14.0, 5.4], np.float32)
    np.testing.assert_allclose(quantise(x, Grid(4, "asymmetric", "token")), [-1, 14, 5], rtol=1e-6)


def test_small_values_share_a_level_beside_a_large_one():
    """At a scale of 100/127, 1.0 and 0.5 fall on the same level, and 0.3 on zero."""
    result = quantise(np.array([100, 1.0, 0.5, 0.3], np.float32), Grid(8, granularity="token"))
    np.testing.assert_allclose(result, np.array([127, 1, 1, 0]) * 100 / 127, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("granularity", "shape", "axis", "split", "axes"),
    [
        ("tensor", (3, 8), -1, (3, 8), (0, 1)),
        ("token", (2, 3, 8), -1, (2, 3, 8), (2,)),
        ("group", (2, 3, 8), -1, (2, 3, 2, 4), (3,)),
        ("channel", (8, 5), -2, (8, 5), (0,)),
        ("group", (8, 5), -2, (2, 4, 5), (1,)),
        ("tensor", (8, 5), -2, (8, 5), (0, 1)),
        ("head", (2, 3, 4, 8), -1, (2, 3, 4, 8), (3,)),
        ("token", (2, 3, 4, 8), -1, (2, 3, 4, 8), (2, 3)),
        ("group", (2, 3, 4, 8), -1, (2, 3, 4, 2, 4), (4,)),
    ],
)
def test_granularity(kind, granularity, shape, axis, split, axes):
    # Neighbours of very different size, so that sharing a scale too many or too few shows.
    x = normal(*shape) * np.exp(2 * normal(*shape, seed=1))
    grid = Grid(4, kind, granularity, group=4 if granularity == "group" else None, clip=0.9)
    expected, _ = by_hand(x.reshape(split), kind, 4, axes, 0.9)
    result = quantise(x, grid, axis=axis)
    np.testing.assert_allclose(result, expected.reshape(shape), rtol=1e-5, atol=1e-6)


def test_outlier_channels_are_left_alone_above_a_threshold():
    """LLM.int8(): with two outlier channels the error is a tenth of plain int8's, or less."""
    x = normal(2, 16, 64)
    x[..., 5] *= 60
    x[0, 3, 40] = -80  # one token makes a channel an outlier for all
    grid = Grid(8, granularity="token", threshold=6.0)
    result, plain = quantise(x, grid), quantise(x, Grid(8, granularity="token"))
    np.testing.assert_array_equal(result[..., [5, 40]], x[..., [5, 40]])
    rest = np.delete(x, [5, 40], -1)
    expected, _ = by_hand(rest, "symmetric", 8, (2,))
    np.testing.assert_allclose(np.delete(result, [5, 40], -1), expected, rtol=1e-5, atol=1e-6)
    assert np.square(result - x).sum() * 10 < np.square(plain - x).sum()
    np.testing.assert_array_equal(quantise(x, replace(grid, threshold=1000.0)), plain)
    grouped = Grid(4, "asymmetric", "group", group=32, threshold=6.0)
    np.testing.assert_array_equal(quantise(x, grouped)[..., 5], x[..., 5])


def test_off_leaves_everything_alone():
    x = jnp.asarray(normal(3, 4))
    assert fake_quantise(x, Grid()) is x


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_zeros_stay_zeros_and_dtypes_stay(kind, dtype):
    x = jnp.zeros((3, 4), dtype)
    grid = Grid(4, kind, "token")
    result, gradient = jax.value_and_grad(lambda x: fake_quantise(x, grid).sum())(x)
    assert result == 0
    assert gradient.dtype == dtype
    np.testing.assert_array_equal(gradient, 1)
    assert fake_quantise(x, grid).dtype == dtype


numbers = hnp.arrays(
    np.float32,
    st.sampled_from([(1, 1), (3, 5)]),
    elements=st.floats(-100, 100, width=32, allow_subnormal=False),
)

grids = st.builds(Grid, st.sampled_from([2, 4, 8]), st.sampled_from(KINDS), st.just("token"))


@settings(deadline=None, max_examples=60)
@given(numbers, grids)
def test_the_error_is_at_most_half_a_scale(x, grid):
    result = quantise(x, grid)
    _, scale = by_hand(x, grid.kind, grid.bits, (1,))
    assert np.isfinite(result).all()
    assert (np.abs(result - x) <= 0.5 * scale * (1 + 1e-4) + 1e-30).all()
    zero = x == 0
    np.testing.assert_array_equal(result[zero], 0)  # zero is a level of every grid


@settings(deadline=None, max_examples=60)
@given(numbers, grids)
def test_rounded_values_are_left_alone(x, grid):
    """Idempotent, but for absmax/7.5: its largest level is 7 or 8, so its scale moves."""
    once = quantise(x, grid)
    if grid.kind != "symmetric_half":
        np.testing.assert_allclose(quantise(once, grid), once, rtol=1e-4)
    levels = np.unique(once[0]).size
    assert levels <= 2**grid.bits


@settings(deadline=None, max_examples=30)
@given(numbers, grids, st.sampled_from([0.25, 2.0, 64.0]))
def test_a_grid_scales_with_its_numbers(x, grid, factor):
    """By powers of two, exactly, where nothing falls below the smallest normal number."""
    assume(np.abs(x[x != 0]).min(initial=1.0) > 1e-30)
    np.testing.assert_array_equal(quantise(x * factor, grid), quantise(x, grid) * factor)


@pytest.mark.parametrize("kind", KINDS)
def test_per_channel_is_what_torch_computes(kind):
    torch = pytest.importorskip("torch")
    x, bits = normal(5, 64), 4
    _, scale = by_hand(x, kind, bits, (1,))
    zero = np.zeros(5, np.int32)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    if kind == "asymmetric":
        zero = np.rint(-np.minimum(x.min(1), 0) / scale[:, 0]).astype(np.int32)
        low, high = 0, 2**bits - 1
    expected = torch.fake_quantize_per_channel_affine(
        torch.tensor(x),
        torch.tensor(scale[:, 0], dtype=torch.float32),
        torch.tensor(zero),
        0,
        low,
        high,
    )
    result = quantise(x, Grid(bits, kind, "token"))
    np.testing.assert_allclose(result, expected.numpy(), rtol=1e-5, atol=1e-6)


def test_symmetric_is_what_qwix_computes():
    qwix = pytest.importorskip("qwix")
    x = normal(5, 64)
    how = {"qtype": "int4", "channelwise_axes": [0], "calibration_method": "absmax"}
    expected = qwix.dequantize(qwix.quantize(jnp.asarray(x), **how))
    result = quantise(x, Grid(4, "symmetric_half", "token"))
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bits": 1}, "bits: 1"),
        ({"bits": 17}, "bits: 17"),
        ({"bits": 0}, "bits: 0"),
        ({"granularity": "group"}, "group size"),
        ({"granularity": "token", "group": 4}, "group size"),
        ({"granularity": "group", "group": 0}, "group: 0"),
        ({"clip": 0.0}, "clip: 0"),
        ({"clip": 1.1}, "clip: 1.1"),
    ],
)
def test_grids_that_make_no_sense(arguments, message):
    with pytest.raises(InputError, match=message):
        Grid(**arguments)


def test_a_group_has_to_divide():
    with pytest.raises(InputError, match="5 does not divide 12"):
        fake_quantise(jnp.ones((2, 12)), Grid(4, granularity="group", group=5))
