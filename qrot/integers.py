"""Values on a grid as the integers that stand for them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int8

from qrot.grid import Grid, nearest, scale_and_zero, sharing


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
        ValueError: where codes are no integers, wider than 8 bits, or beside a threshold.
        InputError: where a group does not divide the axis.
    """
    if not grid.in_bytes:
        raise ValueError(
            f"a grid of {grid.bits} bits ({grid.codebook}) with threshold {grid.threshold} is no "
            "integer of a byte"
        )
    clip = jnp.asarray(grid.clip if clip is None else clip, jnp.float32)
    axis = axis % x.ndim
    grouped, axes = sharing(x.astype(jnp.promote_types(x.dtype, jnp.float32)), grid, axis)
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
