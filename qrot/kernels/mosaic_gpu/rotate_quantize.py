"""Transform and rounding to integers on Hopper, in one pass over memory.

The extremes of a token, or of a group, are those of some neighbouring rows of 128 of a tile. The
tensor cores' registers hold a row in four threads, but neighbouring rows in many: the extreme of
each goes through shared memory to all threads, [64, 64], and each row takes the largest of its own.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from qrot.grid import Grid, nearest, scale_between
from qrot.integers import Quantised
from qrot.kernels.mosaic_gpu import transform
from qrot.kernels.mosaic_gpu.layouts import WGMMA, cast, load, rounded
from qrot.kernels.mosaic_gpu.transform import LANES, ROWS, Plan, over_tiles


def refusal(n: int, grid: Grid, block: int | None, dtype: Any) -> str | None:
    """Why the kernel cannot transform and round rows of n; None where it can."""
    if grid.granularity == "tensor":
        return "a scale for the whole tensor takes two passes"
    if grid.group is not None and (n % grid.group or grid.group % LANES):
        return f"groups of {grid.group} are no whole rows of {LANES}"
    if n % LANES or math.lcm(n // LANES, 8) > ROWS:
        return f"rows of {n} are not 128 s with 8 | s t <= 64 for some t"
    return transform.refusal(block or n, dtype, n)


def rotate_quantize(
    x: Float[Array, "*batch n"],
    grid: Grid,
    block: int | None,
    clip: Float[Array, ""] | float,
    signs: Float[Array, " n"] | None,
    shift: Float[Array, " n"] | None,
    interpret: Any = None,
) -> Quantised:
    """As the reference, without the shift in the result, for what `refusal` has nothing against."""
    n = x.shape[-1]
    plan = Plan(block or n, n // LANES)
    together = (grid.group or n) // LANES  # rows of 128 that share a scale
    whole = replace(grid, granularity=None, group=None, clip=1.0)
    asymmetric = grid.kind == "asymmetric"
    flip, move = signs is not None, shift is not None

    def tile(transformed, x_tile, own, ratio, *others):
        others = list(others)
        if flip:
            own[...] = x_tile[...] * others.pop(0)[...]
            plgpu.commit_smem()
            x_tile = own
        values = rounded(transformed(x_tile), x.dtype, interpret).astype(jnp.float32)
        if move:
            moved = values - others.pop(0)[...].astype(jnp.float32)
            values = rounded(moved, x.dtype, interpret).astype(jnp.float32)
        clip = load(ratio, WGMMA.reduce(1), interpret)
        if asymmetric:
            low = -_largest(-values, together, others, interpret)
            high = _largest(values, together, others, interpret)
        else:
            low, high = None, _largest(jnp.abs(values), together, others, interpret)
        scale, zero = scale_between(low, high, clip, whole)
        over_row = _spread(scale, (ROWS, LANES), 0)
        if zero is None:
            return [_integers(nearest(values, over_row, None, whole)), scale]
        around_zero = _spread(zero, (ROWS, LANES), 0)
        half = 2.0 ** (grid.bits - 1)
        steps = nearest(values, over_row, around_zero, whole) + (around_zero - half)
        return [_integers(steps), scale, zero - half]

    def around(values):
        rows = jnp.tile(values.astype(x.dtype).reshape(-1, LANES), (plan.used * LANES // n, 1))
        return jnp.pad(rows, ((0, ROWS - plan.used), (0, 0)))

    ratio = jnp.full(ROWS, clip, jnp.float32)
    found = over_tiles(
        tile,
        x,
        plan,
        [ratio, *(around(v) for v in (signs, shift) if v is not None)],
        [(jnp.int8, LANES), *[(jnp.float32, 1)] * (1 + asymmetric)],
        interpret,
        [plgpu.SMEM((ROWS,), jnp.float32)] if together > 1 else [],
    )
    groups = n // (together * LANES)
    codes, scale, *zero = (found[0], *(v[::together] for v in found[1:]))
    shape = (*x.shape[:-1], groups)
    point = zero[0].astype(jnp.int8).reshape(shape) if asymmetric else None
    return Quantised(codes.reshape(x.shape), scale.reshape(shape), point)


def _integers(steps):
    return steps.astype(jnp.int32).astype(jnp.int8)


def _spread(values, shape, axis):
    return lax.broadcast_in_dim(values, shape, (axis,))


def _largest(values, together, spare, interpret):
    """[64]: the largest of the row of 128 and of those that share its scale."""
    found = values.max(1)
    if together == 1:
        return found
    (shared,) = spare
    shared[...] = found
    column = load(shared, WGMMA.reduce(0), interpret)

    def owner(axis):
        number = lax.broadcasted_iota(jnp.int32, (ROWS, ROWS), axis)
        return lax.div(cast(number, WGMMA, interpret), jnp.int32(together))

    own = owner(0) == owner(1)
    return jnp.where(own, _spread(column, (ROWS, ROWS), 1), -jnp.inf).max(1)
