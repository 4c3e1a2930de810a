"""What a quantised number is: a grid of integers, and rounding to it with a useful gradient.

`fake_quantise` returns the values that integers on the grid stand for. Its derivative passes
straight through the rounding, but follows the scale: scale, zero point and clipping are functions
of the extremes of x, and a rotation that is to shrink those extremes needs their derivatives.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int8

from qrot.errors import InputError

OFF = 16  # a grid of 16 bits leaves its numbers alone


@dataclass(frozen=True)
class Grid:
    """The integers q for one kind of tensor: value ~ (q - zero) * scale.

    Attributes:
        bits: b, of an integer; 16 leaves values alone.
        kind: how scale and zero follow from the extremes of the values that share them.
            `symmetric`: scale = clip absmax / (2^(b-1) - 1), q in [-2^(b-1), 2^(b-1) - 1], zero 0;
            at 4 bits absmax/7 (QuaRot, SpinQuant). `symmetric_half`: scale = clip absmax /
            (2^(b-1) - 1/2), same q; at 4 bits absmax/7.5 (GPTQ, compressed-tensors). `asymmetric`:
            scale = clip (max - min) / (2^b - 1), zero = round(-clip min / scale), q in
            [0, 2^b - 1]; the interval is widened to hold 0.
        granularity: which values share a scale. `tensor`: all; `token`: one token's; `channel`: the
            weights of one output; `head`: one token's in one head; `group`: runs of `group`
            neighbours along the axis that the product sums over. None: the usual one of the role
            (weights channel, activations token, keys and values head).
        group: values of a group; None without groups.
        clip: factor on the extremes, below 1 to spend the integers on the bulk; `mse` (weights
            only) searches for each scale the factor of least squared error.
        threshold: (activations only) channels with a value above it, in any of the tokens that are
            there, are left alone, and do not count for the scales: LLM.int8() (Dettmers et al.,
            2022, arXiv 2208.07339) with 6.0; 0 for none.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    bits: int = OFF
    kind: Literal["symmetric", "symmetric_half", "asymmetric"] = "symmetric"
    granularity: Literal["tensor", "token", "channel", "head", "group"] | None = None
    group: int | None = None
    clip: float | Literal["mse"] = 1.0
    threshold: float = 0.0

    def __post_init__(self):
        if not 2 <= self.bits <= OFF:
            raise InputError(f"bits: {self.bits} is outside 2 to {OFF} ({OFF} leaves it alone)")
        if (self.granularity == "group") != (self.group is not None):
            raise InputError("granularity: 'group' goes with a group size, and only with it")
        if self.group is not None and self.group < 1:
            raise InputError(f"group: {self.group} is not positive")
        if self.clip != "mse" and not 0 < self.clip <= 1:
            raise InputError(f"clip: {self.clip} is outside 0 to 1")
        if self.threshold < 0:
            raise InputError(f"threshold: {self.threshold} is negative (0 is none)")

    @property
    def on(self) -> bool:
        """Whether the grid rounds at all."""
        return self.bits < OFF

    @property
    def qmin(self) -> int:
        """The lowest q."""
        return 0 if self.kind == "asymmetric" else -(2 ** (self.bits - 1))

    @property
    def qmax(self) -> int:
        """The highest q."""
        return self.qmin + 2**self.bits - 1

    @property
    def q_range(self) -> float:
        """Scales between zero (symmetric) or the minimum (asymmetric) and the largest value."""
        return self.qmax + 0.5 if self.kind == "symmetric_half" else float(self.qmax)


