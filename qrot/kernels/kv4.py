"""A cache of keys or values in integers: how one enters, and how attention reads it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int, Int8

from qrot.errors import InputError
from qrot.grid import Grid
from qrot.integers import Quantised, dequantise
from qrot.kernels.attention import attention
from qrot.kernels.dispatch import choose, interpreting
from qrot.kernels.pack import pack_int4, unpack_int4


class PackedHeads(struct.PyTreeNode):
    """Keys or values of some tokens: value ~ (codes - zero) * scale.

    Attributes:
        codes: width is head_dim, or half of it, two 4-bit codes a byte (`pack_int4`).
        scale: scales is kv_heads, or 1 where all heads of a token share one.
        zero: None on a symmetric grid.
        bits: of a code.
    """

    codes: Int8[Array, "*batch length kv_heads width"]
    scale: Float[Array, "*batch length scales groups"]
    zero: Int8[Array, "*batch length scales groups"] | None
    bits: int = struct.field(pytree_node=False)


def fits(grid: Grid) -> bool:
    """Whether keys or values on this grid can be stored as integers, token by token."""
    return grid.in_bytes and grid.granularity != "tensor"


def empty_heads(shape: tuple[int, ...], grid: Grid, dtype: Any = jnp.float32) -> PackedHeads:
    """Room for keys or values.

    Args:
        shape: [..., length, kv_heads, head_dim].
        grid: one that `fits`.
        dtype: of the scales.

    Raises:
        InputError: where a group does not divide head_dim.
    """
    *batch, heads, width = shape
    groups = 1 if grid.group is None else width // grid.group
    if grid.group is not None and width % grid.group:
        raise InputError(f"group: {grid.group} does not divide {width}")
    scales = (*batch, 1 if grid.granularity == "token" else heads, groups)
    zero = jnp.zeros(scales, jnp.int8) if grid.kind == "asymmetric" else None
    codes = jnp.zeros((*shape[:-1], width // 2 if grid.bits <= 4 else width), jnp.int8)
    return PackedHeads(codes, jnp.ones(scales, dtype), zero, grid.bits)


def pack_heads(new: Quantised, bits: int) -> PackedHeads:
    """Codes [..., length, kv_heads, head_dim] as a cache stores them."""
    codes = pack_int4(new.codes) if bits <= 4 else new.codes
    return PackedHeads(codes, new.scale, new.zero, bits)


def unpack_heads(packed: PackedHeads) -> Float[Array, "*batch length kv_heads head_dim"]:
    """The values that a cache stands for."""
    codes = unpack_int4(packed.codes) if packed.bits <= 4 else packed.codes
    return dequantise(Quantised(codes, packed.scale, packed.zero))


def append(cache: PackedHeads, new: Quantised, place: tuple[Any, ...]) -> PackedHeads:
    """The cache with some tokens more, written in place under `jit`.

    Args:
        cache: of the tokens before.
        new: [..., tokens, kv_heads, head_dim]; axes of the cache that it lacks are the first.
        place: where its first token goes, one index for each axis of the cache before kv_heads.
    """
    at = tuple(jnp.asarray(i, jnp.int32) for i in (*place, 0, 0))

    def write(whole, part):
        part = part.reshape((1,) * (whole.ndim - part.ndim) + part.shape)
        return jax.lax.dynamic_update_slice(whole, part, at)

    return jax.tree.map(write, cache, pack_heads(new, cache.bits))


def attend(
    q: Float[Array, "batch new heads head_dim"],
    keys: PackedHeads | Float[Array, "*layers batch length kv_heads head_dim"],
    values: PackedHeads | Float[Array, "*layers batch length kv_heads head_dim"],
    window: Int[Array, ""] | None = None,
    *,
    first: Int[Array, ""],
    layer: Int[Array, ""] | None = None,
    implementation: str | None = None,
) -> Float[Array, "batch new features"]:
    """`attention` of new tokens to a packed cache with them in it.

    Args:
        q: queries of the new tokens.
        keys, values: packed or not, with the new tokens in them.
        window: tokens that may be looked back on; 0 or None for no limit.
        first: the position of the first new token.
        layer: which one of a cache of all layers, whose first axis they are; None for a cache of
            one, without that axis. A kernel reads its part of the whole where it is.
        implementation: see `qrot.kernels.dispatch`.

    Raises:
        InputError: where the implementation cannot do this.
    """

    def tpu():
        from qrot.kernels.pallas_tpu.kv4 import refusal

        return refusal(q, keys, values)

    def gpu():
        from qrot.kernels.mosaic_gpu.kv4 import refusal

        return refusal(q, keys, values)

    refusals = {"pallas_tpu": tpu, "mosaic_gpu": gpu}
    chosen = choose("kv4", implementation, refusals, (q, keys, values))
    if layer is None:
        layer = jnp.zeros((), jnp.int32)
        keys, values = jax.tree.map(lambda x: x[None], (keys, values))
    options = {"first": first, "layer": layer, "interpret": interpreting()}
    if chosen == "pallas_tpu":
        from qrot.kernels.pallas_tpu import kv4 as on_tpu

        return on_tpu.attend(q, keys, values, window, **options)
    if chosen == "mosaic_gpu":
        from qrot.kernels.mosaic_gpu import kv4 as on_gpu

        return on_gpu.attend(q, keys, values, window, **options)

    def read(x):
        x = jax.tree.map(lambda whole: whole[layer], x)
        return unpack_heads(x).astype(q.dtype) if isinstance(x, PackedHeads) else x

    return attention(q, read(keys), read(values), window, first=first)
