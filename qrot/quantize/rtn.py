"""Round-to-nearest: every weight to the nearest level of its grid."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from qrot.grid import FOUR_OVER_SIX, Grid, elementwise_scale_and_zero, fake_quantise
from qrot.model.config import ModelConfig
from qrot.model.params import Layers, Linear, Network
from qrot.network import fuse_layer, layer_online
from qrot.quantize.method import Advance, Rows, WeightMethod, network_grids, unit_scale
from qrot.rotation.transform import Online, Transform
from qrot.scheme import LayerScheme, layer_scheme
from qrot.sites import PROJECTIONS

# Ratios of codes with uneven steps are tried from here on: where all codes near the largest are far
# apart, a larger scale can be better, too.
_ABOVE = 1.5


@dataclass(frozen=True)
class Rtn:
    """Round-to-nearest; all that it depends on stands in the scheme."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    method: Literal["rtn"] = "rtn"


def rtn(
    network: Network,
    rows: Rows | None = None,
    settings: Rtn | None = None,
    *,
    batch: int = 2,
    advance: Advance = lambda: None,
) -> Network:
    """Round the weights of all linear layers to `network.scheme.weights`.

    Args:
        network: fused, or with nothing on it. Embedding and head are left alone.
        rows: not read; and so are settings, batch and advance.

    Returns:
        The network with rounded weights, and their scales where the grid is symmetric.

    Raises:
        InputError: where a group does not divide a layer's inputs.
    """
    layers, grids = network.params.layers, network_grids(network)

    def rounded(name: str) -> Linear:
        linear, each = layers.linear(name), [g.weights[name] for g in grids]
        if not any(grid.on for grid in each):
            return linear
        if len(set(each)) == 1:
            weight, scale = _round_stack(linear.weight, each[0])
        else:
            # One at a time: a program for each grid, not one for each way that grids follow.
            parts = [_round_stack(linear.weight[i : i + 1], grid) for i, grid in enumerate(each)]
            weight, scale = jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
        return linear.replace(weight=weight, scale=scale)

    changed = layers.replace(**{name: rounded(name) for name in PROJECTIONS})
    return network.replace(params=network.params.replace(layers=changed))


RTN = WeightMethod("rtn", Rtn, rtn, "round to nearest", "none")


@partial(jax.jit, static_argnums=1)
def _round_stack(weights: Float[Any, "layers in out"], grid: Grid):
    return jax.lax.map(lambda weight: round_with_scale(weight, grid), weights)


def round_with_scale(
    weight: Float[Array, "in out"], grid: Grid
) -> tuple[Float[Array, "in out"], Float[Array, "groups out"] | None]:
    """One weight matrix as `round_weight` rounds it, and its scales as `Linear` has them."""
    clip = clip_ratio(weight, grid)
    rounded = fake_quantise(weight, grid, axis=-2, clip=clip)
    return rounded, scale_by_group(weight, grid, clip)


def scale_by_group(
    weight: Float[Array, "in out"], grid: Grid, clip: Float[Array, "..."] | float
) -> Float[Array, "groups out"] | None:
    """The scales of a weight as `Linear` has them; None where the grid is asymmetric.

    Args:
        weight: before it is rounded.
        grid: that it is rounded to; scales of 1 where it does not round.
        clip: one ratio, or one for each scale, as `best_clip` returns them.
    """
    if grid.kind == "asymmetric":
        return None
    if not grid.on:
        return unit_scale(weight, grid)
    wide = weight.astype(jnp.promote_types(weight.dtype, jnp.float32))
    return by_group(elementwise_scale_and_zero(wide, grid, axis=-2, clip=clip)[0], grid)


def by_group(scale: Float[Array, "in out"], grid: Grid) -> Float[Array, "groups out"]:
    """One of the equal scales of each group of inputs, times the unit of the codes: where codes are
    whole units, weights are integers times what is in `Linear.scale`."""
    return scale[:: grid.group or scale.shape[0]] * grid.unit


def rtn_layer(layer: Layers, grids: LayerScheme, *, scale_gradient: bool = True) -> Layers:
    """The weights of one layer (no `layers` axis) on their grids; differentiable, no scales."""

    def rounded(linear: Linear, grid: Grid) -> Linear:
        return linear.replace(weight=round_weight(linear.weight, grid, scale_gradient))

    return layer.replace(
        **{name: rounded(layer.linear(name), grid) for name, grid in grids.weights.items()}
    )