def fake_quantise(
    x: Float[Array, "..."],
    grid: Grid,
    *,
    axis: int = -1,
    clip: Float[Array, "..."] | float | None = None,
    scale_gradient: bool = True,
) -> Float[Array, "..."]:
    """Round x to its grid.

    Args:
        x: activations [..., tokens, n], keys or values [..., tokens, heads, head_dim], or weights
            [in, out].
        grid: to round to.
        axis: the one that the product sums over: the last, or the one before for weights.
        clip: instead of `grid.clip`, one number or an array that broadcasts against the scales
            (shape of x with `axis` reduced to 1); it is differentiable.
        scale_gradient: whether the derivative follows the scale, or takes it for a constant.

    Returns:
        The values that the nearest integers stand for, in x's dtype and shape.

    Raises:
        InputError: where a group does not divide the axis.
    """
    if not grid.on:
        return x
    if grid.threshold:
        large = outliers(x, grid.threshold, axis)
        plain = replace(grid, threshold=0.0)
        rest = fake_quantise(
            jnp.where(large, 0, x), plain, axis=axis, clip=clip, scale_gradient=scale_gradient
        )
        return jnp.where(large, x, rest)
    clip = jnp.asarray(grid.clip if clip is None else clip, jnp.float32)
    grouped, axes = _sharing(x, grid, axis % x.ndim)
    return _fake_quantise(grouped, clip, grid, axes, scale_gradient).reshape(x.shape)


class Quantised(struct.PyTreeNode):
    """Integers of at most 8 bits that stand for values: value ~ (codes - zero) * scale + shift.

    Attributes:
        codes: as wide as the grid, signed: those of an asymmetric grid are q - 2^(b-1).
        scale: the shape of codes, but for the axes that share one, which are 1, or the number of
            groups.
        zero: of the same shape, and less 2^(b-1) as codes are; None on a symmetric grid.
        shift: added at last; None for none.
    """

    codes: Int8[Array, "..."]
    scale: Float[Array, "..."]
    zero: Int8[Array, "..."] | None = None
    shift: Float[Array, "..."] | None = None


def quantise(
    x: Float[Array, "..."],
    grid: Grid,
    *,
    axis: int = -1,
    clip: Float[Array, "..."] | float | None = None,
) -> Quantised:
    """The integers whose values `fake_quantise` returns, to the last bit. Arguments as there.

    Raises:
        ValueError: where the grid is wider than 8 bits or has a threshold.
        InputError: where a group does not divide the axis.
    """
    if grid.bits > 8 or grid.threshold:
        raise ValueError(
            f"a grid of {grid.bits} bits with threshold {grid.threshold} is no integer"
        )
    clip = jnp.asarray(grid.clip if clip is None else clip, jnp.float32)
    axis = axis % x.ndim
    grouped, axes = _sharing(x.astype(jnp.promote_types(x.dtype, jnp.float32)), grid, axis)
    scale, zero = scale_and_zero(grouped, clip, grid, axes)
    codes, half = nearest(grouped, scale, zero, grid), 2 ** (grid.bits - 1)
    if zero is not None:
        zero = zero - half
        codes = codes + zero
    if grid.group is not None:
        scale, zero = jax.tree.map(lambda s: s.squeeze(axis + 1), (scale, zero))
    codes = codes.reshape(x.shape).astype(jnp.int8)
    return Quantised(codes, scale, None if zero is None else zero.astype(jnp.int8))


