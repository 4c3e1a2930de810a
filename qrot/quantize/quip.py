"""QuIP: weights are rounded in a basis in which they look like Gaussian noise.

Chee, Cai, Kuleshov, De Sa: QuIP, NeurIPS 2023, arXiv 2307.13304; with Hadamard transforms as in
Tseng, Chee, Sun, Kuleshov, De Sa: QuIP#, ICML 2024, arXiv 2402.04396.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from qrot.calibrate.moments import Moments, change_layers
from qrot.errors import InputError, located
from qrot.grid import Grid, nearest
from qrot.model.params import Layers, Network
from qrot.quantize.gptq import warn_of_damping
from qrot.quantize.ldlq import block_ldl, ldlq
from qrot.quantize.method import (
    Advance,
    Rows,
    WeightMethod,
    network_grids,
    rounded_sites,
    with_weights,
)
from qrot.quantize.rtn import weight_scale_and_zero
from qrot.rotation.forms import Hadamard, check_size, rotate, unrotate
from qrot.rotation.random import stream
from qrot.sites import INPUTS, PROJECTIONS, SITES


@dataclass(frozen=True)
class Quip:
    """How QuIP rounds.

    Attributes:
        damping: what is added to the Hessian's diagonal, as a share of its mean.
        seed: of the random signs.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    method: Literal["quip"] = "quip"
    damping: float = 0.01
    seed: int = 0

    def __post_init__(self):
        check_settings(self.damping, self.seed)


def check_settings(damping: float, seed: int) -> None:
    """Raise InputError where they are out of range."""
    if not 0 < damping <= 1:
        raise InputError(f"weights.damping: {damping} is outside 0 to 1")
    if seed < 0:
        raise InputError("weights.seed: a seed is not negative")


class Codebook(NamedTuple):
    """What the weights of the new basis are rounded to.

    Attributes:
        block: inputs that are rounded together.
        round: (weights side by side, feedback of `block_ldl`, their grid) -> rounded, in one.
        label: of the method, for messages.
    """

    block: int
    round: Callable[[list[Array], Array, Grid], Array]
    label: str


def quip(
    network: Network,
    rows: Rows,
    settings: Quip | None = None,
    *,
    batch: int = 2,
    advance: Advance = lambda: None,
) -> Network:
    """Round the weights of all linear layers to `network.scheme.weights`, in bases of their own.

    Layer by layer, as `gptq` does. Every weight W is rounded as U^T W V, U and V being random signs
    followed by the Hadamard transform (`solve`), and returned in the basis in which it came. A
    deployed model would hold the levels, and transform the input and the output of each weight.

    Args:
        network: fused, or with nothing on it. Embedding and head are left alone.
        rows: tokens to calibrate on.
        settings: the defaults if None.
        batch: windows that run at once.
        advance: called after each layer.

    Returns:
        The network with rounded weights, which in its own basis are on no grid and have no scales.
        Warns where a Hessian needs more damping.

    Raises:
        InputError: as `check` does, or where activations are not finite.
        ValueError: where rotations are not fused.
    """
    settings = settings or Quip()
    check(network, settings)
    damping, seed = settings.damping, settings.seed
    return incoherent(network, rows, damping, seed, GRID, batch=batch, advance=advance)


def incoherent(
    network: Network,
    rows: Rows,
    damping: float,
    seed: int,
    codebook: Codebook,
    *,
    batch: int,
    advance: Advance,
) -> Network:
    """`quip` with any codebook."""
    grids = network_grids(network)

    def change(i: int, layer: Layers, moments: dict[str, Moments]) -> Layers:
        into, out = layer_rotations(layer, seed, i)
        for site, here in moments.items():
            names = SITES[site].readers
            weights, used = solve(
                tuple(layer.linear(n).weight for n in names),
                here.hessian,
                tuple(grids[i].weights[n] for n in names),
                into[site],
                tuple(out[n] for n in names),
                damping,
                codebook=codebook,
            )
            warn_of_damping(f"{site} in layer {i}", damping, float(used), codebook.label)
            layer = with_weights(layer, {n: (w, None) for n, w in zip(names, weights, strict=True)})
        return layer

    sites = rounded_sites(grids)
    return change_layers(network, rows, change, sites=sites, batch=batch, advance=advance)


