"""The forms that a rotation comes in. Each is a pytree with the same three functions.

A rotation R acts on row vectors, x -> x R. Leading axes of its arrays, its *stack*, are as many
rotations: one a layer, or one a layer and kv head.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float

from qrot.hadamard.factors import hadamard_dense
from qrot.kernels.fwht import fwht

Matrix = TypeVar("Matrix", jax.Array, np.ndarray)

# What pytrees hold: arrays on a device, or on the host numpy's, which serve wherever those do.
if TYPE_CHECKING:
    Values = Array
else:
    Values = Array | np.ndarray
# Rotations are float32 whatever the activations are; a TPU would round them to bfloat16.
_EXACT = jax.lax.Precision.HIGHEST


class Dense(struct.PyTreeNode):
    """R as it is, a matrix."""

    matrix: Float[Values, "*stack n n"]

    ORTHOGONAL = ("matrix",)

    @property
    def stack(self) -> tuple[int, ...]:
        """The leading axes."""
        return self.matrix.shape[:-2]

    @property
    def size(self) -> int:
        """How many values are turned."""
        return self.matrix.shape[-1]

    def apply(self, x: Float[Array, "*batch n"]) -> Float[Array, "*batch n"]:
        """x R, in x's dtype."""
        return _product(x, self.matrix, "...i,ij->...j")

    def transpose(self, x: Float[Array, "*batch n"]) -> Float[Array, "*batch n"]:
        """x R^T, the inverse of `apply`."""
        return _product(x, self.matrix, "...j,ij->...i")

    def dense(self) -> Float[np.ndarray, "*stack n n"]:
        """R as a matrix in float64."""
        return np.asarray(self.matrix, np.float64)


class Blocks(struct.PyTreeNode):
    """R is block-diagonal: each block acts on its own b neighbours."""

    blocks: Float[Values, "*stack count b b"]

    ORTHOGONAL = ("blocks",)

    @property
    def stack(self) -> tuple[int, ...]:
        """The leading axes."""
        return self.blocks.shape[:-3]

    @property
    def size(self) -> int:
        """How many values are turned."""
        return self.blocks.shape[-3] * self.blocks.shape[-1]

    def apply(self, x: Float[Array, "*batch n"]) -> Float[Array, "*batch n"]:
        """x R, in x's dtype."""
        return self._each(x, "...bi,bij->...bj")

    def transpose(self, x: Float[Array, "*batch n"]) -> Float[Array, "*batch n"]:
        """x R^T, the inverse of `apply`."""
        return self._each(x, "...bj,bij->...bi")

    def _each(self, x, product: str):
        split = x.reshape(*x.shape[:-1], *self.blocks.shape[:2])
        return _product(split, self.blocks, product).reshape(x.shape)

    def dense(self) -> Float[np.ndarray, "*stack n n"]:
        """R as a matrix in float64."""
        blocks = np.asarray(self.blocks, np.float64)
        count, size = blocks.shape[-3:-1]
        whole = np.zeros((*blocks.shape[:-3], count, size, count, size))
        for i in range(count):
            whole[..., i, :, i, :] = blocks[..., i, :, :]
        return whole.reshape(*blocks.shape[:-3], count * size, count * size)


class Hadamard(struct.PyTreeNode):
    """R = diag(signs) H / sqrt(n), or block-diagonal with Hadamard blocks of size `block`."""

    signs: Float[Values, "*stack n"]  # +1 or -1
    block: int | None = struct.field(pytree_node=False, default=None)

    ORTHOGONAL = ()

    @property
    def stack(self) -> tuple[int, ...]:
        """The leading axes."""
        return self.signs.shape[:-1]

    @property
    def size(self) -> int:
        """How many values are turned."""
        return self.signs.shape[-1]

    def apply(self, x: Float[Array, "*batch n"]) -> Float[Array, "*batch n"]:
        """x R, in x's dtype."""
        return fwht(x * self.signs.astype(x.dtype), block=self.block)

    def transpose(self, x: Float[Array, "*batch n"]) -> Float[Array, "*batch n"]:
        """x R^T, the inverse of `apply`."""
        return fwht(x, block=self.block, transpose=True) * self.signs.astype(x.dtype)

    def dense(self) -> Float[np.ndarray, "*stack n n"]:
        """R as a matrix in float64."""
        signs = np.asarray(self.signs, np.float64)
        return signs[..., None] * hadamard_dense(signs.shape[-1], self.block)


