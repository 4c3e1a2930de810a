"""The rotations of a model, as one pytree, what goes beside them, and how each kind is applied.

A rotation R acts on row vectors, x -> x R. It comes in one of four forms:
- a dense matrix [n, n];
- blocks [n / b, b, b], each acting on its own b neighbours;
- `Hadamard`: random signs followed by the fast Walsh-Hadamard transform, never held as a matrix;
- `Kronecker`: random signs followed by the product of two small matrices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float

from qrot.kernels.fwht import fwht
from qrot.kernels.hadamard import hadamard_dense


@struct.dataclass
class Hadamard:
    """R = diag(signs) H / sqrt(n), or block-diagonal with Hadamard blocks of size `block`."""

    signs: Any  # [n], +1 or -1
    block: int | None = struct.field(pytree_node=False, default=None)


@struct.dataclass
class Kronecker:
    """R = diag(signs) (left x right): n (a + b) products a vector in place of n^2, n = a b."""

    signs: Any  # [..., n], +1 or -1
    left: Any  # [..., a, a]
    right: Any  # [..., b, b]


@struct.dataclass
class Rotations:
    """Rotations by site; a site that is None is left alone.

    residual: R1, the residual stream, one for the model [hidden, hidden].
    value: R2, the value heads, one a layer [layers, head_dim, head_dim], or one for each kv head,
      in blocks [layers, kv_heads, head_dim / b, b, b].
    key: R3, queries and keys after the rotary embedding, always online: one for all layers, such as
      a `Hadamard`; or learned, in the last of the forms of value.
    down: R4, the input of down_proj, always online: one for all layers, such as a `Hadamard`; or
      learned, one a layer: a `Kronecker`, or blocks [layers, intermediate / b, b, b].
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
class Scales:
    """Natural logarithms of factors f by channel, beside the rotations (OSTQuant, 2025).

    A grid sees (x R) f, and the weight that reads it is divided by f; nothing is left to do at run
    time. Each may be None.
    """

    qkv: Any = None  # [layers, hidden], after R1; the scale of the norm before
    gate_up: Any = None  # [layers, hidden], after R1; the scale of the norm before
    down: Any = None  # [layers, intermediate], before R4; in up_proj
    # One a pair of channels that RoPE turns, and before R3; 1 for kv_heads if a norm shares them.
    keys: Any = None  # [layers, kv_heads or 1, head_dim / 2]; in k_proj, and inverted in q_proj
    values: Any = None  # [layers, kv_heads, head_dim], after R2; in v_proj


@struct.dataclass
class Clips:
    """Clip ratios by site, instead of the grid's; each [layers] or None."""

    qkv: Any = None
    o: Any = None
    gate_up: Any = None
    down: Any = None
    keys: Any = None
    values: Any = None


@struct.dataclass
class Learned:
    """All that is put on a model; what an optimiser moves is for `qrot.learn` to say."""

    rotations: Rotations
    shifts: Shifts | None = None
    clips: Clips | None = None
    scales: Scales | None = None


def rotate(x: Float[Array, "*batch n"], rotation) -> Float[Array, "*batch n"]:
    """x R, in x's dtype; x itself where the rotation is None."""
    if rotation is None:
        return x
    if isinstance(rotation, Hadamard):
        return fwht(x * rotation.signs.astype(x.dtype), block=rotation.block)
    if isinstance(rotation, Kronecker):
        return _kronecker(x * rotation.signs.astype(x.dtype), rotation.left, rotation.right)
    return _product(x, rotation, "...i,ij->...j", "...bi,bij->...bj")


def unrotate(x: Float[Array, "*batch n"], rotation) -> Float[Array, "*batch n"]:
    """x R^T, the inverse of `rotate`."""
    if rotation is None:
        return x
    if isinstance(rotation, Hadamard):
        return fwht(x, block=rotation.block, transpose=True) * rotation.signs.astype(x.dtype)
    if isinstance(rotation, Kronecker):
        turned = _kronecker(x, rotation.left.mT, rotation.right.mT)
        return turned * rotation.signs.astype(x.dtype)
    return _product(x, rotation, "...j,ij->...i", "...bj,bij->...bi")


def per_head(
    turn: Callable, x: Float[Array, "*batch n"], rotation, head_dim: int
) -> Float[Array, "*batch n"]:
    """`rotate` or `unrotate` (turn) each run of head_dim values.

    rotation: the same for all heads, or blocks for each kv head [kv_heads, head_dim / b, b, b],
    which then serve as many query heads each as there are.
    """
    heads = x.reshape(*x.shape[:-1], -1, head_dim)
    if getattr(rotation, "ndim", 0) == 4:
        each = over_heads(rotation, heads.shape[-2])
        return jax.vmap(turn, in_axes=(-2, 0), out_axes=-2)(heads, each).reshape(x.shape)
    return turn(heads, rotation).reshape(x.shape)


def over_heads(x: Float[Array, "kv_heads *n"], heads: int) -> Float[Array, "heads *n"]:
    """What belongs to kv heads (or to one for all), repeated for all the heads that share them."""
    return jnp.repeat(x, heads // x.shape[0], axis=0)


def by_layer(rotations: Rotations) -> dict[str, Any]:
    """The sites at which each layer has a rotation of its own: those with a `layers` axis."""
    key, down = rotations.key, rotations.down
    sites = {"value": rotations.value}
    if getattr(key, "ndim", 0) == 5:
        sites["key"] = key
    if isinstance(down, Kronecker):
        layered = down.signs.ndim == 2
    else:
        layered = getattr(down, "ndim", 0) == 4
    if layered:
        sites["down"] = down
    return sites


def is_signed(x: Any) -> bool:
    """Whether x is a rotation with signs, which are no matrix and are never learned."""
    return isinstance(x, Hadamard | Kronecker)


def _kronecker(x, left, right):
    split = x.reshape(*x.shape[:-1], left.shape[-1], right.shape[-1])
    wide = jnp.promote_types(x.dtype, left.dtype)
    product = jax.lax.Precision.HIGHEST
    split = jnp.einsum("...ab,bd->...ad", split.astype(wide), right, precision=product)
    split = jnp.einsum("...ad,ac->...cd", split, left, precision=product)
    return split.reshape(x.shape).astype(x.dtype)


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
    if isinstance(rotation, Kronecker):
        signs, left, right = (
            np.asarray(x, np.float64) for x in (rotation.signs, rotation.left, rotation.right)
        )
        product = np.einsum("...ac,...bd->...abcd", left, right)
        return signs[..., None] * product.reshape(*signs.shape, signs.shape[-1])
    return np.asarray(rotation, np.float64)
