"""Random rotations: where learning starts, and the baseline that it has to beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from qrot.errors import InputError
from qrot.kernels.hadamard import hadamard_dense
from qrot.rotation.rotations import Hadamard, Rotations, rotate


@runtime_checkable
class Sizes(Protocol):
    """The sizes that rotations need to know; any model's configuration has them."""

    @property
    def hidden_size(self) -> int: ...  # noqa: D102
    @property
    def intermediate_size(self) -> int: ...  # noqa: D102
    @property
    def num_hidden_layers(self) -> int: ...  # noqa: D102
    @property
    def head_dim(self) -> int: ...  # noqa: D102


@dataclass(frozen=True)
class RotationSites:
    """Which sites to rotate: true, false, or the size of the blocks to rotate within."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    residual: bool | int = True
    value: bool | int = True
    key: bool | int = True
    down: bool | int = True


def random_rotations(
    config: Sizes,
    seed: int,
    *,
    kind: Literal["hadamard", "orthogonal", "identity"] = "hadamard",
    sites: RotationSites | None = None,
) -> Rotations:
    """Random rotations: `hadamard` (QuaRot, 2024: random signs, then Hadamard) or `orthogonal`.

    `orthogonal` draws R1 and R2 from the uniform (Haar) distribution and keeps Hadamard rotations
    for the online R3 and R4, as published; `identity` likewise. Residual and value rotations come
    as float32 matrices ready to be learned, key and down as `Hadamard`.
    Raises InputError where no Hadamard matrix of the size is known (use blocks) or a block does not
    divide.
    """
    sites = sites or RotationSites()
    draw = np.random.default_rng(seed)
    head = config.head_dim

    def matrix(n: int, size: bool | int, where: str):
        block = _block(n, size, where)
        if kind == "orthogonal":
            blocks = [_haar(draw, block or n) for _ in range(n // (block or n))]
        elif kind == "identity":
            blocks = [np.eye(block or n)] * (n // (block or n))
        else:
            signs = _signs(draw, n)
            blocks = list(signs.reshape(-1, block or n, 1) * hadamard_dense(block or n))
        return np.asarray(blocks if block else blocks[0], np.float32)

    residual = value = key = down = None
    if sites.residual:
        residual = jnp.asarray(matrix(config.hidden_size, sites.residual, "residual"))
    if sites.value:
        layers = range(config.num_hidden_layers)
        value = jnp.asarray(np.stack([matrix(head, sites.value, "value") for _ in layers]))
    if sites.key:
        key = _hadamard(draw, head, sites.key, "key")
    if sites.down:
        down = _hadamard(draw, config.intermediate_size, sites.down, "down")
    return Rotations(residual, value, key, down)


def _block(n: int, size: bool | int, where: str) -> int | None:
    if size is True:
        return None
    if size < 1 or n % size:
        raise InputError(f"rotations.{where}: a block of {size} does not divide {n}")
    return int(size)


def _signs(draw, n: int) -> np.ndarray:
    return draw.choice([-1.0, 1.0], n)


def _haar(draw, n: int) -> np.ndarray:
    q, r = np.linalg.qr(draw.standard_normal((n, n)))
    return q * np.sign(np.diag(r))  # without the signs QR's own convention biases the draw


def _hadamard(draw, n: int, size: bool | int, where: str) -> Hadamard:
    block = _block(n, size, where)
    rotation = Hadamard(jnp.asarray(_signs(draw, n), jnp.float32), block)
    # A size without a matrix is refused here, not deep in a forward pass.
    jax.eval_shape(lambda r: rotate(r.signs, r), rotation)
    return rotation
