"""From network to network, without changing the function: fold the norms, fuse a transform.

The order matters: an embedding that doubles as the output projection must be untied before the
last norm is folded into the projection, and the norms must be free of scales before the residual
stream is rotated, since only then RMSNorm(x R) = RMSNorm(x) R.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace as replace_config
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from qrot.errors import InputError
from qrot.model.config import ModelConfig
from qrot.model.forward import forward as logits
from qrot.model.params import Layers, Linear, Network, Params
from qrot.rotation.basis import flat_scales, pairs, per_head, scale, site_basis
from qrot.rotation.check import check_fit
from qrot.rotation.forms import Rotation, reorthonormalised, rotate
from qrot.rotation.transform import Online, Transform, map_rotations, split_layers, with_shared
from qrot.sites import ONLINE, PROJECTIONS, SITES

__all__ = ["Network", "fold", "fuse", "fuse_layer", "logits"]


def fold(network: Network) -> Network:
    """Untie, and move the scale of every norm into the linear layers that read it.

    The norms keep scales of one. The norms of q and k (Qwen3) stay: they act within a head, after
    the projection. Raises ValueError where weights are on their grid.
    """
    _check_not_rounded(network)
    params = fold_ends(network.params)
    return network.replace(
        params=params.replace(layers=fold_layers(params.layers)),
        config=replace_config(network.config, tie_word_embeddings=False),
    )


def _check_not_rounded(network: Network) -> None:
    """Raise ValueError where weights carry the scales of a grid, which they would leave."""
    if any(network.params.layers.linear(name).scale is not None for name in PROJECTIONS):
        raise ValueError("these weights are on their grid: fold and fuse before they are rounded")


def untie(params: Params) -> Params:
    """Give a model with tied embeddings an output projection of its own; others are unchanged."""
    return params if params.head is not None else params.replace(head=jnp.asarray(params.embed).T)


def fold_ends(params: Params) -> Params:
    """Untie, and move the scale of the last norm into the head; layers are left alone."""
    params = untie(params)
    return params.replace(
        head=_times(params.head, params.norm[:, None]), norm=jnp.ones_like(params.norm)
    )


def fold_layers(layers: Layers) -> Layers:
    """Move the scales of the norms of some layers into the weights that read them."""

    def fold(linear: Linear, scale) -> Linear:
        return linear.replace(weight=_times(linear.weight, scale[:, :, None]))

    return layers.replace(
        **{name: fold(layers.linear(name), layers.attention_norm) for name in SITES["qkv"].readers},
        **{name: fold(layers.linear(name), layers.mlp_norm) for name in SITES["gate_up"].readers},
        attention_norm=jnp.ones_like(layers.attention_norm),
        mlp_norm=jnp.ones_like(layers.mlp_norm),
    )


@jax.jit
def _times(weight, scale):
    wide = jnp.promote_types(weight.dtype, jnp.float32)  # so that bfloat16 is rounded once
    return (weight.astype(wide) * scale.astype(wide)).astype(weight.dtype)


def fuse(network: Network, transform: Transform) -> Network:
    """Multiply rotations and scales into the weights, in float64, and cast once to their dtype.

    Args:
        network: folded (`fold`), with nothing online.
        transform: what is put on it.

    Returns:
        The network with the fused parameters, and online what is left to do: the rotations of keys
        and of down, whose inverse is in the weights now, clip ratios, and shifts in the rotated
        basis. Its function in full precision is unchanged.

    Raises:
        ValueError: where the norms are not folded, something is online already, or weights are on
            their grid.
        InputError: where a part of the transform has another shape than this network needs.
    """
    check_fit(vars(transform), network.config)
    _check_not_rounded(network)
    params = network.params
    norms = (params.layers.attention_norm, params.layers.mlp_norm, params.norm)
    if params.head is None or not all((norm == 1).all() for norm in norms):
        raise ValueError("the norms of these parameters are not folded: call fold first")
    if jax.tree.leaves(network.online):
        raise ValueError("something is on this network already")
    params = params.replace(
        embed=fuse_table(params.embed, transform),
        layers=fuse_layers(params.layers, transform, network.config),
        head=fuse_table(params.head.T, transform).T,
    )
    return network.replace(params=params, online=left_online(transform, network.config))


def fuse_table(table: Float[Array, "vocab hidden"], transform: Transform) -> Any:
    """`fuse` for the embedding alone, or for the head transposed."""
    with jax.enable_x64(True):
        return _fuse_rows(table, _refined(transform).rotations.get("residual"))


def fuse_layers(layers: Layers, transform: Transform, config: ModelConfig) -> Layers:
    """`fuse` for some layers alone; the transform is of these layers, on a leading axis."""
    with jax.enable_x64(True):
        return _fuse_layers(layers, _refined(transform), config)


def left_online(transform: Transform, config: ModelConfig) -> Online:
    """What acts at run time once the rest is in the weights; shifts are moved in float64."""
    rotations = {name: r for name, r in transform.rotations.items() if name in ONLINE}
    with jax.enable_x64(True):
        moved = _moved_shifts(_refined(transform), config)
        shifts = jax.tree.map(jnp.float32, moved)
    return Online(rotations, shifts, transform.clips)


def layer_online(transform: Transform, config: ModelConfig) -> Online:
    """`left_online` of one layer, in the transform's own dtype; differentiable."""
    rotations = {name: r for name, r in transform.rotations.items() if name in ONLINE}
    return Online(rotations, _shifts_in_basis(transform, config), transform.clips)


