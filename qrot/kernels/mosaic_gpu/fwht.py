"""The fast Walsh-Hadamard transform on Hopper's tensor cores: one pass over memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from jaxtyping import Array, Float

from qrot.kernels.mosaic_gpu import transform
from qrot.kernels.mosaic_gpu.transform import LANES, Plan, over_tiles


def refusal(n: int, block: int | None, dtype: Any, size: int) -> str | None:
    """Why the kernel cannot transform rows of n, `size` entries in all; None where it can."""
    return transform.refusal(block or n, dtype, size)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def fwht(
    x: Float[Array, "*batch n"], block: int | None, transpose: bool, interpret: Any = None
) -> Float[Array, "*batch n"]:
    """x H / sqrt(n) as the reference, for what `refusal` has nothing against.

    The derivative is the transform by the transposed matrix; no forward mode.
    """
    order = block or x.shape[-1]
    plan = Plan(order, max(1, order // LANES), transpose)

    def tile(transform, x_tile, _):
        return [transform(x_tile).astype(x.dtype)]

    (y,) = over_tiles(tile, x, plan, [], [(x.dtype, LANES)], interpret)
    return y.reshape(x.shape)


def _forward(x, block, transpose, interpret):
    return fwht(x, block, transpose, interpret), None


def _backward(block, transpose, interpret, _, g):
    return (fwht(g, block, not transpose, interpret),)


fwht.defvjp(_forward, _backward)
