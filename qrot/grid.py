"""What a quantised number is: codes times a scale, and rounding to them with a useful gradient.

`fake_quantise` returns the values that codes on the grid stand for. Its derivative passes
straight through the rounding, but follows the scale: scale, zero point and clipping are functions
of the extremes of x, and a rotation that is to shrink those extremes needs their derivatives.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from qrot.codebook import CODEBOOKS, SCALE_RULES, divide
from qrot.errors import InputError

OFF = 16  # a grid of 16 bits leaves its numbers alone
FOUR_OVER_SIX = "four_over_six"


@dataclass(frozen=True)
class Grid:
    """The codes q for one kind of tensor: value ~ (q - zero) * scale.

    Attributes:
        bits: b, of a code; 16 leaves values alone. By default those of the codebook, or 16.
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
        clip: factor on the extremes, below 1 to spend the codes on the bulk; `mse` (weights only)
            searches for each scale the factor of least squared error. `four_over_six` (e2m1 only):
            1 or 1.5, which puts the largest value on 4 in place of 6, whichever has the smaller
            squared error for those that share the scale (Cook et al., 2025, arXiv 2512.02010).
        threshold: (activations only) channels with a value above it, in any of the tokens that are
            there, are left alone, and do not count for the scales: LLM.int8() (Dettmers et al.,
            2022, arXiv 2208.07339) with 6.0; 0 for none.
        codebook: what codes stand for: integers, or symmetric about 0 and scaled by absmax over the
            largest of them: e2m1 (FP4, up to 6), e4m3 (FP8, up to 448), e5m2 (FP8, up to 57344),
            nf4 (quantiles of a normal distribution, up to 1).
        scale: how scales are stored: in float32 or wider; with groups also in e4m3 under a tensor
            scale (NVFP4), or e8m0, powers of two (MXFP4). See `qrot.codebook`.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    bits: int = None  # pyright: ignore[reportAssignmentType] (never None after __post_init__)
    kind: Literal["symmetric", "symmetric_half", "asymmetric"] = "symmetric"
    granularity: Literal["tensor", "token", "channel", "head", "group"] | None = None
    group: int | None = None
    clip: float | Literal["mse", "four_over_six"] = 1.0
    threshold: float = 0.0
    codebook: Literal["int", "e2m1", "e4m3", "e5m2", "nf4"] = "int"
    scale: Literal["float32", "e4m3", "e8m0"] = "float32"

    def __post_init__(self):
        if self.bits is None:
            bits = OFF if self.integers else CODEBOOKS[self.codebook].bits
            object.__setattr__(self, "bits", bits)
        if not 2 <= self.bits <= OFF:
            raise InputError(f"bits: {self.bits} is outside 2 to {OFF} ({OFF} leaves it alone)")
        if (self.granularity == "group") != (self.group is not None):
            raise InputError("granularity: 'group' goes with a group size, and only with it")
        if self.group is not None and self.group < 1:
            raise InputError(f"group: {self.group} is not positive")
        if not isinstance(self.clip, str) and not 0 < self.clip <= 1:
            raise InputError(f"clip: {self.clip} is outside 0 to 1")
        if self.clip == FOUR_OVER_SIX and self.codebook != "e2m1":
            raise InputError(f"clip: '{FOUR_OVER_SIX}' is for codebook e2m1, not {self.codebook}")
        if not self.integers and self.kind != "symmetric":
            raise InputError(
                f"kind: '{self.kind}' is of integers; codebook {self.codebook} has one"
            )
        if not self.integers and self.bits not in (CODEBOOKS[self.codebook].bits, OFF):
            has = CODEBOOKS[self.codebook].bits
            raise InputError(f"bits: codebook {self.codebook} has {has}, not {self.bits}")
        if self.scale != "float32" and self.granularity != "group":
            raise InputError(f"scale: {self.scale} is for granularity 'group'")
        if self.threshold < 0:
            raise InputError(f"threshold: {self.threshold} is negative (0 is none)")

    @property
    def on(self) -> bool:
        """Whether the grid rounds at all."""
        return self.bits < OFF

    @property
    def integers(self) -> bool:
        """Whether its codes are integers."""
        return self.codebook == "int"

    @property
    def in_bytes(self) -> bool:
        """Whether its values are integers of at most 8 bits, for products of integers."""
        return self.integers and self.bits <= 8 and not self.threshold

    @property
    def integer_bits(self) -> int | None:
        """Bits of the integers that values are, times scale and `unit`; None where they are not."""
        if self.integers:
            return self.bits
        book = CODEBOOKS[self.codebook]
        return None if book.unit is None else 1 + int(book.largest / book.unit).bit_length()

    @property
    def label(self) -> str:
        """The name in `GRIDS`, or bits of integers, or the codebook's name."""
        if not self.on or self.integers:
            return str(self.bits)
        own = self.codebook, self.scale, self.group
        alike = (n for n, g in GRIDS.items() if (g.codebook, g.scale, g.group) == own)
        return next(alike, self.codebook.upper())

    @property
    def unit(self) -> float:
        """What codes are integers of at most 8 bits times; 1 where they are not, too."""
        return 1.0 if self.integers else CODEBOOKS[self.codebook].unit or 1.0

    @property
    def qmin(self) -> int | float:
        """The lowest q."""
        if not self.integers:
            return -CODEBOOKS[self.codebook].largest
        return 0 if self.kind == "asymmetric" else -(2 ** (self.bits - 1))

    @property
    def qmax(self) -> int | float:
        """The highest q."""
        return self.qmin + 2**self.bits - 1 if self.integers else CODEBOOKS[self.codebook].largest

    @property
    def q_range(self) -> float:
        """Scales between zero (symmetric) or the minimum (asymmetric) and the largest value."""
        return self.qmax + 0.5 if self.kind == "symmetric_half" else float(self.qmax)