def _shifts_in_basis(transform: Transform, config: ModelConfig) -> dict[str, Array]:
    return {
        name: site_basis(SITES[name], transform, config.head_dim).forward(mu)
        for name, mu in transform.shifts.items()
    }


@partial(jax.jit, static_argnums=1)
def _moved_shifts(transform: Transform, config: ModelConfig) -> dict[str, Array]:
    own, shared = split_layers(transform)
    if not own.shifts:
        return {}
    return jax.vmap(lambda own: _shifts_in_basis(with_shared(own, shared), config))(own)


def _refined(transform: Transform) -> Transform:
    """In float64, and orthogonal to within it."""
    wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), transform)
    return wide.replace(rotations=map_rotations(reorthonormalised, wide.rotations))


@partial(jax.jit, static_argnums=2)
def _fuse_layers(layers: Layers, transform: Transform, config: ModelConfig) -> Layers:
    own, shared = split_layers(transform)

    def fuse_one(inputs):
        layer, own = inputs
        wide = jax.tree.map(lambda x: x.astype(jnp.float64), layer)
        wide = fuse_layer(wide, with_shared(own, shared), config)
        return jax.tree.map(lambda new, old: new.astype(old.dtype), wide, layer)

    return jax.lax.map(fuse_one, (layers, own))  # one layer in float64 at a time


@jax.jit
def _fuse_rows(x: Float[Array, "rows n"], rotation: Rotation | None) -> Float[Array, "rows n"]:
    def fuse_one(row):
        return rotate(row.astype(jnp.float64), rotation).astype(x.dtype)

    return jax.lax.map(fuse_one, x, batch_size=4096)


def fuse_layer(layer: Layers, transform: Transform, config: ModelConfig) -> Layers:
    """Fuse a transform into the weights of one layer (no `layers` axis), in their own dtype.

    With row vectors a reading weight becomes R^T W, a writing weight W R, a writing bias b R; then
    what is read is divided by e^scales and what is written multiplied, a norm being what writes for
    the layers after it. Differentiable; `fuse` calls it in float64.

    Args:
        layer: folded.
        transform: of this layer.
        config: sizes of the network.
    """
    scales, rotations, linear = transform.scales, transform.rotations, layer.linear
    if (down := scales.get("down")) is not None:
        layer = layer.replace(up=_write(linear("up"), down), down=_read(linear("down"), down))
        linear = layer.linear
    residual, value = rotations.get("residual"), rotations.get("value")

    def read(name: str, rotation: Rotation | None, function: Callable = rotate) -> Linear:
        # R^T W = (W^T R)^T: the columns of W are rotated as row vectors.
        weight = function(linear(name).weight.T, rotation).T
        return linear(name).replace(weight=weight)

    def write(own: Linear, rotation: Rotation | None, function: Callable = rotate) -> Linear:
        return _outputs(own, lambda x: function(x, rotation))

    def heads(x: Array, rotation: Rotation | None) -> Array:
        return per_head(rotate, x, rotation, config.head_dim)

    layer = layer.replace(
        **{name: read(name, residual) for name in ("q", "k", "gate", "up")},
        v=write(read("v", residual), value, heads),
        o=write(read("o", value, heads), residual),
        down=write(read("down", rotations.get("down")), residual),
    )
    return _scale_layer(layer, scales, config)


def _scale_layer(layer: Layers, scales: dict[str, Array], config: ModelConfig) -> Layers:
    """All of the scales of one layer but those of down, which go in before the rotation."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if (keys := scales.get("keys")) is not None:
        log = pairs(keys)
        if layer.q_norm is not None and layer.k_norm is not None:
            if len(keys) > 1:
                raise InputError("scales.keys: kv heads that share a norm have one scale for all")
            q_norm, k_norm = scale(layer.q_norm, -log[0]), scale(layer.k_norm, log[0])
            layer = layer.replace(q_norm=q_norm, k_norm=k_norm)
        else:
            q, k = flat_scales(log, heads), flat_scales(log, kv_heads)
            layer = layer.replace(q=_write(layer.linear("q"), -q), k=_write(layer.linear("k"), k))
    if (values := scales.get("values")) is not None:
        v = _write(layer.linear("v"), values.ravel())
        o = _read(layer.linear("o"), flat_scales(values, heads))
        layer = layer.replace(v=v, o=o)
    for norm, site in (("attention_norm", "qkv"), ("mlp_norm", "gate_up")):
        if (log := scales.get(site)) is not None:
            readers = {name: _read(layer.linear(name), log) for name in SITES[site].readers}
            layer = layer.replace(**{norm: scale(getattr(layer, norm), log)}, **readers)
    return layer


def _read(linear: Linear, log: Float[Array, " in"]) -> Linear:
    """A layer whose input comes e^log times as large."""
    return linear.replace(weight=scale(linear.weight, -log[:, None]))


def _write(linear: Linear, log: Float[Array, " out"]) -> Linear:
    """A layer whose output is to be e^log times as large."""
    return _outputs(linear, lambda x: scale(x, log))


def _outputs(linear: Linear, change: Callable[[Array], Array]) -> Linear:
    """Change what a layer writes: rows of its weight, and its bias."""
    bias = None if linear.bias is None else change(linear.bias)
    return linear.replace(weight=change(linear.weight), bias=bias)
