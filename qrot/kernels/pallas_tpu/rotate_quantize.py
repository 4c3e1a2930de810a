"""Transform and rounding to integers on TPU, in one pass over memory."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from qrot.grid import Grid, nearest, scale_and_zero
from qrot.integers import Quantised
from qrot.kernels.pallas_tpu.transform import (
    DTYPES,
    LANES,
    block_rows,
    plan,
    prepared,
    scratch_bytes,
    transform,
)


def refusal(n: int, grid: Grid, block: int | None, dtype: Any) -> str | None:
    """Why the kernel cannot transform and round rows of n; None where it can."""
    if jnp.dtype(dtype).name not in DTYPES:
        return f"it does {' and '.join(DTYPES)}, not {jnp.dtype(dtype).name}"
    if grid.granularity == "tensor":
        return "a scale for the whole tensor takes two passes"
    if grid.group is not None and (n % grid.group or grid.group % LANES):
        return f"groups of {grid.group} are no whole vectors of {LANES} lanes"
    own = plan(n, block)
    if own is None or not block_rows(8, _row_bytes(n, own), _fixed_bytes(own)):
        return f"it does not fit rows of {n} in blocks of {block or n} into vector memory"
    return None


def _row_bytes(n: int, own) -> int:
    return 2 * n * 4 + 2 * n + 3 * n * 4 + scratch_bytes(own)  # in, out, transformed, temporaries


def _fixed_bytes(own) -> int:
    return 4 * own.repeat * own.slab**2  # bfloat16, twice


def rotate_quantize(
    x: Float[Array, "*batch n"],
    grid: Grid,
    block: int | None,
    clip: Float[Array, ""] | float,
    signs: Float[Array, " n"] | None,
    shift: Float[Array, " n"] | None,
    interpret: Any = False,
) -> Quantised:
    """As the reference, without the shift in the result, for what `refusal` has nothing against."""
    n = x.shape[-1]
    own = plan(n, block)
    assert own is not None
    rows, units = x.size // n, n // own.width
    groups = 1 if grid.group is None else n // grid.group
    whole = replace(grid, granularity=None, group=None, clip=1.0)
    norm = 1 / math.sqrt(n if block is None else block)
    height = block_rows(rows, _row_bytes(n, own), _fixed_bytes(own))
    scratch = (own.core * own.spread, height, own.slab) if own.core > 1 else (1, 8, LANES)
    flip, move = signs is not None, shift is not None

    def kernel(clip, x_ref, around, slabs, sums, codes, scales, zeros, transformed, scratch):
        def unit(number, _):
            first = number if isinstance(number, int) else pl.multiple_of(number, own.width)

            def lanes(start, count):
                return slice(None), pl.ds(first + start, count)

            def read(start, count):
                values = x_ref[lanes(start, count)]
                if flip:
                    sign = around[pl.ds(0, 1), pl.ds(first + start, count)]
                    values = (values.astype(jnp.float32) * sign).astype(x.dtype)
                return values

            def write(start, count, values):
                transformed[lanes(start, count)] = values

            transform(read, write, slabs, sums, scratch, own, norm)
            return 0

        if units == 1:
            unit(0, 0)
        else:
            lax.fori_loop(0, units, lambda i, c: unit(i * own.width, c), 0)
        size = n // groups
        for group in range(groups):
            here = slice(group * size, (group + 1) * size)
            values = transformed[:, here].astype(x.dtype).astype(jnp.float32)
            if move:
                values = values - around[1:2, here]
                values = values.astype(x.dtype).astype(jnp.float32)
            scale, zero = scale_and_zero(values, clip[0, 0], whole, (1,))
            steps = nearest(values, scale, zero, whole)
            if zero is not None:
                zero = zero - 2 ** (grid.bits - 1)
                steps = steps + zero
                zeros[:, group : group + 1] = zero.astype(jnp.int32)
            codes[:, here] = steps.astype(jnp.int32).astype(jnp.int8)
            scales[:, group : group + 1] = scale

    around = jnp.stack([jnp.ones(n) if s is None else s for s in (signs, shift)])
    around = around.astype(x.dtype).astype(jnp.float32)
    slabs, sums = prepared(own, block, False)
    scalars = pl.BlockSpec(memory_space=pltpu.SMEM)
    entries = pl.BlockSpec((height, n), lambda i: (i, 0))
    beside = pl.BlockSpec((height, groups), lambda i: (i, 0))
    codes, scale, zero = pl.pallas_call(
        kernel,
        out_shape=[
            jax.ShapeDtypeStruct((rows, n), jnp.int8),
            jax.ShapeDtypeStruct((rows, groups), jnp.float32),
            jax.ShapeDtypeStruct((rows, groups), jnp.int32),
        ],
        grid=(pl.cdiv(rows, height),),
        in_specs=[
            scalars,
            entries,
            pl.BlockSpec((2, n), lambda i: (0, 0)),
            pl.BlockSpec(slabs.shape, lambda i: (0, 0, 0)),
            scalars,
        ],
        out_specs=[entries, beside, beside],
        scratch_shapes=[pltpu.VMEM((height, n), jnp.float32), pltpu.VMEM(scratch, jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
        name="rotate_quantize",
    )(jnp.full((1, 1), clip, jnp.float32), x.reshape(rows, n), around, slabs, sums)
    shape = (*x.shape[:-1], groups)
    point = zero.astype(jnp.int8).reshape(shape) if grid.kind == "asymmetric" else None
    return Quantised(codes.reshape(x.shape), scale.reshape(shape), point)