class Kronecker(struct.PyTreeNode):
    """R = diag(signs) (left x right): n (a + b) products a vector in place of n^2, n = a b."""

    signs: Float[Values, "*stack n"]  # +1 or -1
    left: Float[Values, "*stack a a"]
    right: Float[Values, "*stack b b"]

    ORTHOGONAL = ("left", "right")

    @property
    def stack(self) -> tuple[int, ...]:
        """The leading axes."""
        return self.signs.shape[:-1]

    @property
    def size(self) -> int:
        """How many values are turned."""
        return self.signs.shape[-1]

    def apply(self, x: Float[Array, "*batch n"]) -> Float[Array, "*batch n"]:
        """x R, in x's dtype."""
        return _kronecker(x * self.signs.astype(x.dtype), self.left, self.right)

    def transpose(self, x: Float[Array, "*batch n"]) -> Float[Array, "*batch n"]:
        """x R^T, the inverse of `apply`."""
        return _kronecker(x, self.left.mT, self.right.mT) * self.signs.astype(x.dtype)

    def dense(self) -> Float[np.ndarray, "*stack n n"]:
        """R as a matrix in float64."""
        signs, left, right = (
            np.asarray(x, np.float64) for x in (self.signs, self.left, self.right)
        )
        product = np.einsum("...ac,...bd->...abcd", left, right)
        return signs[..., None] * product.reshape(*signs.shape, signs.shape[-1])


Rotation = Dense | Blocks | Hadamard | Kronecker
FORMS: dict[str, type[Rotation]] = {
    "dense": Dense,
    "blocks": Blocks,
    "hadamard": Hadamard,
    "kronecker": Kronecker,
}


def form_name(rotation: Rotation) -> str:
    """The key of a rotation's form in `FORMS`."""
    return type(rotation).__name__.lower()


def is_rotation(x: object) -> bool:
    """Whether x is a rotation in one of the forms; for `jax.tree.map(..., is_leaf=)`."""
    return isinstance(x, Rotation)


def rotate(x: Float[Array, "*batch n"], rotation: Rotation | None) -> Float[Array, "*batch n"]:
    """x R, in x's dtype; x itself where there is no rotation."""
    return x if rotation is None else rotation.apply(x)


def unrotate(x: Float[Array, "*batch n"], rotation: Rotation | None) -> Float[Array, "*batch n"]:
    """x R^T, the inverse of `rotate`."""
    return x if rotation is None else rotation.transpose(x)


def orthogonal_parts(rotation: Rotation) -> dict[str, Float[Values, "*stack m m"]]:
    """By field the arrays of a rotation that are orthogonal matrices; signs are none."""
    return {name: getattr(rotation, name) for name in type(rotation).ORTHOGONAL}


@jax.jit
def reorthonormalised(rotation: Rotation) -> Rotation:
    """Bring matrices that are orthogonal to within their error e to within 3/4 e^2.

    One Newton-Schulz step; signs stay as they are.
    """
    parts = orthogonal_parts(rotation)
    return rotation.replace(**{name: newton_schulz(matrix) for name, matrix in parts.items()})


def newton_schulz(matrix: Matrix) -> Matrix:
    """A step towards the nearest orthogonal matrices [*stack, n, n], R (3 I - R^T R) / 2."""
    return 1.5 * matrix - 0.5 * matrix @ (matrix.mT @ matrix)


def check_size(rotation: Rotation, n: int) -> None:
    """Trace a rotation of vectors of n values; raises InputError where there is none such."""
    jax.eval_shape(functools.partial(rotate, rotation=rotation), jnp.zeros(n))


def _kronecker(x, left, right):
    split = x.reshape(*x.shape[:-1], left.shape[-1], right.shape[-1])
    wide = jnp.promote_types(x.dtype, left.dtype)
    split = jnp.einsum("...ab,bd->...ad", split.astype(wide), right, precision=_EXACT)
    split = jnp.einsum("...ad,ac->...cd", split, left, precision=_EXACT)
    return split.reshape(x.shape).astype(x.dtype)


def _product(x, matrix, subscripts: str):
    wide = jnp.promote_types(x.dtype, matrix.dtype)
    return jnp.einsum(subscripts, x.astype(wide), matrix, precision=_EXACT).astype(x.dtype)