def check(network: Network, settings: Any) -> None:
    """Raise InputError where the weights of a network have no such transform."""
    for name in PROJECTIONS:
        with located(f"weights.method: {name} cannot be transformed"):
            for n in network.params.layers.linear(name).weight.shape[1:]:
                check_size(Hadamard(jnp.ones(n)), n)


def layer_rotations(
    layer: Layers, seed: int, i: int
) -> tuple[dict[str, Hadamard], dict[str, Hadamard]]:
    """The random transforms of layer i: of the input of each site, of the output of each weight.

    Weights that read one input share its transform, at run time, too.
    """
    draw = stream(seed, "quip", i)

    def hadamard(n: int) -> Hadamard:
        return Hadamard(jnp.asarray(draw.choice([-1.0, 1.0], n), jnp.float32))

    inputs = {site: layer.linear(SITES[site].readers[0]).weight.shape[0] for site in INPUTS}
    into = {site: hadamard(n) for site, n in inputs.items()}
    return into, {name: hadamard(layer.linear(name).weight.shape[1]) for name in PROJECTIONS}


@partial(jax.jit, static_argnames=("grids", "codebook"))
def solve(
    weights: tuple[Float[Array, "in _"], ...],
    hessian: Float[Array, "in in"],
    grids: tuple[Grid, ...],
    into: Hadamard | None,
    outs: tuple[Hadamard | None, ...],
    damping: Float[Array, ""] | float = 0.01,
    *,
    codebook: Codebook,
) -> tuple[tuple[Float[Array, "in _"], ...], Float[Array, ""]]:
    """Weights that read one input, rounded with a small error tr(E^T H E); and the damping used.

    With y = x W = (x U) (U^T W V) V^T, U^T W V is rounded by LDLQ with U^T H U, and rotated back.
    Its entries are sums of many of W's with random signs: none is much larger than the others, and
    no direction of H lies along an input ("incoherence"). Rounding errors are as random there, so
    that they are orthogonal to what H weighs most but for what the feedback takes care of.

    Args:
        weights: W of each.
        hessian: H = X^T X of the inputs x; any factor on it is the same.
        grids: of each weight.
        into: U; None for none.
        outs: V of each weight; None for none.
        damping: share of the mean of H's diagonal that is added to it.
        codebook: that U^T W V is rounded to.
    """
    dtype = weights[0].dtype
    each = [
        _rotated(w.astype(jnp.promote_types(dtype, jnp.float32)), into, v)
        for w, v in zip(weights, outs, strict=True)
    ]
    rotated = rotate(rotate(hessian, into).T, into)
    feedback, used = block_ldl(rotated, damping, codebook.block)
    rounded = list(weights)
    for grid in {g: None for g in grids if g.on}:  # those on one grid are rounded side by side
        mine = [i for i, other in enumerate(grids) if other == grid]
        some = [each[i] for i in mine]
        together = codebook.round(some, feedback, grid)
        edges = np.cumsum([w.shape[1] for w in some])[:-1]
        for i, part in zip(mine, jnp.split(together, edges, axis=1), strict=True):
            rounded[i] = _rotated_back(part, into, outs[i]).astype(dtype)
    return tuple(rounded), used


def _rotated(w: Float[Array, "in out"], into, out) -> Float[Array, "in out"]:
    return rotate(rotate(w.T, into).T, out)


def _rotated_back(w: Float[Array, "in out"], into, out) -> Float[Array, "in out"]:
    return unrotate(unrotate(w, out).T, into).T


def _on_grid(
    weights: list[Float[Array, "in _"]], feedback: Float[Array, "in in"], grid: Grid
) -> Float[Array, "in out"]:
    """To the grid itself, its scales (and clip ratios) from the weights in the new basis."""
    found = [(w, *weight_scale_and_zero(w, grid)) for w in weights]
    wide, scale, zero = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *found)

    def quantise(rows, levels):
        scale, zero = levels
        return nearest(rows, scale, zero, grid) * scale

    return ldlq(wide, feedback, quantise, (scale, zero))


def sign_seed(settings: Any) -> dict[str, int]:
    """What a row of results tells of these settings."""
    return {"sign_seed": settings.seed}


GRID = Codebook(1, _on_grid, "QuIP")
QUIP = WeightMethod(
    "quip",
    Quip,
    quip,
    "QuIP",
    "calibration",
    compensates=True,
    check=check,
    facts=sign_seed,
)
