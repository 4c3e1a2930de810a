"""QuIP and QuIP#: weights are rounded in a basis in which they look like Gaussian noise.

Chee, Cai, Kuleshov, De Sa: QuIP, NeurIPS 2023, arXiv 2307.13304.
Tseng, Chee, Sun, Kuleshov, De Sa: QuIP#, ICML 2024, arXiv 2402.04396.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from qrot.errors import InputError, located
from qrot.grid import Grid, nearest
from qrot.model.config import ModelConfig
from qrot.model.params import Layers, Params
from qrot.sites import PROJECTIONS
from qrot.quantize.gptq import warn_of_damping
from qrot.quantize.lattice import SCALES, SIZE, round_vectors
from qrot.calibrate.moments import (
    Seen,
    layer_by_layer,
    rounded_sites,
    weight_grids,
    with_weights,
)
from qrot.quantize.ldlq import block_ldl, ldlq
from qrot.quantize.rtn import weight_scale_and_zero
from qrot.rotation.forms import Hadamard, Rotations, rotate, unrotate
from qrot.scheme import READERS, Scheme


@dataclass(frozen=True)
class Quip:
    """How QuIP and QuIP# round.

    damping: what is added to the Hessian's diagonal, as a share of its mean.
    seed: of the random signs.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    damping: float = 0.01
    seed: int = 0

    def __post_init__(self):
        if not 0 < self.damping <= 1:
            raise InputError(f"quip.damping: {self.damping} is outside 0 to 1")
        if self.seed < 0:
            raise InputError("quip.seed: a seed is not negative")


def quip(
    params: Params,
    scheme: Scheme,
    config: ModelConfig,
    rows: Int[np.ndarray, "count length"],
    *,
    rotations: Rotations | None = None,
    settings: Quip | None = None,
    lattice: bool = False,
    batch: int = 2,
    advance: Callable[[], None] = lambda: None,
) -> Params:
    """Round the weights of all linear layers to `scheme.weights`; embed and head are left alone.

    Layer by layer, as `gptq` does. Every weight W is rounded as U^T W V, U and V being random signs
    followed by the Hadamard transform (`solve`), and returned in the basis in which it came. A
    deployed model would hold the levels, and transform the input and the output of each weight.

    rows: tokens to calibrate on. rotations: what `fuse` left online; None where nothing was fused.
    lattice: QuIP#, codebooks in place of the grid. advance: called after each layer.
    Raises InputError as `check` does, or where activations are not finite; ValueError where the
    rotations are not fused. Warns where a Hessian needs more damping.
    """
    check(params.layers, scheme, lattice=lattice)
    settings, grids = settings or Quip(), weight_grids(scheme, config.num_hidden_layers)

    def change(i: int, layer: Layers, seen: dict[str, Seen]) -> Layers:
        into, out = layer_turns(layer, settings.seed, i)
        for site, here in seen.items():
            names = READERS[site]
            weights, used = solve(
                tuple(getattr(layer, n).weight for n in names),
                here.hessian,
                tuple(grids[i][n] for n in names),
                into[site],
                tuple(out[n] for n in names),
                settings.damping,
                lattice=lattice,
            )
            method = "QuIP#" if lattice else "QuIP"
            warn_of_damping(f"{site} in layer {i}", settings.damping, float(used), method)
            layer = with_weights(layer, dict(zip(names, weights, strict=True)))
        return layer

    return layer_by_layer(
        params,
        config,
        rows,
        change,
        sites=rounded_sites(grids),
        rotations=rotations,
        batch=batch,
        advance=advance,
    )


quip_sharp = partial(quip, lattice=True)


def check(layers: Layers, scheme: Scheme, *, lattice: bool) -> None:
    """Raise InputError where these weights have no such transform, or no codebook of such bits."""
    for i, grids in enumerate(weight_grids(scheme, layers.attention_norm.shape[0])):
        for name, grid in grids.items():
            if grid.on and lattice:
                _check_codebook(f"layers.{i}.{name}", getattr(layers, name).weight, grid, scheme)
    for names in READERS.values():
        for name in names:
            with located(f"weight_method: {name} cannot be transformed"):
                for n in getattr(layers, name).weight.shape[1:]:
                    jax.eval_shape(lambda r: rotate(r.signs, r), Hadamard(jnp.ones(n)))