GRIDS = {
    "NVFP4": Grid(codebook="e2m1", scale="e4m3", granularity="group", group=16),
    "MXFP4": Grid(codebook="e2m1", scale="e8m0", granularity="group", group=32),
    "MXFP8": Grid(codebook="e4m3", scale="e8m0", granularity="group", group=32),
    "FP8": Grid(codebook="e4m3"),
    "NF4": Grid(codebook="nf4", granularity="group", group=64),
}


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
        The values that the nearest codes stand for, in x's dtype and shape.

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
    grouped, axes = sharing(x, grid, axis % x.ndim)
    clip = _ratio(grouped, clip, grid, axes)
    return _fake_quantise(grouped, clip, grid, axes, scale_gradient).reshape(x.shape)


def expected_error(
    x: Float[Array, "..."],
    grid: Grid,
    *,
    axis: int = -1,
    clip: Float[Array, "..."] | float | None = None,
) -> Float[Array, "..."]:
    """The squared error that rounding each value to its grid is expected to make; no rounding here.

    Between the ends of the grid s^2 / 12, as for values that fall anywhere between two integers
    (Bennett, 1948), and for other codes what `Codebook.variance` says; beyond an end the squared
    distance to it is added. Smooth but for the extremes of x, where the error itself is a sawtooth.
    Arguments as for `fake_quantise`.
    """
    if not grid.on:
        return jnp.zeros_like(x)
    if grid.threshold:
        large = outliers(x, grid.threshold, axis)
        plain = replace(grid, threshold=0.0)
        rest = expected_error(jnp.where(large, 0, x), plain, axis=axis, clip=clip)
        return jnp.where(large, 0, rest)
    grouped, axes = sharing(x.astype(jnp.promote_types(x.dtype, jnp.float32)), grid, axis % x.ndim)
    clip = _ratio(grouped, clip, grid, axes)
    if grid.kind == "asymmetric":
        low = jnp.minimum(grouped.min(axes, keepdims=True), 0) * clip
        high = jnp.maximum(grouped.max(axes, keepdims=True), 0) * clip
        step = (high - low) / grid.q_range
    else:
        absmax = jnp.abs(grouped).max(axes, keepdims=True) * clip
        step = absmax / grid.q_range
        if grid.scale != "float32":  # the derivative passes straight through the scale's rounding
            stored = jax.lax.stop_gradient(_stored_scale(absmax, grid, axes))
            step = stored + step - jax.lax.stop_gradient(step)
        low, high = grid.qmin * step, grid.qmax * step
    beyond = grouped - jnp.clip(grouped, low, high)
    variance = 1 / 12 if grid.integers else _variance(grouped, step, grid, axes)
    return (jnp.square(step) * variance + jnp.square(beyond)).reshape(x.shape)


