"""QuIP#: as QuIP, with codebooks cut out of the lattice E8 in place of a grid.

Tseng, Chee, Sun, Kuleshov, De Sa: QuIP#, ICML 2024, arXiv 2402.04396.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from qrot.errors import InputError
from qrot.grid import Grid
from qrot.model.params import Network
from qrot.quantize import quip
from qrot.quantize.lattice import SCALES, SIZE, round_vectors
from qrot.quantize.ldlq import ldlq
from qrot.quantize.method import Advance, Rows, WeightMethod, network_grids


@dataclass(frozen=True)
class QuipSharp:
    """How QuIP# rounds.

    Attributes:
        damping: what is added to the Hessian's diagonal, as a share of its mean.
        seed: of the random signs.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    method: Literal["quip_sharp"] = "quip_sharp"
    damping: float = 0.01
    seed: int = 0

    def __post_init__(self):
        quip.check_settings(self.damping, self.seed)


def quip_sharp(
    network: Network,
    rows: Rows,
    settings: QuipSharp | None = None,
    *,
    batch: int = 2,
    advance: Advance = lambda: None,
) -> Network:
    """`quip`, with the codebook of as many bits as the grid has, over the root mean square.

    Args:
        network: fused, or with nothing on it. Embedding and head are left alone.
        rows: tokens to calibrate on.
        settings: the defaults if None.
        batch: windows that run at once.
        advance: called after each layer.

    Returns:
        The network with rounded weights, which are on no grid and have no scales.

    Raises:
        InputError: as `check` does, or where activations are not finite.
        ValueError: where rotations are not fused.
    """
    settings = settings or QuipSharp()
    check(network, settings)
    damping, seed = settings.damping, settings.seed
    return quip.incoherent(network, rows, damping, seed, LATTICE, batch=batch, advance=advance)


def check(network: Network, settings: Any) -> None:
    """Raise InputError where there is no codebook of such bits, or no transform of the weights."""
    for i, grids in enumerate(network_grids(network)):
        for name, grid in grids.weights.items():
            if grid.on:
                _check_codebook(network, f"layers.{i}.{name}", name, grid)
    quip.check(network, settings)


def _check_codebook(network: Network, where: str, name: str, grid: Grid) -> None:
    if grid.bits not in SCALES:
        key = "weights.bits" if grid.bits == network.scheme.weights.bits else "overrides"
        raise InputError(
            f"scheme.{key}: quip_sharp has codebooks of {', '.join(map(str, SCALES))} bits, and "
            f"{where} is to have {grid.bits}"
        )
    if not grid.integers:
        raise InputError(f"scheme.weights.codebook: quip_sharp has its own, not {grid.codebook}")
    if grid.group is not None:
        raise InputError("scheme.weights.group: quip_sharp has one scale a matrix, and no groups")
    inputs = network.params.layers.linear(name).weight.shape[1]
    if inputs % SIZE:
        raise InputError(
            f"weights.method: quip_sharp rounds {SIZE} inputs together, which do not divide the "
            f"{inputs} of {where}"
        )


def _on_codebook(
    weights: list[Float[Array, "in _"]], feedback: Float[Array, "in in"], grid: Grid
) -> Float[Array, "in out"]:
    sizes = [jnp.sqrt(jnp.mean(jnp.square(w))) for w in weights]
    sizes = [jnp.where(size == 0, 1, size) for size in sizes]
    scale = jnp.concatenate([jnp.full(w.shape[1], s) for w, s in zip(weights, sizes, strict=True)])
    wide = jnp.concatenate(weights, axis=1) / scale
    near = ldlq(wide, feedback, lambda rows, _: round_vectors(rows.T, grid.bits).T, block=SIZE)
    return near * scale


LATTICE = quip.Codebook(SIZE, _on_codebook, "QuIP#")
QUIP_SHARP = WeightMethod(
    "quip_sharp",
    QuipSharp,
    quip_sharp,
    "QuIP#",
    "calibration",
    compensates=True,
    check=check,
    facts=quip.sign_seed,
)
