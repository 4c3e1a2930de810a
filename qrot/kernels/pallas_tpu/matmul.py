"""Products with 8-bit and packed 4-bit weights on TPU, scales and zero points at the end."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int8, Int32

from qrot.integers import Quantised
from qrot.kernels.pallas_tpu.transform import LANES, exact_dot

_TOKENS, _OUT = 256, 512  # of a block of the result
_ROWS = 2048  # of a block of the weight
_MOST_BYTES = 24 * 2**10  # that a token takes in a block of more


def refusal(
    x: Quantised | Float[Array, "tokens in"],
    weight: Int8[Array, "groups rows out"],
    dtype: Any,
    packed: bool,
) -> str | None:
    """Why the kernel cannot do this product; None where it can."""
    types = [jnp.dtype(dtype).name, *(() if isinstance(x, Quantised) else (x.dtype.name,))]
    for kind in types:
        if kind not in ("float32", "bfloat16"):
            return f"it does float32 and bfloat16, not {kind}"
    groups, rows, _ = weight.shape
    if _cut(groups, rows, _token_bytes(x, dtype, packed)) is None:
        return f"{rows} rows have no divisor that is a multiple of {LANES}"
    return None


def _token_bytes(x: Any, dtype: Any, packed: bool) -> int:
    """Bytes that a token takes for each row of the weight."""
    return (1 + packed) * (1 if isinstance(x, Quantised) else jnp.dtype(dtype).itemsize)


def _cut(groups: int, rows: int, token_bytes: int) -> tuple[int, int] | None:
    """(rows of a block, groups of a block): a part of one group, or some whole groups.

    Blocks are of 1024 to 2048 rows where there are divisors for it: in small ones the time goes
    into starting them. None where there is none that fits into vector memory.
    """
    if rows <= _ROWS:
        return rows, max(g for g in range(1, groups + 1) if groups % g == 0 and g * rows <= _ROWS)
    parts = [part for part in range(LANES, rows, LANES) if rows % part == 0]
    small = max((part for part in parts if part <= _ROWS), default=0)
    large = min(part for part in (*parts, rows) if part > _ROWS)
    part = large if small < _ROWS // 2 and large * token_bytes <= _MOST_BYTES else small
    return (part, 1) if part else None


def product(
    x: Quantised | Float[Array, "tokens in"],
    weight: Int8[Array, "groups rows out"],
    scale: Float[Array, "groups out"],
    sums: Int32[Array, "groups out"] | None,
    dtype: Any,
    *,
    packed: bool,
    interpret: Any = False,
) -> Float[Array, "tokens out"]:
    """As the references, for what `refusal` has nothing against; packed: two codes a byte.

    The low nibbles of a group are its first inputs and the high ones its last: a product for each,
    and nothing to interleave. Nibbles are widened to 32 bits to be told apart, since shifts of 8
    bits do not compile.
    """
    groups, rows, out = weight.shape
    integers = isinstance(x, Quantised)
    codes = x.codes if integers else x.astype(dtype)
    tokens, halves = len(codes), 2 if packed else 1
    # [halves, groups, tokens, rows]: blocks of whole trailing axes, whatever a group's size.
    cut = codes.reshape(tokens, groups, halves, rows).transpose(2, 1, 0, 3)
    cut_in = _cut(groups, rows, _token_bytes(x, dtype, packed))
    assert cut_in is not None
    part, several = cut_in
    parts = rows // part
    high, wide = min(_TOKENS, tokens), min(_OUT, out)
    steps = groups // several * parts
    zero = x.zero if integers else None
    asymmetric = zero is not None
    if integers:
        beside = jnp.broadcast_to(x.scale.astype(jnp.float32), (tokens, 1))
        zero = jnp.zeros((tokens, 1), jnp.int32) if zero is None else zero.astype(jnp.int32)
    else:
        beside, zero = jnp.ones((tokens, 1), jnp.float32), jnp.zeros((tokens, 1), jnp.int32)
    zero = jnp.broadcast_to(zero, (tokens, 1))
    if sums is None:
        sums = jnp.zeros((groups, out), jnp.int32)

    def kernel(x_ref, w_ref, scale, sums, beside, zero, y_ref, total, partial):
        step = pl.program_id(2)
        within_group = lax.rem(step, parts)

        @pl.when(step == 0)
        def _():
            total[...] = jnp.zeros(total.shape, jnp.float32)

        def finish(got, group):
            if asymmetric:
                got = got - zero[...] * sums[group]
            total[...] += got.astype(jnp.float32) * scale[group]

        for group in range(several):
            got = _dots(x_ref, w_ref, group, packed)
            if integers and parts > 1:  # integers add up to the end of a group, exactly
                before = jnp.where(within_group == 0, 0, partial[...])
                partial[...] = before + got

                @pl.when(within_group == parts - 1)
                def _(group=group):
                    finish(partial[...], group)

            else:
                finish(got, group)

        @pl.when(step == steps - 1)
        def _():
            y_ref[...] = (total[...] * beside[...]).astype(y_ref.dtype)

    def place(step, *between):  # `//` and `%` look up the device, which lowering has not
        return lax.div(step, parts), *between, lax.rem(step, parts)

    per_output = pl.BlockSpec((several, 1, wide), lambda i, j, k: (lax.div(k, parts), 0, j))
    per_token = pl.BlockSpec((high, 1), lambda i, j, k: (i, 0))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((tokens, out), dtype),
        grid=(pl.cdiv(tokens, high), pl.cdiv(out, wide), steps),
        in_specs=[
            pl.BlockSpec((halves, several, high, part), lambda i, j, k: (0, *place(k, i))),
            pl.BlockSpec((several, part, wide), lambda i, j, k: (*place(k), j)),
            per_output,
            per_output,
            per_token,
            per_token,
        ],
        out_specs=pl.BlockSpec((high, wide), lambda i, j, k: (i, j)),
        scratch_shapes=[pltpu.VMEM((high, wide), t) for t in (jnp.float32, jnp.int32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=32 * 2**20,
        ),
        interpret=interpret,
        name="int4_matmul" if packed else "int8_matmul",
    )(cut, weight, scale.astype(jnp.float32)[:, None], sums[:, None], beside, zero)


def _dots(x_ref, w_ref, group: int, packed: bool):
    """The block's product with a group of the weight's codes: int32, or float32 for float x."""
    weights = [w_ref[group]]
    if packed:
        wide = weights[0].astype(jnp.int32)
        weights = [lax.shift_right_arithmetic(lax.shift_left(wide, 28), 28)]
        weights = [w.astype(jnp.int8) for w in (*weights, lax.shift_right_arithmetic(wide, 4))]
    totals = []
    for half, codes in enumerate(weights):
        x = x_ref[half, group]
        if x.dtype == jnp.int8:
            totals.append(jnp.dot(x, codes, preferred_element_type=jnp.int32))
        else:
            totals.append(exact_dot(x, codes.astype(jnp.bfloat16)))
    return sum(totals[1:], totals[0])
