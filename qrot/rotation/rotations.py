"""The rotations of a model, as one pytree, and how each kind is applied.

A rotation R acts on row vectors, x -> x R. It comes in one of three forms:
- a dense matrix [n, n];
- blocks [n / b, b, b], each acting on its own b neighbours;
- `Hadamard`: random signs followed by the fast Walsh-Hadamard transform, never held as a matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float

from qrot.kernels.fwht import fwht, hadamard_dense


@struct.dataclass
class Hadamard:
    """R = diag(signs) H / sqrt(n), or block-diagonal with Hadamard blocks of size `block`."""

    signs: Any  # [n], +1 or -1
    block: int | None = struct.field(pytree_node=False, default=None)


@struct.dataclass
class Rotations:
    """Rotations by site; a site that is None is left alone.

    residual: R1, the residual stream, one for the model [hidden, hidden].
    value: R2, the value heads, one a layer [layers, head_dim, head_dim].
    key: R3, queries and keys after the rotary embedding, always online [head_dim].
    down: R4, the input of down_proj, always online [intermediate].
    fused: whether the weights already hold residual, value and the inverse of down (`qrot.model.
      fuse`). If not, the forward pass rotates a site's activations, quantises and rotates back.
    """

    residual: Any = None
    value: Any = None
    key: Any = None
    down: Any = None
    fused: bool = struct.field(pytree_node=False, default=False)


@struct.dataclass
class Shifts:
    """One constant vector mu a site: quantise x - mu and add mu back, which in a deployed model is
    the bias mu W. In the basis of the activations that the weights of the same model read.
    """

    qkv: Any = None  # [layers, hidden]
    o: Any = None  # [layers, heads * head_dim]
    gate_up: Any = None  # [layers, hidden]
    down: Any = None  # [layers, intermediate]


@struct.dataclass
class Clips:
    """Clip ratios by site, instead of the grid's; each [layers] or None."""

    qkv: Any = None
    o: Any = None
    gate_up: Any = None
    down: Any = None
    keys: Any = None
    values: Any = None


def rotate(x: Float[Array, "*batch n"], rotation) -> Float[Array, "*batch n"]:
    """x R, in x's dtype; x itself where the rotation is None."""
    if rotation is None:
        return x
    if isinstance(rotation, Hadamard):
        return fwht(x * rotation.signs.astype(x.dtype), block=rotation.block)
    return _product(x, rotation, "...i,ij->...j", "...bi,bij->...bj")


def unrotate(x: Float[Array, "*batch n"], rotation) -> Float[Array, "*batch n"]:
    """x R^T, the inverse of `rotate`."""
    if rotation is None:
        return x
    if isinstance(rotation, Hadamard):
        return fwht(x, block=rotation.block, transpose=True) * rotation.signs.astype(x.dtype)
    return _product(x, rotation, "...j,ij->...i", "...bj,bij->...bi")


def per_head(
    turn: Callable, x: Float[Array, "*batch n"], rotation, head_dim: int
) -> Float[Array, "*batch n"]:
    """`rotate` or `unrotate` (turn) each run of head_dim values by the same rotation."""
    return turn(x.reshape(*x.shape[:-1], -1, head_dim), rotation).reshape(x.shape)


def _product(x, matrix, dense: str, blocks: str):
    wide = jnp.promote_types(x.dtype, matrix.dtype)
    # Rotations are float32 whatever the activations are; a TPU would round them to bfloat16.
    product = jax.lax.Precision.HIGHEST
    if matrix.ndim == 2:
        return jnp.einsum(dense, x.astype(wide), matrix, precision=product).astype(x.dtype)
    split = x.reshape(*x.shape[:-1], *matrix.shape[:2]).astype(wide)
    return jnp.einsum(blocks, split, matrix, precision=product).reshape(x.shape).astype(x.dtype)


def as_matrix(rotation) -> np.ndarray:
    """Any form as a dense float64 matrix [..., n, n]; for tests and for export."""
    if isinstance(rotation, Hadamard):
        signs = np.asarray(rotation.signs, np.float64)
        return signs[:, None] * hadamard_dense(signs.shape[0], rotation.block)
    return np.asarray(rotation, np.float64)