def dequantise(x: Quantised, *, axis: int = -1) -> Float[Array, "..."]:
    """The values that integers stand for.

    Args:
        x: the integers.
        axis: the one that groups run along.
    """
    groups, n = x.scale.shape[axis], x.codes.shape[axis]

    def each(s):
        return jnp.repeat(s, n // groups, axis) if 1 < groups < n else s

    codes = x.codes.astype(x.scale.dtype)
    if x.zero is not None:
        codes = codes - each(x.zero).astype(x.scale.dtype)
    values = codes * each(x.scale)
    return values if x.shift is None else values + x.shift.astype(values.dtype)


def expected_error(
    x: Float[Array, "..."],
    grid: Grid,
    *,
    axis: int = -1,
    clip: Float[Array, "..."] | float | None = None,
) -> Float[Array, "..."]:
    """The squared error that rounding each value to its grid is expected to make; no rounding here.

    Between the ends of the grid s^2 / 12, as for values that fall anywhere between two integers
    (Bennett, 1948); beyond an end the squared distance to it is added. Smooth but for the extremes
    of x, where the error itself is a sawtooth. Arguments as for `fake_quantise`.
    """
    if not grid.on:
        return jnp.zeros_like(x)
    if grid.threshold:
        large = outliers(x, grid.threshold, axis)
        plain = replace(grid, threshold=0.0)
        rest = expected_error(jnp.where(large, 0, x), plain, axis=axis, clip=clip)
        return jnp.where(large, 0, rest)
    clip = jnp.asarray(grid.clip if clip is None else clip, jnp.float32)
    grouped, axes = _sharing(x.astype(jnp.promote_types(x.dtype, jnp.float32)), grid, axis % x.ndim)
    if grid.kind == "asymmetric":
        low = jnp.minimum(grouped.min(axes, keepdims=True), 0) * clip
        high = jnp.maximum(grouped.max(axes, keepdims=True), 0) * clip
        step = (high - low) / grid.q_range
    else:
        step = jnp.abs(grouped).max(axes, keepdims=True) * clip / grid.q_range
        low, high = grid.qmin * step, grid.qmax * step
    beyond = grouped - jnp.clip(grouped, low, high)
    return (jnp.square(step) / 12 + jnp.square(beyond)).reshape(x.shape)


def outliers(x: Float[Array, "..."], threshold: float, axis: int = -1) -> Bool[Array, "..."]:
    """Whether a channel has a value above the threshold in any token; all axes but `axis` are 1."""
    others = tuple(i for i in range(x.ndim) if i != axis % x.ndim)
    return (jnp.abs(x) > threshold).any(others, keepdims=True)


def _sharing(x, grid: Grid, axis: int):
    """x, reshaped where the grid has groups, and the axes along which values share a scale."""
    if grid.group is not None:
        shape, n = x.shape, x.shape[axis]
        if n % grid.group:
            raise InputError(f"group: {grid.group} does not divide {n}")
        x = x.reshape(*shape[:axis], n // grid.group, grid.group, *shape[axis + 1 :])
        return x, (axis + 1,)
    if grid.granularity == "tensor":
        return x, tuple(range(x.ndim))
    if grid.granularity == "token" and x.ndim == 4:  # keys and values: all heads of the token
        return x, (x.ndim - 2, x.ndim - 1)
    return x, (axis,)


def scale_and_zero(x, clip, grid: Grid, axes: tuple[int, ...]):
    """Scale and zero point, each with `axes` reduced to 1; zero is None on a symmetric grid."""
    if grid.kind == "asymmetric":
        low, high = x.min(axes, keepdims=True), x.max(axes, keepdims=True)
        return scale_between(low, high, clip, grid)
    return scale_between(None, jnp.abs(x).max(axes, keepdims=True), clip, grid)


def scale_between(low, high, clip, grid: Grid):
    """Scale and zero point by the extremes; on a symmetric grid high is the largest magnitude."""
    if grid.kind == "asymmetric":
        low, high = jnp.minimum(low, 0) * clip, jnp.maximum(high, 0) * clip
        scale = _no_zeros(_divide(high - low, grid.q_range))
        return scale, jnp.round(_divide(-low, scale))
    return _no_zeros(_divide(high * clip, grid.q_range)), None


def _divide(x, y):
    """x / y, correctly rounded, where XLA would multiply by the reciprocal of a scalar or a scale.

    On the grid absmax/7.5 the largest value lies just between two integers: the last bit of the
    quotient decides, and should do so as in PyTorch. The condition is false for every number.
    """
    return x / jnp.where(jnp.isnan(x), x, y)


def elementwise_scale_and_zero(
    x: Float[Array, "..."], grid: Grid, *, axis: int, clip: Float[Array, "..."] | float
) -> tuple[Float[Array, "..."], Float[Array, "..."] | None]:
    """Scale and zero point of every value, in x's shape; `fake_quantise` rounds by these."""
    grouped, axes = _sharing(x, grid, axis % x.ndim)
    found = scale_and_zero(grouped, jnp.asarray(clip, jnp.float32), grid, axes)
    return jax.tree.map(lambda s: jnp.broadcast_to(s, grouped.shape).reshape(x.shape), found)


def _no_zeros(scale):
    return jnp.where(scale == 0, 1, scale)  # all values are 0: any scale represents them


def _to_nearest(x, clip, grid: Grid, axes: tuple[int, ...], scale_gradient: bool) -> Array:
    x32 = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    scale, zero = scale_and_zero(x32, clip, grid, axes)
    return (nearest(x32, scale, zero, grid) * scale).astype(x.dtype)


_fake_quantise = jax.custom_vjp(_to_nearest, nondiff_argnums=(2, 3, 4))


def nearest(x, scale, zero, grid: Grid):
    """q - zero next to each x; zero is None on a symmetric grid."""
    low, high = grid.qmin, grid.qmax
    if zero is not None:
        low, high = low - zero, high - zero
    return jnp.clip(jnp.round(_divide(x, scale)), low, high)


def _forward(x, clip, grid, axes, scale_gradient):
    return _fake_quantise(x, clip, grid, axes, scale_gradient), (x, clip)


def _backward(grid, axes, scale_gradient, saved, g):
    """Straight-through rounding: d round(t) = dt, and the chain rule for all the rest.

    Inside the grid d x^ = dx + (q - x / s) ds; a clipped value moves with the end of the interval
    only. The ends move with the extreme values of x, so the derivative of the scale lands on the
    elements that attain them (shared where several do).
    """
    x, clip = saved
    if not scale_gradient:
        return g, jnp.zeros_like(clip)
    x32 = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    scale, zero = scale_and_zero(x32, clip, grid, axes)
    low, high = grid.qmin, grid.qmax
    if zero is not None:
        low, high = low - zero, high - zero
    t = _divide(x32, scale)
    rounded = jnp.round(t)
    inside = (rounded >= low) & (rounded <= high)
    g_x = jnp.where(inside, g, 0)

    def total(values):
        return values.sum(axes, keepdims=True)

    def at(extreme, gradient):
        hit = x32 == extreme
        return jnp.where(hit, gradient / jnp.maximum(total(hit.astype(g_x.dtype)), 1), 0)

    if zero is None:
        g_scale = total(g * jnp.where(inside, rounded - t, jnp.clip(rounded, low, high)))
        biggest = jnp.abs(x32).max(axes, keepdims=True)
        g_clip = g_scale * biggest / grid.q_range
        hit = jnp.abs(x32) == biggest
        share = g_scale * clip / grid.q_range / total(hit.astype(g_x.dtype))
        g_x = g_x + jnp.where(hit, jnp.sign(x32) * share, 0)
    else:
        # x^ = low end for what is clipped below, low end + q_range * scale for what is above.
        above = rounded > high
        g_scale = total(g * jnp.where(inside, rounded - t, 0))
        g_low = total(jnp.where(rounded < low, g, 0)) - g_scale / grid.q_range
        g_high = total(jnp.where(above, g, 0)) + g_scale / grid.q_range
        minimum, maximum = x32.min(axes, keepdims=True), x32.max(axes, keepdims=True)
        g_clip = g_low * jnp.minimum(minimum, 0) + g_high * jnp.maximum(maximum, 0)
        g_x = g_x + jnp.where(minimum < 0, at(minimum, g_low * clip), 0)
        g_x = g_x + jnp.where(maximum > 0, at(maximum, g_high * clip), 0)
    return g_x.astype(x.dtype), _sum_to(g_clip, clip.shape).astype(clip.dtype)


def _sum_to(x, shape):
    """The transpose of broadcasting to x's shape from `shape`."""
    extra = x.ndim - len(shape)
    x = x.sum(tuple(range(extra)))
    return x.sum(tuple(i for i, n in enumerate(shape) if n == 1 and x.shape[i] > 1), keepdims=True)


_fake_quantise.defvjp(_forward, _backward)
