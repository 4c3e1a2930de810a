"""Attention of one new token to a cache of integers on Hopper, in one pass over the cache.

A program takes some query heads of one kv head and a run of tokens; runs are put together at the
end, as in Flash-Decoding (Dao et al., 2023). A thread holds 16 codes of a token, so that a score is
a sum over a few lanes. Threads side by side go through the tokens with a maximum and a sum of their
own, and so nothing passes between warps but at the end. Scales and zero points act on scores and
shares, as on TPU. Products are not on the tensor cores: few query heads share a kv head.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from qrot.kernels.dispatch import interpreting
from qrot.kernels.kv4 import PackedHeads
from qrot.kernels.mosaic_gpu import layouts

_TOKENS = 64  # read at a time
_FEWEST = 256  # tokens of the cache that are worth a program
_PROGRAMS = 528  # enough for all of Hopper's 132 multiprocessors
_HEADS = 4  # of a program: their queries and sums stay in registers
_CODES = 16  # of a token, that a thread holds
LOWERS = jax.__version_info__ < (0, 11)  # jax 0.12 finds no layouts for the loop
_LOW = -1e30  # a score that leaves nothing, and whose difference to itself is a number


def refusal(q: Any, keys: Any, values: Any) -> str | None:
    """Why the kernel cannot read this cache for these queries; None where it can."""
    if not (LOWERS or interpreting()):
        return "jax 0.12 cannot lower it"
    if q.shape[1] != 1:
        return f"it is for one new token at a time, not {q.shape[1]}"
    if q.dtype.name not in ("float32", "bfloat16", "float16"):
        return f"it does float32, bfloat16 and float16, not {q.dtype.name}"
    if q.shape[3] not in (32, 64, 128, 256):
        return f"it does heads of 32, 64, 128 and 256, not of {q.shape[3]}"
    for packed in (keys, values):
        if not isinstance(packed, PackedHeads):
            return "keys and values must both be integers"
        if packed.scale.dtype != jnp.float32:
            return f"its scales are float32, not {packed.scale.dtype.name}"
        if packed.scale.shape[-1] != 1:
            return "it has no scales for groups within a head"
        if packed.codes.shape[-1] > 128:
            return f"codes of a head take {packed.codes.shape[-1]} bytes, more than 128"
        if packed.codes.shape[-3] < _TOKENS:
            return f"the cache is for {packed.codes.shape[-3]} tokens, fewer than {_TOKENS}"
    return None


def _rows_of(width: int, vector: int) -> Any:
    """A layout of rows of `width`: four warps one above the other, `vector` neighbours a thread."""
    rows = 128 * vector // width
    if rows == 4:
        return plgpu.Layout.TILED(plgpu.Tiling(((rows, width), (vector,))), (-3,), (-2,), -1)
    tiling = plgpu.Tiling(((rows, width), (rows // 4, width), (vector,)))
    return plgpu.Layout.TILED(tiling, (-5,), (-3, -2), -1)


def _numbers(codes, packed: bool) -> list:
    """Codes in float32; where two are in a byte, first halves of the heads and last ones."""
    wide = codes.astype(jnp.int32)
    parts = [wide]
    if packed:
        low = lax.shift_right_arithmetic(lax.shift_left(wide, jnp.int32(28)), jnp.int32(28))
        parts = [low, lax.shift_right_arithmetic(wide, jnp.int32(4))]
    return [part.astype(jnp.float32) for part in parts]


def attend(
    q: Float[Array, "batch 1 heads head_dim"],
    keys: Any,
    values: Any,
    window: Int[Array, ""] | None,
    *,
    first: Int[Array, ""],
    layer: Int[Array, ""],
    interpret: Any = None,
) -> Float[Array, "batch 1 features"]:
    """As the reference, for what `refusal` has nothing against; keys, values: `PackedHeads` of all
    layers.

    Blocks of tokens after the new one, or before the window, are not read.
    """
    batch, _, heads, head_dim = q.shape
    length, kv_heads = keys.codes.shape[2:4]
    groups = pl.cdiv(heads // kv_heads, _HEADS)  # of query heads that read the same kv head
    each = pl.cdiv(heads // kv_heads, groups)
    shape = (batch, kv_heads * groups)
    splits = min(pl.cdiv(_PROGRAMS, math.prod(shape)), pl.cdiv(length, _FEWEST))
    tile = 128 * _CODES // head_dim  # tokens side by side
    k_width, v_width = (packed.codes.shape[4] for packed in (keys, values))
    k_parts, v_parts = head_dim // k_width, head_dim // v_width
    k_tile, v_tile = (_rows_of(x, x * _CODES // head_dim) for x in (k_width, v_width))
    tokens = k_tile.reduce(1)
    narrow = _rows_of(v_width, 4)  # sums over warps are of at most four neighbours a thread

    scaled = q[:, 0].astype(jnp.float32).reshape(batch, kv_heads, -1, head_dim)
    missing = groups * each - scaled.shape[2]
    scaled = jnp.pad(scaled / math.sqrt(head_dim), ((0, 0), (0, 0), (0, missing), (0, 0)))
    scaled = scaled.reshape(*shape, each, head_dim)
    here = jnp.asarray(first, jnp.int32)
    start = jnp.zeros((), jnp.int32)  # the first token that counts
    if window is not None:
        start = jnp.where(window == 0, 0, jnp.maximum(here + 1 - window.astype(jnp.int32), 0))
    blocks = lax.div(here - start, _TOKENS) + 1
    share = lax.div(blocks + splits - 1, splits)  # blocks of a program
    place = jnp.stack([jnp.asarray(layer, jnp.int32), here, start, share])

    cast = partial(layouts.cast, interpret=interpret)
    load = partial(layouts.load, interpret=interpret)

    def filled(value, *shape, layout):
        return cast(jnp.full(shape, value, jnp.float32), layout)

    def over_keys(x):
        """A vector along the codes of a token, for all tokens of a tile."""
        return cast(lax.broadcast_in_dim(x, (tile, k_width), (1,)), k_tile)

    def over_values(x):
        """A number for each token of a tile, for all its codes."""
        return cast(lax.broadcast_in_dim(x, (tile, v_width), (0,)), v_tile)

    def body(place_ref, q_ref, total_ref, *refs):
        *cache_refs, sums_ref, stats_ref, scratch = refs
        k_refs, v_refs = cache_refs[: len(of_keys)], cache_refs[len(of_keys) :]
        row, head, split = (lax.axis_index(name) for name in ("batch", "head", "split"))
        layer, here = place_ref[0], place_ref[1]
        begin = place_ref[2] + split * place_ref[3] * _TOKENS
        steps = lax.div(here + _TOKENS - begin, jnp.int32(_TOKENS))
        steps = jnp.clip(steps, 0, place_ref[3])

        def at(step):
            """Where a step begins to read: the last ones not beyond the cache."""
            return jnp.minimum(begin + step * _TOKENS, length - _TOKENS)

        def read(refs, step, layout):
            """Codes, scales and, where there are some, zero points of a step: each in tiles."""

            def tiles(ref, layout):
                own = jnp.int32(0) if ref.shape[3] == 1 else lax.div(head, jnp.int32(groups))
                parts = [pl.ds(at(step) + i, tile) for i in range(0, _TOKENS, tile)]
                return [load(ref.at[layer, row, part, own], layout) for part in parts]

            return [tiles(refs[0], layout), *(tiles(ref, tokens) for ref in refs[1:])]

        def query(i, part):
            cut = pl.ds(part * k_width, k_width)
            return over_keys(load(q_ref.at[row, head, i, cut], k_tile.reduce(0)))

        queries = [[query(i, part) for part in range(k_parts)] for i in range(each)]

        def step(index, state):
            (k, ks, *kz), (v, vs, *vz), per_head = state
            following = [read(k_refs, index + 1, k_tile), read(v_refs, index + 1, v_tile)]
            rows = cast(lax.broadcasted_iota(jnp.int32, (tile,), 0), tokens)
            places = [rows + (at(index) + i) for i in range(0, _TOKENS, tile)]
            valid = [(x >= begin + index * _TOKENS) & (x <= here) for x in places]
            zeros, low = (filled(x, tile, layout=tokens) for x in (0.0, _LOW))
            k, v = (
                [_numbers(x, parts == 2) for x in t] for t, parts in [(k, k_parts), (v, v_parts)]
            )
            updated = []
            for i, (most, share, offset, sums) in enumerate(per_head):
                above, scores = most, []
                for j, codes in enumerate(k):
                    products = [x * y for x, y in zip(codes, queries[i], strict=True)]
                    score = sum(products[1:], products[0]).sum(1)
                    if kz:
                        score = score - kz[0][j].astype(jnp.float32) * total_ref[row, head, i]
                    scores.append(jnp.where(valid[j], score * ks[j], low))
                    above = jnp.maximum(above, scores[j])
                fade = jnp.exp(most - above)
                share, offset = share * fade, offset * fade
                sums = [x * over_values(fade) for x in sums]
                for j, codes in enumerate(v):
                    shares = jnp.where(valid[j], jnp.exp(scores[j] - above), zeros)
                    share = share + shares
                    shares = jnp.where(valid[j], shares * vs[j], zeros)
                    if vz:
                        offset = offset + shares * vz[0][j].astype(jnp.float32)
                    weight = over_values(shares)
                    sums = [x + weight * y for x, y in zip(sums, codes, strict=True)]
                updated.append((above, share, offset, sums))
            return *following, updated

        def fresh():
            most, share, offset = (filled(x, tile, layout=tokens) for x in (_LOW, 0.0, 0.0))
            sums = [filled(0.0, tile, v_width, layout=v_tile) for _ in range(v_parts)]
            return most, share, offset, sums

        state = read(k_refs, 0, k_tile), read(v_refs, 0, v_tile), [fresh() for _ in range(each)]
        *_, per_head = lax.fori_loop(0, steps, step, state)
        for i, (most, share, offset, sums) in enumerate(per_head):
            above = most.max(0)
            fade = jnp.exp(most - above)
            stats_ref[row, head, split, i, 0] = above
            stats_ref[row, head, split, i, 1] = (share * fade).sum(0)
            shift = (offset * fade).sum(0)
            for part, x in enumerate(sums):
                scratch[...] = x * over_values(fade)
                cut = pl.ds(part * v_width, v_width)
                sums_ref[row, head, split, i, cut] = load(scratch, narrow).sum(0) - shift

    def operands(packed):
        beside = [packed.scale] if packed.zero is None else [packed.scale, packed.zero]
        return [packed.codes, *(x[..., 0] for x in beside)]

    of_keys = operands(keys)
    sums, stats = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((*shape, splits, each, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((*shape, splits, each, 2), jnp.float32),
        ],
        grid=(*shape, splits),
        grid_names=("batch", "head", "split"),
        scratch_types=[plgpu.SMEM((tile, v_width), jnp.float32)],
        interpret=interpret or None,
    )(place, scaled, scaled.sum(-1), *of_keys, *operands(values))
    weight = jnp.exp(stats[..., 0] - stats[..., 0].max(2, keepdims=True))
    found = (sums * weight[..., None]).sum(2) / (stats[..., 1] * weight).sum(2)[..., None]
    found = found.reshape(batch, kv_heads, -1, head_dim)[:, :, : heads // kv_heads]
    return found.reshape(batch, 1, -1).astype(q.dtype)
