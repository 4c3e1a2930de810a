"""LDLQ: rounding with linear feedback of the errors made so far, a block of inputs at a time.

Chee, Cai, Kuleshov, De Sa: QuIP, NeurIPS 2023, arXiv 2307.13304; blocks: Tseng et al.: QuIP#, ICML
2024, arXiv 2402.04396, section 4.1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from qrot.calibrate.moments import EXACT
from qrot.quantize.gptq import damped_cholesky

TOGETHER = 128  # inputs that are rounded, at most, before the others hear of it


def block_ldl(
    hessian: Float[Array, "n n"], damping: Float[Array, ""] | float, block: int = 1
) -> tuple[Float[Array, "n n"], Float[Array, ""]]:
    """(A, damping used): H + damping = (A + I) D (A + I)^T, A zero but above the diagonal blocks.

    D is block-diagonal. Where no damping helps (`damped_cholesky`) A is zero.

    Args:
        hessian: H.
        damping: share of the mean of H's diagonal that is added to it.
        block: inputs of a block.
    """
    factor, used = damped_cholesky(hessian, damping)
    upper, n = factor[::-1, ::-1], len(factor)
    unit = jnp.eye(block, dtype=upper.dtype)
    blocks = upper.reshape(n // block, block, n // block, block)
    diagonal = jnp.einsum("iaib->iab", blocks)
    inverse = jax.vmap(lambda u: jax.scipy.linalg.solve_triangular(u, unit))(diagonal)
    above = jnp.einsum("rja,jab->rjb", upper.reshape(n, -1, block), inverse, precision=EXACT)
    where = jnp.arange(n) // block
    inside = (where[:, None] < where) & jnp.isfinite(used)
    return jnp.where(inside, above.reshape(n, n), 0), used


def ldlq(
    weight: Float[Array, "n out"],
    feedback: Float[Array, "n n"],
    quantise: Callable[[Float[Array, "block out"], Any], Float[Array, "block out"]],
    beside: Any = None,
    *,
    block: int = 1,
) -> Float[Array, "n out"]:
    """Round `block` rows after another: Q(W_k + sum over j < k of A_jk^T (W_j - Q_j)).

    With A = feedback of `block_ldl`, tr(E^T H E) of the change E = W - Q is the sum over the blocks
    of tr(e_k^T D_k e_k), e_k being the error that rounding block k makes of what it is given: each
    is as small as rounding can make it, whatever the others do. Rounding to nearest, one row at a
    time, this is GPTQ in the order of the inputs (theorem 6 of QuIP).

    Args:
        weight: W.
        feedback: A.
        quantise: (rows, what of `beside` belongs to them) -> rounded rows.
        beside: arrays [n, ...].
        block: rows that are rounded together.
    """
    n = len(weight)
    together = max(m for m in range(block, max(TOGETHER, block) + 1, block) if n % m == 0)

    def one_run(i, state):
        errors, rounded = state

        def here(x, axis: int = 0) -> Any:
            return jax.lax.dynamic_slice_in_dim(x, i * together, together, axis)

        def cut(x):
            return here(x).reshape(-1, block, *x.shape[1:])

        columns = here(feedback, 1)
        rows, beside_rows = cut(weight), jax.tree.map(cut, beside)
        given = rows + jnp.matmul(columns.T, errors, precision=EXACT).reshape(rows.shape)

        def one_block(errors, inputs):
            j, columns, rows, given, beside = inputs
            # Errors of this block and of those after it are still 0.
            near = quantise(given + jnp.matmul(columns, errors, precision=EXACT), beside)
            return jax.lax.dynamic_update_slice_in_dim(errors, rows - near, j * block, 0), near

        within = here(columns).T.reshape(-1, block, together)
        inputs = (jnp.arange(together // block), within, rows, given, beside_rows)
        mine, near = jax.lax.scan(one_block, jnp.zeros_like(here(weight)), inputs)

        def put(x, part):
            return jax.lax.dynamic_update_slice_in_dim(x, part, i * together, 0)

        return put(errors, mine), put(rounded, near.reshape(mine.shape))

    zeros = jnp.zeros_like(weight)
    return jax.lax.fori_loop(0, n // together, one_run, (zeros, zeros))[1]