def fuse_and_round(
    layer: Layers,
    transform: Transform,
    grids: LayerScheme,
    *,
    config: ModelConfig,
    scale_gradient: bool = True,
) -> tuple[Layers, Online]:
    """One layer as learning trains by: its weights fused, then on their grids.

    Args:
        layer: folded (no `layers` axis).
        transform: of this layer.
        grids: of its weights.
        config: sizes of the network.
        scale_gradient: see `Scheme`.

    Returns:
        The layer, and what is left online; both differentiable by the transform.
    """
    fused = fuse_layer(layer, transform, config)
    return rtn_layer(fused, grids, scale_gradient=scale_gradient), layer_online(transform, config)


def weight_scale_and_zero(
    weight: Float[Array, "in out"], grid: Grid
) -> tuple[Float[Array, "in out"], Float[Array, "in out"] | None]:
    """Scale and zero point of each weight, by which `round_weight` rounds; see `Grid`."""
    return elementwise_scale_and_zero(weight, grid, axis=-2, clip=clip_ratio(weight, grid))


def round_weight(
    weight: Float[Array, "in out"], grid: Grid, scale_gradient: bool = True
) -> Float[Array, "in out"]:
    """One weight matrix on its grid, with the grid's clip ratio or the one searched for."""
    clip = clip_ratio(weight, grid)
    return fake_quantise(weight, grid, axis=-2, clip=clip, scale_gradient=scale_gradient)


def clip_ratio(weight: Float[Array, "in out"], grid: Grid) -> Float[Array, "..."] | float:
    """The ratio of the grid, or for each scale the one that was searched for."""
    if not isinstance(grid.clip, str):
        return grid.clip
    if grid.clip == FOUR_OVER_SIX:
        return best_clip(weight, grid, highest=1.5, lowest=1.5)
    return best_clip(weight, grid, highest=None if grid.integers else _ABOVE)


def best_clip(
    weight: Float[Array, "in out"],
    grid: Grid,
    *,
    highest: float | None = None,
    lowest: float = 0.4,
    step: float = 0.02,
    hessian: Float[Array, "in in"] | None = None,
) -> Float[Array, "..."]:
    """The clip ratio of least squared rounding error for each scale of the grid.

    Args:
        weight: to be rounded.
        grid: that it is rounded to.
        highest, lowest, step: of the ratios that are tried beside 1: highest, highest - step, ...;
            1 - step at first by default.
        hessian: H = X^T X of the inputs, for the error e^T H e of the weights e that share a
            scale, by their own inputs, instead of e^T e.

    Returns:
        Ratios that broadcast against the scales: [1, out] per channel, [groups, 1, out] per group,
        [1, 1] per tensor. Constant for the derivative.
    """
    wide = jnp.promote_types(weight.dtype, jnp.float32)  # errors are summed in at least float32
    weight = jax.lax.stop_gradient(weight).astype(wide)
    plain = replace(grid, clip=1.0)
    inputs, outputs = weight.shape
    size = grid.group or inputs
    axes = (1, 2) if grid.granularity == "tensor" else (1,)
    within = None if hessian is None else _diagonal_blocks(hessian, size)
    product = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)

    def error(clip):
        change = fake_quantise(weight, plain, axis=-2, clip=clip) - weight
        change = change.reshape(-1, size, outputs)
        weighted = change if within is None else product(within, change)
        return (change * weighted).sum(axes, keepdims=True)

    def better(best, clip):
        least, chosen = best
        now = error(clip)
        return (jnp.minimum(now, least), jnp.where(now < least, clip, chosen)), None

    whole = error(1.0)
    first = 1 - step if highest is None else highest
    candidates = jnp.arange(first, lowest - step / 2, -step, dtype=weight.dtype)
    candidates = candidates if grid.on else candidates[:0]
    (_, chosen), _ = jax.lax.scan(better, (whole, jnp.ones_like(whole)), candidates)
    return chosen if grid.granularity == "group" else chosen[0]


def _diagonal_blocks(x: Float[Array, "n n"], size: int) -> Float[Array, "blocks size size"]:
    split = x.reshape(-1, size, len(x) // size, size)
    here = jnp.arange(len(split))
    return split[here, :, here]


def mean_best_clip(network: Network) -> Float[Array, ""]:
    """The mean over all scales of the clip ratios that `best_clip` finds."""
    return _mean_best_clip(network.params.layers, layer_scheme(network.scheme, 0))


@partial(jax.jit, static_argnums=1)
def _mean_best_clip(layers: Layers, grids: LayerScheme) -> Float[Array, ""]:
    def mean(layer: Layers) -> Float[Array, ""]:
        on = {name: grid for name, grid in grids.weights.items() if grid.on}
        clips = [best_clip(layer.linear(name).weight, grid).ravel() for name, grid in on.items()]
        return jnp.concatenate(clips).mean()

    return jax.lax.map(mean, layers).mean()
