"""The orthonormal fast Walsh-Hadamard transform along the last axis, in plain JAX."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from qrot.hadamard.factors import hadamard_factors, hadamard_matrix, hadamard_order
from qrot.kernels.dispatch import choose, device_of, interpreting

# Entries that are transformed at once on a CPU. Measured on 4096 x 4096 in float32: whole 4.5 times
# a copy, in parts of 2^16, 2^18 and 2^20 entries 4.0, 2.6 and 2.8 times.
_CACHED = 2**18


def fwht(
    x: Float[Array, "*batch n"],
    *,
    block: int | None = None,
    transpose: bool = False,
    implementation: str | None = None,
) -> Float[Array, "*batch n"]:
    """x H / sqrt(n) along the last axis, by one small dot per Kronecker factor.

    H is the Kronecker product of the Hadamard matrices of `hadamard_factors(n)`. The cost is n
    times the sum of the factors, O(n log n) for a given K in n = K 2^m. Half precisions are
    accumulated in float32.

    Args:
        x: vectors.
        block: transforms each run of so many entries by itself; None all at once.
        transpose: whether to multiply by H^T / sqrt(n), the inverse.
        implementation: see `qrot.kernels.dispatch`.

    Returns:
        The transform, in the dtype of x.

    Raises:
        InputError: if n (or block) has no Hadamard matrix here, if block does not divide n, or if
            the implementation cannot do this.
    """
    order = hadamard_order(x.shape[-1], block)
    factors = hadamard_factors(order)
    chosen = choose("fwht", implementation, _refusals(x, block), x)
    if chosen == "pallas_tpu":
        from qrot.kernels.pallas_tpu import fwht as tpu

        return tpu.fwht(x, block, transpose, interpreting())
    if chosen == "mosaic_gpu":
        from qrot.kernels.mosaic_gpu import fwht as gpu

        return gpu.fwht(x, block, transpose, interpreting())
    rows = x.reshape(-1, order)
    part = functools.partial(_by_factors, factors=factors, transpose=transpose)
    few = _rows_at_once(*rows.shape) if device_of(x).platform == "cpu" else len(rows)
    if few < len(rows):
        return jax.lax.map(part, rows.reshape(-1, few, order)).reshape(x.shape)
    return part(rows).reshape(x.shape)


def _rows_at_once(rows: int, order: int) -> int:
    """As many rows as stay in a CPU's cache from factor to factor."""
    most = _CACHED // order
    if rows < 2 * most:
        return rows
    few = max(count for count in range(1, max(most, 1) + 1) if rows % count == 0)
    return few if few * order >= _CACHED // 8 else rows  # in too small parts nothing is gained


def _by_factors(x: Array, factors: tuple[int, ...], transpose: bool) -> Array:
    rows, order = x.shape
    y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    for i, size in enumerate(factors):
        matrix = hadamard_matrix(size).T if transpose else hadamard_matrix(size)
        # The scale goes into one small factor, since XLA does not fuse it into a dot on a CPU.
        scale = 1 / math.sqrt(order) if i == 0 else 1.0
        # Each dot takes the leading factor's axis away and appends its result as the last: after
        # all of them the axes are in order again, with no transposition written out in between.
        y = lax.dot_general(
            y.reshape(rows, size, order // size),
            jnp.asarray(matrix * scale, y.dtype),
            (((1,), (0,)), ((), ())),
            precision=lax.Precision.HIGHEST,
        )
    return y.reshape(x.shape).astype(x.dtype)


def _refusals(x, block: int | None) -> dict:
    # Imported where they are asked for: Pallas takes half a second, and Mosaic GPU needs absl-py.
    def tpu():
        from qrot.kernels.pallas_tpu.fwht import refusal

        return refusal(x.shape[-1], block, x.dtype)

    def gpu():
        from qrot.kernels.mosaic_gpu.fwht import refusal

        return refusal(x.shape[-1], block, x.dtype, x.size)

    return {"pallas_tpu": tpu, "mosaic_gpu": gpu}
