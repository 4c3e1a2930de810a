"""The fast Walsh-Hadamard transform on Hopper's tensor cores: one pass over memory.

A row of n = 128 s is s rows of 128 in memory, so that the transform of a tile X [64, 128] of those
is L (X H_128): L [64, 64] holds H_s once for each row that is whole in the tile. The product in
between goes through shared memory in two numbers of 16 bits, which together hold 16 (bfloat16) or
22 (float16) bits of it.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from qrot.kernels.fwht import hadamard_dense

_ROWS, _LANES = 64, 128  # of a tile
_TILES = 8  # that a thread block takes, one after the other


def refusal(n: int, block: int | None, dtype: Any, size: int) -> str | None:
    """Why the kernel cannot transform rows of n, `size` entries in all; None where it can."""
    order = block or n
    if jnp.dtype(dtype).name not in ("bfloat16", "float16"):
        return f"it does bfloat16 and float16, not {jnp.dtype(dtype).name}"
    if size % _LANES:
        return f"{size} entries are no whole rows of {_LANES}"
    if order < _LANES and _LANES % order == 0:
        return None
    rows, twos = order // _LANES, order & -order
    if order % _LANES or twos < _LANES or math.lcm(rows, 8) > _ROWS:
        return f"order {order} is not 128 s with 8 | s t <= 64 for some t"
    return None


def _matrices(order: int, transpose: bool) -> tuple[np.ndarray, np.ndarray, int]:
    """L / sqrt(s) and H_128 as +-1 and 0, and how many of a tile's rows are whole."""
    if order < _LANES:
        right = np.sign(hadamard_dense(_LANES, order))
        return np.eye(_ROWS), right.T if transpose else right, _ROWS
    rows = order // _LANES
    used = _ROWS // math.lcm(rows, 8) * math.lcm(rows, 8)
    left = np.zeros((_ROWS, _ROWS))
    left[:used, :used] = np.kron(np.eye(used // rows), np.sign(hadamard_dense(rows)))
    # y = H_s^T x H_128 for each row: the left matrix is transposed where the right is not.
    return left if transpose else left.T, np.sign(hadamard_dense(_LANES)), used


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def fwht(
    x: Float[Array, "*batch n"], block: int | None, transpose: bool, interpret: Any = None
) -> Float[Array, "*batch n"]:
    """x H / sqrt(n) as the reference, for what `refusal` has nothing against.

    The derivative is the transform by the transposed matrix; no forward mode.
    """
    order = block or x.shape[-1]
    left, right, used = _matrices(order, transpose)
    twice = order > _LANES
    cells = x.size // _LANES
    tiles = pl.cdiv(cells, used)
    each = max(count for count in range(1, _TILES + 1) if tiles % count == 0)
    # Tiles are read beyond what is used of them: of the last, zeros, which the interpreter has not.
    more = tiles * used - cells + (_ROWS - used if interpret else 0)
    padded = jnp.pad(x.reshape(cells, _LANES), ((0, more), (0, 0)))
    scale = 1 / math.sqrt(min(order, _LANES))
    rest = math.sqrt(min(order, _LANES) / order)
    layout = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    acc = plgpu.WGMMAAccumulatorRef((_ROWS, _LANES), jnp.float32)

    def product(*pairs):
        def run(total):
            for a, b in pairs:
                plgpu.wgmma(total, a, b)
            plgpu.wgmma_wait(0)
            return total[...]

        return pl.run_scoped(run, acc)

    def body(x_ref, left_ref, right_ref, y_ref, left, right, high, low, out, barrier):
        first = lax.axis_index("block") * each
        plgpu.copy_gmem_to_smem(left_ref, left, barrier)
        plgpu.copy_gmem_to_smem(right_ref, right, barrier)
        plgpu.barrier_wait(barrier)

        def tile(indices, x_tile):
            (step,) = indices
            y = product((x_tile, right)) * scale
            if twice:
                if used < _ROWS:  # the rows after are the next tile's
                    row = lax.broadcasted_iota(jnp.int32, (_ROWS, _LANES), 0)
                    if not interpret:  # the interpreter of jax 0.10.2 has no layouts
                        row = plgpu.layout_cast(row, plgpu.Layout.WGMMA)
                    y = jnp.where(row < used, y, 0.0)
                near = y.astype(x.dtype)
                high[...] = near
                low[...] = (y - near.astype(jnp.float32)).astype(x.dtype)
                plgpu.commit_smem()
                y = product((left, high), (left, low)) * rest
            plgpu.wait_smem_to_gmem(0)
            out[...] = y.astype(x.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                out.at[pl.ds(0, used)], y_ref.at[pl.ds((first + step) * used, used)]
            )

        plgpu.emit_pipeline(
            tile,
            grid=(each,),
            in_specs=[
                plgpu.BlockSpec(
                    (pl.Element(_ROWS), pl.Element(_LANES)),
                    lambda i: ((first + i) * used, 0),
                    transforms=layout,
                )
            ],
            max_concurrent_steps=4,
        )(x_ref)
        plgpu.wait_smem_to_gmem(0)

    def shared(rows):
        return plgpu.SMEM((rows, _LANES), x.dtype, transforms=layout)

    y = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(padded.shape, x.dtype),
        grid=(tiles // each,),
        grid_names=("block",),
        scratch_types=[
            plgpu.SMEM((_ROWS, _ROWS), x.dtype, transforms=layout),
            shared(_LANES),
            *(shared(_ROWS) for _ in range(3)),
            plgpu.Barrier(num_arrivals=2),
        ],
        interpret=interpret or None,
    )(padded, jnp.asarray(left, x.dtype), jnp.asarray(right, x.dtype))
    return y[:cells].reshape(x.shape)


def _forward(x, block, transpose, interpret):
    return fwht(x, block, transpose, interpret), None


def _backward(block, transpose, interpret, _, g):
    return (fwht(g, block, not transpose, interpret),)


fwht.defvjp(_forward, _backward)
