"""Round-to-nearest: every weight to the nearest level of its grid."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from qrot.grid import Grid, elementwise_scale_and_zero, fake_quantise
from qrot.model.config import ModelConfig
from qrot.network import rotate_layer
from qrot.model.params import Layers, Linear, Params
from qrot.rotation.forms import Rotations, Scales
from qrot.scheme import LayerScheme, Scheme, layer_scheme, segments


def rtn(params: Params, scheme: Scheme) -> Params:
    """Round the weights of all linear layers to `scheme.weights`; embed and head are left alone.

    Raises InputError where a group does not divide a layer's inputs.
    """
    layers, names = params.layers, {}
    for start, stop, grids in segments(scheme, layers.attention_norm.shape[0]):
        for name, grid in grids.weights:
            names.setdefault(name, []).extend([grid] * (stop - start))

    def rounded(name: str, grids: list[Grid]) -> Linear:
        linear = getattr(layers, name)
        if len(set(grids)) == 1:
            return linear.replace(weight=_rtn_stack(linear.weight, grids[0]))
        # One at a time: a program for each grid, not one for each way that grids follow each other.
        parts = [_rtn_stack(linear.weight[i : i + 1], grid) for i, grid in enumerate(grids)]
        return linear.replace(weight=jnp.concatenate(parts))

    return params.replace(
        layers=layers.replace(**{name: rounded(name, grids) for name, grids in names.items()})
    )


@partial(jax.jit, static_argnums=1)
def _rtn_stack(weights: Float[Array, "layers in out"], grid: Grid) -> Float[Array, "layers in out"]:
    return jax.lax.map(lambda weight: round_weight(weight, grid), weights)


@partial(jax.jit, static_argnums=1)
def rtn_layers(layers: Layers, grids: LayerScheme) -> Layers:
    """Some layers with the same grids."""
    return jax.lax.map(lambda layer: rtn_layer(layer, grids), layers)


def rtn_layer(layer: Layers, grids: LayerScheme, *, scale_gradient: bool = True) -> Layers:
    """The weights of one layer (no `layers` axis) on their grids; differentiable."""

    def rounded(linear: Linear, grid: Grid) -> Linear:
        return linear.replace(weight=round_weight(linear.weight, grid, scale_gradient))

    return layer.replace(
        **{name: rounded(getattr(layer, name), grid) for name, grid in grids.weights}
    )


def rotate_and_round(
    layer: Layers,
    rotations: Rotations,
    scales: Scales | None,
    grids: LayerScheme,
    config: ModelConfig,
    scheme: Scheme,
) -> Layers:
    """One layer's weights, rotated and scaled, then on their grids; all that learning trains by."""
    turned = rotate_layer(layer, rotations, config, scales)
    return rtn_layer(turned, grids, scale_gradient=scheme.scale_gradient)


def weight_scale_and_zero(
    weight: Float[Array, "in out"], grid: Grid
) -> tuple[Float[Array, "in out"], Float[Array, "in out"] | None]:
    """Scale and zero point of each weight, by which `round_weight` rounds; see `Grid`."""
    clip = best_clip(weight, grid) if grid.clip == "mse" else grid.clip
    return elementwise_scale_and_zero(weight, grid, axis=-2, clip=clip)


def round_weight(
    weight: Float[Array, "in out"], grid: Grid, scale_gradient: bool = True
) -> Float[Array, "in out"]:
    """One weight matrix on its grid, with the grid's clip ratio or the one searched for."""
    clip = best_clip(weight, grid) if grid.on and grid.clip == "mse" else None
    return fake_quantise(weight, grid, axis=-2, clip=clip, scale_gradient=scale_gradient)


def best_clip(
    weight: Float[Array, "in out"],
    grid: Grid,
    *,
    lowest: float = 0.4,
    step: float = 0.02,
    hessian: Float[Array, "in in"] | None = None,
) -> Float[Array, "..."]:
    """The clip ratio of least squared rounding error for each scale of the grid.

    Searches 1, 1 - step, ... down to lowest. Returns an array that broadcasts against the scales:
    [1, out] per channel, [groups, 1, out] per group, [1, 1] per tensor. Constant for the
    derivative.

    hessian: H = X^T X of the inputs, for the error e^T H e of the weights e that share a scale,
    by their own inputs, instead of e^T e.
    """
    wide = jnp.promote_types(weight.dtype, jnp.float32)  # errors are summed in at least float32
    weight = jax.lax.stop_gradient(weight).astype(wide)
    plain = replace(grid, clip=1.0)
    inputs, outputs = weight.shape
    size = grid.group or inputs
    axes = (1, 2) if grid.granularity == "tensor" else (1,)
    own = None if hessian is None else _diagonal_blocks(hessian, size)
    product = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)

    def error(clip):
        change = fake_quantise(weight, plain, axis=-2, clip=clip) - weight
        change = change.reshape(-1, size, outputs)
        felt = change if own is None else product(own, change)
        return (change * felt).sum(axes, keepdims=True)

    def better(best, clip):
        least, chosen = best
        now = error(clip)
        return (jnp.minimum(now, least), jnp.where(now < least, clip, chosen)), None

    whole = error(1.0)
    candidates = jnp.arange(1 - step, lowest - step / 2, -step, dtype=weight.dtype)
    (_, chosen), _ = jax.lax.scan(better, (whole, jnp.ones_like(whole)), candidates)
    return chosen if grid.granularity == "group" else chosen[0]


def _diagonal_blocks(x: Float[Array, "n n"], size: int) -> Float[Array, "blocks size size"]:
    split = x.reshape(-1, size, len(x) // size, size)
    here = jnp.arange(len(split))
    return split[here, :, here]


def mean_best_clip(params: Params, scheme: Scheme) -> Float[Array, ""]:
    """The mean over all scales of the clip ratios that `best_clip` finds."""
    grids = layer_scheme(scheme, 0)
    return _mean_best_clip(params.layers, grids)


@partial(jax.jit, static_argnums=1)
def _mean_best_clip(layers: Layers, grids: LayerScheme) -> Float[Array, ""]:
    def mean(layer: Layers):
        clips = [best_clip(getattr(layer, n).weight, g).ravel() for n, g in grids.weights if g.on]
        return jnp.concatenate(clips).mean()

    return jax.lax.map(mean, layers).mean()
