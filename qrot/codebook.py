"""Codebooks: the numbers that a code can stand for, before a scale multiplies them.

A new number format is an entry of `CODEBOOKS`. Integers are not in it: their range follows from
bits and kind (`qrot.grid.Grid`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

# Levels of 4-bit NormalFloat: quantiles of a normal distribution with an exact 0 (QLoRA, Dettmers
# et al., 2023, arXiv 2305.14314, appendix E).
_NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


@dataclass(frozen=True)
class Codebook:
    """The values t of the codes of a grid that is symmetric about 0.

    Attributes:
        bits: of a code.
        largest: value.
        nearest: the value next to each t; beyond the largest one the value that would be next if
            the codebook went on, so that what was clipped can be told.
        variance: of rounding a t between the ends, expected where t falls anywhere in its cell.
        unit: what all values are integers of at most 8 bits times; None where there is no such.
    """

    bits: int
    largest: float
    nearest: Callable[[Float[Array, "..."]], Float[Array, "..."]]
    variance: Callable[[Float[Array, "..."]], Float[Array, "..."]]
    unit: float | None = None


def _float(mantissa: int, lowest: int, largest: float, bits: int, unit: float | None) -> Codebook:
    """A binary floating-point format with subnormals and no infinity.

    Args:
        mantissa: bits of it.
        lowest: exponent of the smallest normal number.
        largest: value.
        bits: of a code.
        unit: see `Codebook`.
    """

    def nearest(t: Float[Array, "..."]) -> Float[Array, "..."]:
        """Ties to even, as the casts of IEEE 754."""
        step = jnp.maximum(octave(t), 2.0**lowest) * 2.0**-mantissa
        return jnp.round(t / step) * step

    def variance(t: Float[Array, "..."]) -> Float[Array, "..."]:
        """step^2 / 12. A step of a normal number doubles with every octave of t: the derivative is
        that of a step in proportion to t, in place of the staircase's, which is 0."""
        normal = jnp.abs(t) >= 2.0**lowest
        exact = jnp.square(jnp.where(normal, octave(t), 2.0**lowest) * 2.0**-mantissa)
        share = jax.lax.stop_gradient(exact / jnp.square(jnp.where(normal, t, 1)))
        return jnp.where(normal, share * jnp.square(t), exact) / 12

    return Codebook(bits, largest, nearest, variance, unit)


def _levels(levels: tuple[float, ...], bits: int) -> Codebook:
    """Any levels in order, from -largest to largest."""
    values = np.asarray(levels)
    middles = (values[1:] + values[:-1]) / 2
    squares = np.square(np.diff(values, prepend=2 * values[0] - values[1])) / 12

    def nearest(t: Float[Array, "..."]) -> Float[Array, "..."]:
        """Between two of them the lower one."""
        at = jnp.searchsorted(jnp.asarray(middles, t.dtype), t, method="compare_all")
        beyond = jnp.abs(t) > 1.5 * values[-1] - values[-2] / 2
        return jnp.where(beyond, t, jnp.asarray(values, t.dtype)[at])

    def variance(t: Float[Array, "..."]) -> Float[Array, "..."]:
        centres = np.concatenate([[values[0]], middles])
        return jnp.interp(t, jnp.asarray(centres, t.dtype), jnp.asarray(squares, t.dtype))

    return Codebook(bits, float(values[-1]), nearest, variance)


def octave(t: Float[Array, "..."]) -> Float[Array, "..."]:
    """2^floor(log2 |t|) of normal numbers, 0 of others: t without sign and mantissa."""
    kind, mask = (jnp.int64, 0x7FF << 52) if t.dtype == jnp.float64 else (jnp.int32, 0xFF << 23)
    bits = jax.lax.bitcast_convert_type(t, kind)
    return jax.lax.bitcast_convert_type(bits & mask, t.dtype)


# FP4, and the two of FP8 (Micikevicius et al., 2022, arXiv 2209.05433), without infinity here.
CODEBOOKS: dict[str, Codebook] = {
    "e2m1": _float(1, 0, 6.0, 4, 0.5),
    "e4m3": _float(3, -6, 448.0, 8, None),
    "e5m2": _float(2, -14, 57344.0, 8, None),
    "nf4": _levels(_NF4, 4),
}


def divide(x: Float[Array, "..."], y: Float[Array, "..."] | float) -> Float[Array, "..."]:
    """x / y, correctly rounded, where XLA would multiply by the reciprocal of a scalar or a scale.

    On the grid absmax/7.5 the largest value lies just between two integers: the last bit of the
    quotient decides, and should do so as in PyTorch. The condition is false for every number.
    """
    return x / jnp.where(jnp.isnan(x), x, y)


def in_float32(absmax: Array, largest: float, axes: tuple[int, ...]) -> Array:
    """absmax / largest, in float32 or wider."""
    del axes
    return divide(absmax, largest)


def in_e4m3(absmax: Array, largest: float, axes: tuple[int, ...]) -> Array:
    """absmax / largest in E4M3, times one power of two, the tensor scale, for all of `axes`.

    NVFP4's tensor scale is a float32, the largest scale / 448. As a power of two, the next one up,
    it costs at most one of E4M3's 18 octaves and no accuracy in the others; and what is rounded to
    nearest does not depend on it. So projections that an engine fuses can share one, and
    activations have the numbers that were judged where an engine has one for all tokens. What would
    round to 0 becomes the smallest E4M3.
    """
    e4m3, scale = CODEBOOKS["e4m3"], divide(absmax, largest)
    top = scale.max(axes, keepdims=True) / e4m3.largest
    below = jnp.maximum(octave(top), jnp.finfo(top.dtype).tiny)
    tensor = jnp.where(below < top, 2 * below, below)
    return jnp.maximum(e4m3.nearest(scale / tensor), E4M3_TINY) * tensor


def in_e8m0(absmax: Array, largest: float, axes: tuple[int, ...]) -> Array:
    """A power of two (OCP microscaling formats, 2023).

    2^floor(log2 absmax) over the power of two in the largest code; twice that where absmax is 1.75
    times a power of two or more, as in compressed-tensors.
    """
    del axes
    below = octave(absmax)
    near = jnp.where(absmax >= 1.75 * below, 2 * below, below)
    return near * 2.0 ** -int(np.log2(largest))


E4M3_TINY = 2.0**-9  # the smallest number above 0


class ScaleRule(NamedTuple):
    """How scales are stored.

    Attributes:
        store: (absmax of the values that share each scale, the largest code, the axes that share a
            tensor scale) to scales.
        keeps_largest: whether the largest value stays next to the code that it was to have.
    """

    store: Callable[[Array, float, tuple[int, ...]], Array]
    keeps_largest: bool


SCALE_RULES: dict[str, ScaleRule] = {
    "float32": ScaleRule(in_float32, True),
    "e4m3": ScaleRule(in_e4m3, True),
    "e8m0": ScaleRule(in_e8m0, False),
}