def _check_codebook(name: str, weight, grid: Grid, scheme: Scheme) -> None:
    if grid.bits not in SCALES:
        key = "weights.bits" if grid.bits == scheme.weights.bits else "overrides"
        raise InputError(
            f"scheme.{key}: quip_sharp has codebooks of {', '.join(map(str, SCALES))} bits, and "
            f"{name} is to have {grid.bits}"
        )
    if grid.group is not None:
        raise InputError("scheme.weights.group: quip_sharp has one scale a matrix, and no groups")
    if weight.shape[1] % SIZE:
        raise InputError(
            f"weight_method: quip_sharp rounds {SIZE} inputs together, which do not divide the "
            f"{weight.shape[1]} of {name}"
        )


def layer_turns(
    layer: Layers, seed: int, i: int
) -> tuple[dict[str, Hadamard], dict[str, Hadamard]]:
    """The random transforms of layer i: of the input of each site, of the output of each weight.

    Weights that read one input share its transform, at run time, too.
    """
    draw = np.random.default_rng((seed, i))

    def hadamard(n: int) -> Hadamard:
        return Hadamard(jnp.asarray(draw.choice([-1.0, 1.0], n), jnp.float32))

    into = {site: hadamard(getattr(layer, READERS[site][0]).weight.shape[0]) for site in READERS}
    return into, {name: hadamard(getattr(layer, name).weight.shape[1]) for name in PROJECTIONS}


@partial(jax.jit, static_argnames=("grids", "lattice"))
def solve(
    weights: tuple[Float[Array, "in _"], ...],
    hessian: Float[Array, "in in"],
    grids: tuple[Grid, ...],
    into: Hadamard | None,
    outs: tuple[Hadamard | None, ...],
    damping: Float[Array, ""] | float = 0.01,
    *,
    lattice: bool = False,
) -> tuple[tuple[Float[Array, "in _"], ...], Float[Array, ""]]:
    """Weights that read one input, rounded with a small error tr(E^T H E); and the damping used.

    With y = x W = (x U) (U^T W V) V^T, U^T W V is rounded by LDLQ with U^T H U, and turned back.
    Its entries are sums of many of W's with random signs: none is much larger than the others, and
    no direction of H lies along an input ("incoherence"). Rounding errors are as random there, so
    that they are orthogonal to what H weighs most but for what the feedback takes care of.

    hessian: H = X^T X of the inputs x; any factor on it is the same. into, outs: U, and V of each
    weight; None for none. lattice: codebooks of E8 (`qrot.quantize.lattice`) for the weights over
    their root mean square; or else the grid, its scales (and clip) from U^T W V.
    """
    dtype = weights[0].dtype
    each = [
        _turn(w.astype(jnp.promote_types(dtype, jnp.float32)), into, v)
        for w, v in zip(weights, outs, strict=True)
    ]
    turned = rotate(rotate(hessian, into).T, into)
    feedback, used = block_ldl(turned, damping, SIZE if lattice else 1)
    rounded = list(weights)
    for grid in {g: None for g in grids if g.on}:  # those on one grid are rounded side by side
        mine = [i for i, other in enumerate(grids) if other == grid]
        some = [each[i] for i in mine]
        together = _on_codebook(some, feedback, grid) if lattice else _on_grid(some, feedback, grid)
        edges = np.cumsum([w.shape[1] for w in some])[:-1]
        for i, part in zip(mine, jnp.split(together, edges, axis=1), strict=True):
            rounded[i] = _turn_back(part, into, outs[i]).astype(dtype)
    return tuple(rounded), used


def _turn(w: Float[Array, "in out"], into, out) -> Float[Array, "in out"]:
    return rotate(rotate(w.T, into).T, out)


def _turn_back(w: Float[Array, "in out"], into, out) -> Float[Array, "in out"]:
    return unrotate(unrotate(w, out).T, into).T


def _on_grid(
    weights: list[Float[Array, "in _"]], feedback: Float[Array, "in in"], grid: Grid
) -> Float[Array, "in out"]:
    found = [(w, *weight_scale_and_zero(w, grid)) for w in weights]
    wide, scale, zero = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *found)

    def quantise(rows, levels):
        scale, zero = levels
        return nearest(rows, scale, zero, grid) * scale

    return ldlq(wide, feedback, quantise, (scale, zero))


def _on_codebook(
    weights: list[Float[Array, "in _"]], feedback: Float[Array, "in in"], grid: Grid
) -> Float[Array, "in out"]:
    sizes = [jnp.sqrt(jnp.mean(jnp.square(w))) for w in weights]
    sizes = [jnp.where(size == 0, 1, size) for size in sizes]
    scale = jnp.concatenate([jnp.full(w.shape[1], s) for w, s in zip(weights, sizes, strict=True)])
    wide = jnp.concatenate(weights, axis=1) / scale
    near = ldlq(wide, feedback, lambda rows, _: round_vectors(rows.T, grid.bits).T, block=SIZE)
    return near * scale
