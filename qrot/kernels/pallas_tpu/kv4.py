"""Attention of one new token to a cache of integers on TPU, without widening the cache in memory.

Scores and sums are products with the codes; scales and zero points act on scores and shares, of
which there are head_dim times fewer:

    q (codes - zero) scale = (q codes - zero sum(q)) scale.

Tokens are along the lanes: XLA keeps codes [layers, batch, length, kv_heads, width] on a TPU with
the tokens last where width is below 128, and so the kernel reads its blocks of the whole cache
where they are. All heads of a token are one column. A query is laid out so that it is zero for
other heads' codes: the matrix unit does the work of kv_heads times as many products, which it has
to spare, and nothing moves.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from qrot.kernels.kv4 import PackedHeads
from qrot.kernels.pallas_tpu.transform import exact_dot

_TOKENS = 256  # of a block of the cache
_WIDEST = 4096  # bytes a token's codes may take
_LOW = -1e30  # a score that leaves nothing, and whose difference to itself is a number


def refusal(q: Any, keys: Any, values: Any) -> str | None:
    """Why the kernel cannot read this cache for these queries; None where it can."""
    if q.shape[1] != 1:
        return f"it is for one new token at a time, not {q.shape[1]}"
    if q.dtype.name not in ("float32", "bfloat16"):
        return f"it does float32 and bfloat16, not {q.dtype.name}"
    for packed in (keys, values):
        if not isinstance(packed, PackedHeads):
            return "keys and values must both be integers"
        if packed.scale.dtype != jnp.float32:
            return f"its scales are float32, not {packed.scale.dtype.name}"
        if packed.scale.shape[-1] != 1:
            return "it has no scales for groups within a head"
        if math.prod(packed.codes.shape[-2:]) > _WIDEST:
            return f"a token's codes take more than {_WIDEST} bytes"
    return None


def _halves(codes, packed: bool) -> list:
    """Codes as bfloat16; where two are in a byte, first halves of the heads and last ones."""
    wide = codes.astype(jnp.int32)
    parts = [wide]
    if packed:
        low = lax.shift_right_arithmetic(lax.shift_left(wide, 28), 28)
        parts = [low, lax.shift_right_arithmetic(wide, 4)]
    return [part.astype(jnp.float32).astype(jnp.bfloat16) for part in parts]


def attend(
    q: Float[Array, "batch 1 heads head_dim"],
    keys: Any,
    values: Any,
    window: Int[Array, ""] | None,
    *,
    first: Int[Array, ""],
    layer: Int[Array, ""],
    interpret: Any = False,
) -> Float[Array, "batch 1 features"]:
    """As the reference, for what `refusal` has nothing against; keys, values: `PackedHeads` of all
    layers.

    Softmax block after block of the cache (Milakov and Gimelshein, 2018, arXiv 1805.02867). Blocks
    after the new token, or before the window, are neither read nor computed.
    """
    if any(packed.codes.shape[-1] % 128 == 0 for packed in (keys, values)):
        # Such heads XLA keeps with the tokens first: of one layer the copy is smaller.
        keys, values = jax.tree.map(lambda x: x[layer][None], (keys, values))
        layer = jnp.zeros((), jnp.int32)
    batch, _, heads, head_dim = q.shape
    length, kv_heads = keys.codes.shape[2:4]
    block = min(_TOKENS, length)
    k_packed, v_packed = (2 * packed.codes.shape[4] == head_dim for packed in (keys, values))
    k_parts, v_parts = 1 + k_packed, 1 + v_packed
    own = jnp.arange(heads) // (heads // kv_heads)  # the kv head of each head
    spread = jax.nn.one_hot(own, kv_heads, dtype=jnp.float32)
    scaled = q[:, 0].astype(jnp.float32) / math.sqrt(head_dim)
    total = scaled.sum(-1, keepdims=True)
    laid = jnp.einsum("bhpw,hk->bphkw", scaled.reshape(batch, heads, k_parts, -1), spread)
    laid = laid.reshape(batch, k_parts, heads, -1)
    if q.dtype == jnp.bfloat16:
        laid = laid.astype(jnp.bfloat16)

    def views(packed):
        """Codes [layers, batch, rows, length], scales with a 1 before the length, and zero points
        [batch, scales, length]: of the layer alone, since XLA keeps 8-bit ones in many ways."""
        codes, scale = (jnp.moveaxis(x, 2, 4) for x in (packed.codes, packed.scale))
        zero = packed.zero
        zero = jnp.zeros(packed.scale.shape[1:], jnp.int8) if zero is None else zero[layer]
        zero = zero[..., 0].swapaxes(1, 2).astype(jnp.float32)
        return [codes.reshape(*codes.shape[:2], -1, length), scale, zero]

    def kernel(place, q, total, spread, kc, ks, kz, vc, vs, vz, out, most, share, sums, offset):
        here, step = place[0], pl.program_id(1)

        @pl.when(step == 0)
        def _():
            most[...] = jnp.full(most.shape, _LOW, jnp.float32)
            for ref in (share, sums, offset):
                ref[...] = jnp.zeros(ref.shape, jnp.float32)

        def each(x, valid):
            """[scales, block] to [heads, block]; past the end may stand anything."""
            x = jnp.where(valid[:1], x, 0.0)
            if len(x) == 1:
                return jnp.broadcast_to(x, valid.shape)
            return lax.dot(spread[...], x, precision=lax.Precision.HIGHEST)

        @pl.when((step >= place[1]) & (step <= place[2]))
        def _():
            at = step * block + lax.broadcasted_iota(jnp.int32, (heads, block), 1)
            valid = (at <= here) & (at > place[3])
            codes = _halves(kc[0, 0], k_packed)
            dots = [exact_dot(q[0, i], part) for i, part in enumerate(codes)]
            scores = sum(dots[1:], dots[0]) - each(kz[0], valid) * total[0]
            scores = jnp.where(valid, scores * each(ks[0, 0, :, 0], valid), _LOW)
            above = jnp.maximum(most[...], scores.max(1, keepdims=True))
            fade = jnp.exp(most[...] - above)
            shares = jnp.where(valid, jnp.exp(scores - above), 0.0)
            most[...] = above
            share[...] = share[...] * fade + shares.sum(1, keepdims=True)
            shares = shares * each(vs[0, 0, :, 0], valid)
            shifted = (shares * each(vz[0], valid)).sum(1, keepdims=True)
            offset[...] = offset[...] * fade + shifted
            for i, part in enumerate(_halves(vc[0, 0], v_packed)):
                sums[i] = sums[i] * fade + exact_dot(shares, part, contract=1)

        @pl.when(step == pl.num_programs(1) - 1)
        def _():
            for i in range(v_parts):
                out[0, i] = (sums[i] - offset[...]) / share[...]

    def tokens(x):
        layered = x.ndim > 3
        rows = x.shape[1 + layered : -1]

        def index(i, j, place):
            j = jnp.clip(j, place[1], place[2])  # a block that is there already is not read again
            return (place[4], i, *(0 for _ in rows), j)[1 - layered :]

        return pl.BlockSpec((*(1,) * (1 + layered), *rows, block), index)

    def whole(*shape):
        return pl.BlockSpec((1, *shape), lambda i, j, place: (i, *(0 for _ in shape)))

    operands = [*views(keys), *views(values)]
    rows = operands[3].shape[2]
    here = jnp.asarray(first, jnp.int32)
    before = jnp.full((), -1, jnp.int32)  # the last token that is out of the window
    if window is not None:
        before = jnp.where(window == 0, -1, jnp.maximum(here - window.astype(jnp.int32), -1))
    place = jnp.stack([here, (before + 1) // block, here // block, before, layer])
    found = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((batch, v_parts, heads, rows), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, pl.cdiv(length, block)),
            in_specs=[
                whole(*laid.shape[1:]),
                whole(heads, 1),
                pl.BlockSpec(spread.shape, lambda i, j, place: (0, 0)),
                *map(tokens, operands),
            ],
            out_specs=whole(v_parts, heads, rows),
            scratch_shapes=[
                pltpu.VMEM(shape, jnp.float32)
                for shape in [(heads, 1), (heads, 1), (v_parts, heads, rows), (heads, 1)]
            ],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="kv4",
    )(place, laid, total, spread, *operands)
    found = found.reshape(batch, v_parts, heads, kv_heads, -1)
    found = jnp.take_along_axis(found, own[None, None, :, None, None], axis=3)[..., 0, :]
    return found.swapaxes(1, 2).reshape(batch, 1, -1).astype(q.dtype)
