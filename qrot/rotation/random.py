"""Random rotations: where learning starts, and the baseline that it has to beat."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from qrot.errors import InputError
from qrot.hadamard.factors import hadamard_dense
from qrot.rotation.forms import Blocks, Dense, Hadamard, Rotation, check_size
from qrot.sites import ROTATIONS, Sizes, rotation_site


@dataclass(frozen=True)
class RotationSites:
    """Which sites to rotate: true, false, or the size of the blocks to rotate within."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    residual: bool | int = True
    value: bool | int = True
    key: bool | int = True
    down: bool | int = True

    def __post_init__(self):
        for name, block in vars(self).items():
            if block is not True and block is not False and block < 1:
                raise InputError(f"rotations.{name}: there are no blocks of {block}")


def stream(seed: int, *names: str | int) -> np.random.Generator:
    """Random numbers of a stream of its own: what is drawn from another leaves them as they are.

    Args:
        seed: of all streams.
        names: of this one; it differs from `default_rng(seed)` and from that of any other names.
    """
    key = [zlib.crc32(name.encode()) if isinstance(name, str) else name for name in names]
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(len(key), *key)))


def random_rotations(
    sizes: Sizes,
    seed: int,
    *,
    kind: Literal["hadamard", "orthogonal", "identity"] = "hadamard",
    sites: RotationSites | None = None,
) -> dict[str, Rotation]:
    """Random rotations by name, each from a stream of its own.

    Args:
        sizes: of the network.
        seed: of what is drawn.
        kind: `hadamard` (QuaRot, 2024: random signs, then Hadamard), or `orthogonal`, which draws
            R1 and R2 from the uniform (Haar) distribution and keeps Hadamard rotations for the
            online R3 and R4, as published; `identity` likewise.
        sites: which to rotate; all if None.

    Returns:
        R1, one matrix, and R2, one a layer, in float32, ready to be learned; R3 and R4, one for all
        layers, as `Hadamard`.

    Raises:
        InputError: where no Hadamard matrix of the size is known (use blocks), or a block does not
            divide.
    """
    found = {}
    for name in ROTATIONS:
        size: bool | int = getattr(sites or RotationSites(), name)
        if size is False:
            continue
        site, draw = rotation_site(name), stream(seed, "rotation", name)
        n = site.rotation_size(sizes)
        if size is not True and (size < 1 or n % size):
            raise InputError(f"rotations.{name}: a block of {size} does not divide {n}")
        block = None if size is True else int(size)
        if site.online:
            found[name] = Hadamard(jnp.asarray(_signs(draw, n), jnp.float32), block)
            check_size(found[name], n)  # refused here, not deep in a forward pass
        elif site.per_head:
            each = [_matrices(draw, n, block, kind) for _ in range(sizes.num_hidden_layers)]
            found[name] = _of_form(np.stack(each), block)
        else:
            found[name] = _of_form(_matrices(draw, n, block, kind), block)
    return found


def _of_form(matrices: Float[np.ndarray, "*stack count b b"], block: int | None) -> Rotation:
    array = jnp.asarray(matrices, jnp.float32)
    return Dense(array[..., 0, :, :]) if block is None else Blocks(array)


def _matrices(
    draw: np.random.Generator, n: int, block: int | None, kind: str
) -> Float[np.ndarray, "count b b"]:
    size = block or n
    if kind == "orthogonal":
        return np.stack([_haar(draw, size) for _ in range(n // size)])
    if kind == "identity":
        return np.stack([np.eye(size)] * (n // size))
    return _signs(draw, n).reshape(-1, size, 1) * hadamard_dense(size)


def _signs(draw: np.random.Generator, n: int) -> Float[np.ndarray, " n"]:
    return draw.choice([-1.0, 1.0], n)


def _haar(draw: np.random.Generator, n: int) -> Float[Any, "n n"]:
    q, r = np.linalg.qr(draw.standard_normal((n, n)))
    return q * np.sign(np.diag(r))  # without the signs QR's own convention biases the draw