def _variance(x, scale, grid: Grid, axes: tuple[int, ...]) -> Array:
    """Of rounding x / scale to a codebook. The largest value is on a code, and what is beyond the
    largest code has that for certain: with uneven cells theirs would be the largest."""
    t = divide(x, _no_zeros(scale))
    known = jnp.abs(t) >= grid.q_range
    if SCALE_RULES[grid.scale].keeps_largest:
        known |= jnp.abs(x) == jnp.abs(x).max(axes, keepdims=True)
    return jnp.where(known, 0, CODEBOOKS[grid.codebook].variance(t))


def outliers(x: Float[Array, "..."], threshold: float, axis: int = -1) -> Bool[Array, "..."]:
    """Whether a channel has a value above the threshold in any token; all axes but `axis` are 1."""
    others = tuple(i for i in range(x.ndim) if i != axis % x.ndim)
    return (jnp.abs(x) > threshold).any(others, keepdims=True)


def sharing(x, grid: Grid, axis: int):
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
    absmax = jnp.abs(x).max(axes, keepdims=True) * clip
    return _no_zeros(_stored_scale(absmax, grid, axes)), None


def _stored_scale(absmax, grid: Grid, axes: tuple[int, ...]) -> Array:
    """The scale by the rule that it is stored by; along the groups and all behind them, which is
    one token or a whole weight, they share a tensor scale."""
    together = tuple(range(axes[0] - 1, absmax.ndim)) if grid.group is not None else ()
    return SCALE_RULES[grid.scale].store(absmax, grid.q_range, together)


def _ratio(x, clip, grid: Grid, axes: tuple[int, ...]) -> Array:
    """The clip ratio that is asked for, or the grid's own."""
    clip = grid.clip if clip is None else clip
    if not (isinstance(clip, str) and clip == FOUR_OVER_SIX):
        return jnp.asarray(clip, jnp.float32)
    x = jax.lax.stop_gradient(x)

    def error(ratio: float) -> Array:
        wrong = _to_nearest(x, jnp.float32(ratio), grid, axes, False) - x
        return jnp.square(wrong).sum(axes, keepdims=True)

    return jnp.where(error(1.5) < error(1.0), jnp.float32(1.5), jnp.float32(1.0))


def scale_between(low, high, clip, grid: Grid):
    """Scale and zero point by the extremes; on a symmetric grid high is the largest magnitude."""
    if grid.kind == "asymmetric":
        low, high = jnp.minimum(low, 0) * clip, jnp.maximum(high, 0) * clip
        scale = _no_zeros(divide(high - low, grid.q_range))
        return scale, jnp.round(divide(-low, scale))
    return _no_zeros(divide(high * clip, grid.q_range)), None


def elementwise_scale_and_zero(
    x: Float[Array, "..."], grid: Grid, *, axis: int, clip: Float[Array, "..."] | float
) -> tuple[Float[Array, "..."], Float[Array, "..."] | None]:
    """Scale and zero point of every value, in x's shape; `fake_quantise` rounds by these."""
    grouped, axes = sharing(x, grid, axis % x.ndim)
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
    return jnp.clip(_rounded(divide(x, scale), grid), low, high)


def _rounded(t, grid: Grid) -> Array:
    """The code next to t, and beyond the ends what would be next if codes went on."""
    return jnp.round(t) if grid.integers else CODEBOOKS[grid.codebook].nearest(t)


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
    t = divide(x32, scale)
    rounded = _rounded(t, grid)
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
