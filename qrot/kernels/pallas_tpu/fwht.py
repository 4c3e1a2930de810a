"""The fast Walsh-Hadamard transform on TPU: one pass over memory."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from qrot.kernels.pallas_tpu.transform import (
    DTYPES,
    block_rows,
    plan,
    prepared,
    scratch_bytes,
    transform,
)


def refusal(n: int, block: int | None, dtype: Any) -> str | None:
    """Why the kernel cannot transform rows of n in this dtype; None where it can."""
    if jnp.dtype(dtype).name not in DTYPES:
        return f"it does {' and '.join(DTYPES)}, not {jnp.dtype(dtype).name}"
    own = plan(n, block)
    if own is None or not block_rows(8, _row_bytes(own, 4), _fixed_bytes(own)):
        return (
            f"rows of {n} in blocks of {block or n} have neither slabs of 128 lanes with sums of at"
            " most 256 nor a small matrix"
        )
    return None


def _row_bytes(own, itemsize: int) -> int:
    return 4 * own.width * itemsize + scratch_bytes(own)  # in and out, each twice


def _fixed_bytes(own) -> int:
    return 4 * own.repeat * own.slab**2  # bfloat16, twice


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def fwht(
    x: Float[Array, "*batch n"], block: int | None, transpose: bool, interpret: Any = False
) -> Float[Array, "*batch n"]:
    """x H / sqrt(n) as the reference, for what `refusal` has nothing against.

    The derivative is the transform by the transposed matrix; no forward mode.
    """
    n = x.shape[-1]
    own = plan(n, block)
    assert own is not None
    rows, units = x.size // n, n // own.width
    scale = 1 / math.sqrt(n if block is None else block)
    height = block_rows(rows, _row_bytes(own, x.dtype.itemsize), _fixed_bytes(own))
    scratch = (own.core * own.spread, height, own.slab) if own.core > 1 else (1, 8, 128)

    def kernel(x_ref, slabs, signs, y_ref, scratch):
        def write(first, lanes, values):
            y_ref[:, pl.ds(first, lanes)] = values.astype(y_ref.dtype)

        transform(
            lambda first, lanes: x_ref[:, pl.ds(first, lanes)],
            write,
            slabs,
            signs,
            scratch,
            own,
            scale,
        )

    slabs, signs = prepared(own, block, transpose)
    entries = pl.BlockSpec((height, own.width), lambda i, j: (i, j))
    y = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((rows, n), x.dtype),
        grid=(pl.cdiv(rows, height), units),
        in_specs=[
            entries,
            pl.BlockSpec(slabs.shape, lambda i, j: (0, 0, 0)),
            pl.BlockSpec(memory_space=pltpu.SMEM),
        ],
        out_specs=entries,
        scratch_shapes=[pltpu.VMEM(scratch, jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
        name="fwht",
    )(x.reshape(rows, n), slabs, signs)
    return y.reshape(x.shape)


def _forward(x, block, transpose, interpret):
    return fwht(x, block, transpose, interpret), None


def _backward(block, transpose, interpret, _, g):
    return (fwht(g, block, not transpose, interpret),)


fwht.defvjp(_forward, _backward)
