"""What transforms on Hopper share: the transform of a tile, and the way over all tiles.

A row of n = 128 s is s rows of 128 in memory, so that the transform of a tile X [64, 128] of those
is L (X H_128): L [64, 64] holds H_s once for each row that is whole in the tile. The product in
between goes through shared memory in two numbers of 16 bits, which together hold 16 (bfloat16) or
22 (float16) bits of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from qrot.hadamard.factors import hadamard_dense
from qrot.kernels.mosaic_gpu.layouts import WGMMA, cast, rounded

ROWS, LANES = 64, 128  # of a tile
_TILES = 8  # that a thread block takes, one after the other


@dataclass(frozen=True)
class Plan:
    """The transform of blocks of `order`, of which tiles have multiples of `cells` rows of 128."""

    order: int
    cells: int
    transpose: bool = False

    @property
    def used(self) -> int:
        """Rows of a tile: those of the blocks, or more, that are whole in it."""
        unit = math.lcm(self.cells, 8)
        return ROWS // unit * unit

    @property
    def twice(self) -> bool:
        """Whether L does anything."""
        return self.order > LANES

    def matrices(self) -> tuple[np.ndarray, np.ndarray]:
        """L and H_128 (or less on its diagonal), of +-1 and 0."""
        right = np.sign(hadamard_dense(LANES, min(self.order, LANES)))
        if not self.twice:
            return np.eye(ROWS), right.T if self.transpose else right
        rows, left = self.order // LANES, np.zeros((ROWS, ROWS))
        copies = np.kron(np.eye(self.used // rows), np.sign(hadamard_dense(rows)))
        left[: self.used, : self.used] = copies
        # y = H_s^T x H_128 for each row: the left matrix is transposed where the right is not.
        return left if self.transpose else left.T, right


def refusal(order: int, dtype: Any, size: int) -> str | None:
    """Why blocks of `order`, `size` entries in all, cannot be transformed; None where they can."""
    if jnp.dtype(dtype).name not in ("bfloat16", "float16"):
        return f"it does bfloat16 and float16, not {jnp.dtype(dtype).name}"
    if size % LANES:
        return f"{size} entries are no whole rows of {LANES}"
    if order < LANES and LANES % order == 0:
        return None
    rows = order // LANES
    if order % LANES or not (rows in (1, 2) or rows % 4 == 0) or math.lcm(rows, 8) > ROWS:
        return f"order {order} is not 128 s, s a Hadamard order with 8 | s t <= 64 for some t"
    return None


def over_tiles(
    tile: Callable,
    x: Array,
    plan: Plan,
    constants: Sequence[Array],
    out: Sequence[tuple[Any, int]],
    interpret: Any,
    spare: Sequence[Any] = (),
) -> list[Array]:
    """`tile(transform, x_tile, own, *constants, *spare)` of each tile of x, in one pass over it.

    Args:
        tile: of one tile. `transform` goes from a tile of x's dtype in shared memory to its
            transform in float32; `own` may be it, room for a tile that `transform` needs only once
            it has read what it is given.
        x: entries.
        plan: of the transform.
        constants: [rows, 128] or [n], in shared memory all the time.
        out: what the tile's results are: dtype, and 128 for [64, 128], 1 for [64].
        interpret: as for `plgpu.kernel`.
        spare: more of shared memory.

    Returns:
        For each of `out`, [x.size / 128, 128] or [x.size / 128].
    """
    cells, used = x.size // LANES, plan.used
    tiles = pl.cdiv(cells, used)
    each = max(count for count in range(1, _TILES + 1) if tiles % count == 0)
    # Tiles are read beyond what is used of them: of the last, zeros, which the interpreter has not.
    more = tiles * used - cells + (ROWS - used if interpret else 0)
    padded = jnp.pad(x.reshape(cells, LANES), ((0, more), (0, 0)))
    scale = 1 / math.sqrt(min(plan.order, LANES))
    rest = math.sqrt(min(plan.order, LANES) / plan.order)
    left, right = (jnp.asarray(m, x.dtype) for m in plan.matrices())
    beside = [left, right, *constants]

    def body(x_ref, *refs):
        refs, barrier = list(refs[:-1]), refs[-1]

        def take(count):
            taken, refs[:] = refs[:count], refs[count:]
            return taken

        given, results = take(len(beside)), take(len(out))
        (left, right, *fixed), (high, low) = take(len(beside)), take(2)
        outs = [high if own else take(1)[0] for own in reused]
        first = lax.axis_index("block") * each
        for ref, there in zip(given, (left, right, *fixed), strict=True):
            plgpu.copy_gmem_to_smem(ref, there, barrier)
        plgpu.barrier_wait(barrier)

        def transform(x_tile):
            y = _product((x_tile, right)) * scale
            if not plan.twice:
                return y
            if used < ROWS:  # the rows after are the next tile's
                row = lax.broadcasted_iota(jnp.int32, (ROWS, LANES), 0)
                y = jnp.where(cast(row, WGMMA, interpret) < used, y, 0.0)
            near = rounded(y, x.dtype, interpret)
            plgpu.wait_smem_to_gmem(0)
            high[...] = near
            low[...] = (y - near.astype(jnp.float32)).astype(x.dtype)
            plgpu.commit_smem()
            return _product((left, high), (left, low)) * rest

        def step(indices, x_tile):
            start = (first + indices[0]) * used
            values = tile(transform, x_tile, high, *fixed, *refs)
            plgpu.wait_smem_to_gmem(0)
            for here, value in zip(outs, values, strict=True):
                here[...] = value
            plgpu.commit_smem()
            for here, ref in zip(outs, results, strict=True):
                plgpu.copy_smem_to_gmem(here.at[pl.ds(0, used)], ref.at[pl.ds(start, used)])

        plgpu.emit_pipeline(
            step,
            grid=(each,),
            in_specs=[
                plgpu.BlockSpec(
                    (pl.Element(ROWS), pl.Element(LANES)),
                    lambda i: ((first + i) * used, 0),
                    transforms=_layout(x.dtype),
                )
            ],
            max_concurrent_steps=2,
        )(x_ref)
        plgpu.wait_smem_to_gmem(0)

    # Two thread blocks fit into a processor's shared memory where the result goes out of `high`.
    reused = [width == LANES and kind == x.dtype for kind, width in out]

    def place(rows, width):
        return (rows,) if width == 1 else (rows, width)

    found = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(place(len(padded), width), kind) for kind, width in out],
        grid=(tiles // each,),
        grid_names=("block",),
        scratch_types=[
            *(shared(c.shape, c.dtype) for c in beside),
            *(shared((ROWS, LANES), x.dtype) for _ in range(2)),
            *(
                shared(place(ROWS, width), kind)
                for (kind, width), own in zip(out, reused, strict=True)
                if not own
            ),
            *spare,
            plgpu.Barrier(num_arrivals=len(beside)),
        ],
        interpret=interpret or None,
    )(padded, *beside)
    return [y[:cells] for y in found]


def _product(*pairs):
    def run(total):
        for a, b in pairs:
            plgpu.wgmma(total, a, b)
        plgpu.wgmma_wait(0)
        return total[...]

    return pl.run_scoped(run, plgpu.WGMMAAccumulatorRef((ROWS, LANES), jnp.float32))


def _layout(dtype: Any):
    return plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(128)


def shared(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory as the tensor cores read it, or just so where it is a vector."""
    return plgpu.SMEM(shape, dtype, transforms=_layout(dtype) if len(shape) > 1 else ())
