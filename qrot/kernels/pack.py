"""Two 4-bit integers in a byte."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int8

from qrot.errors import InputError


def pack_int4(codes: Int8[Array, "..."], *, axis: int = -1) -> Int8[Array, "..."]:
    """Codes in [-8, 7], half as many bytes along the axis.

    The first half of the axis is in the low nibbles and the second in the high ones: unpacking is
    two shifts, with nothing to interleave.

    Raises:
        InputError: where the axis is odd.
    """
    if codes.shape[axis] % 2:
        raise InputError(f"an axis of {codes.shape[axis]} has no two halves to pack")
    low, high = jnp.split(codes, 2, axis)
    return (low & 15) | (high << 4)


def unpack_int4(packed: Int8[Array, "..."], *, axis: int = -1) -> Int8[Array, "..."]:
    """The inverse of `pack_int4`."""
    return jnp.concatenate(nibbles(packed), axis)


def nibbles(packed: Int8[Array, "..."]) -> tuple[Int8[Array, "..."], Int8[Array, "..."]]:
    """The low and the high nibbles, sign extended."""
    return (packed << 4) >> 4, packed >> 4
