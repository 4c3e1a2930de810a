"""The orthonormal fast Walsh-Hadamard transform along the last axis, in plain JAX."""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float64

from qrot.errors import InputError
from qrot.kernels.hadamard import hadamard_factors, hadamard_matrix


def _order(n: int, block: int | None) -> int:
    if block is None:
        return n
    if block < 1 or n % block:
        raise InputError(f"block={block} does not divide the last axis of {n}")
    return block


def hadamard_dense(n: int, block: int | None = None) -> Float64[np.ndarray, "n n"]:
    """The matrix H / sqrt(n) that `fwht` multiplies by, [n, n] in float64.

    With `block`, it is block-diagonal with n / block copies of the matrix of order `block`.
    Raises InputError where `fwht` does.
    """
    order = _order(n, block)
    factors = [hadamard_matrix(f).astype(np.float64) for f in hadamard_factors(order)]
    return np.kron(np.eye(n // order), functools.reduce(np.kron, factors) / math.sqrt(order))


def fwht(
    x: Float[Array, "*batch n"],
    *,
    block: int | None = None,
    transpose: bool = False,
    implementation: str | None = None,
) -> Float[Array, "*batch n"]:
    """x H / sqrt(n) along the last axis, x [..., n], by one small dot per Kronecker factor.

    H is the Kronecker product of the Hadamard matrices of `hadamard_factors(n)`. The cost is n
    times the sum of the factors, O(n log n) for a given K in n = K 2^m. `transpose=True` multiplies
    by H^T / sqrt(n), the inverse. `block` transforms each run of `block` entries on its own. Half
    precisions are accumulated in float32; the result has the dtype of x. Raises InputError if n (or
    block) has no Hadamard matrix here, or if block does not divide n.
    """
    if implementation not in (None, "xla"):
        raise InputError(f"implementation={implementation!r} of fwht is not available; use 'xla'")
    order = _order(x.shape[-1], block)
    factors = hadamard_factors(order)
    rows = x.size // order
    y = x.astype(jnp.promote_types(x.dtype, jnp.float32)).reshape(rows, order)
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
