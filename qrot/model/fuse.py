"""What a rotation does to a model's weights: untie, fold the norms, fuse.

The order matters: an embedding that doubles as the output projection must be untied before the
last norm is folded into the projection, and the norms must be free of scales before the residual
stream is rotated, since only then RMSNorm(x R) = RMSNorm(x) R.
"""

from __future__ import annotations

from dataclasses import replace as replace_config
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from qrot.model.config import ModelConfig
from qrot.model.params import Layers, Linear, Model, Params
from qrot.rotation.rotations import (
    Hadamard,
    Kronecker,
    Rotations,
    Scales,
    Shifts,
    by_layer,
    is_signed,
    over_heads,
    per_head,
    rotate,
)
from qrot.rotation.sites import layer_sites, pairs, scale, unscale


def untie(params: Params) -> Params:
    """Give a model with tied embeddings an output projection of its own; others are unchanged."""
    return params if params.head is not None else params.replace(head=jnp.asarray(params.embed).T)


def fold_norms(model: Model) -> Model:
    """Untie, and move the scale of every norm into the linear layers that read it.

    The norms keep scales of one. The norms of q and k (Qwen3) stay: they act within a head, after
    the projection.
    """
    params = fold_ends(model.params)
    return model.replace(
        params=params.replace(layers=fold_layers(params.layers)),
        config=replace_config(model.config, tie_word_embeddings=False),
    )


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
        q=fold(layers.q, layers.attention_norm),
        k=fold(layers.k, layers.attention_norm),
        v=fold(layers.v, layers.attention_norm),
        gate=fold(layers.gate, layers.mlp_norm),
        up=fold(layers.up, layers.mlp_norm),
        attention_norm=jnp.ones_like(layers.attention_norm),
        mlp_norm=jnp.ones_like(layers.mlp_norm),
    )


@jax.jit
def _times(weight, scale):
    wide = jnp.promote_types(weight.dtype, jnp.float32)  # so that bfloat16 is rounded once
    return (weight.astype(wide) * scale.astype(wide)).astype(weight.dtype)


def rotate_layer(
    layer: Layers, rotations: Rotations, config: ModelConfig, scales: Scales | None = None
) -> Layers:
    """Fuse rotations into the weights of one layer (no `layers` axis), in the weights' own dtype.

    rotations: with those that this layer has of its own; scales: of this layer. With row vectors a
    reading weight becomes R^T W, a writing weight W R, a writing bias b R; then what is read is
    divided by e^scales and what is written multiplied, a norm being what writes for the layers
    after it. Differentiable; `fuse` calls it in float64.
    """
    scales = scales or Scales()
    if scales.down is not None:
        layer = layer.replace(up=_write(layer.up, scales.down), down=_read(layer.down, scales.down))
    residual, value = rotations.residual, rotations.value

    def read(linear: Linear, rotation, split=rotate) -> Linear:
        # R^T W = (W^T R)^T: the columns of W are turned as row vectors.
        return linear.replace(weight=split(linear.weight.T, rotation).T)

    def write(linear: Linear, rotation, split=rotate) -> Linear:
        return jax.tree.map(lambda x: split(x, rotation), linear)

    def heads(x: Float[Array, "*batch n"], rotation) -> Float[Array, "*batch n"]:
        return per_head(rotate, x, rotation, config.head_dim)

    layer = layer.replace(
        q=read(layer.q, residual),
        k=read(layer.k, residual),
        v=write(read(layer.v, residual), value, heads),
        o=write(read(layer.o, value, heads), residual),
        gate=read(layer.gate, residual),
        up=read(layer.up, residual),
        down=write(read(layer.down, rotations.down), residual),
    )
    return _scale_layer(layer, scales, config)


def _scale_layer(layer: Layers, scales: Scales, config: ModelConfig) -> Layers:
    """All of the scales of one layer but those of down, which go in before the rotation."""
    qkv, gate_up, keys, values = scales.qkv, scales.gate_up, scales.keys, scales.values
    q, k, v, o = layer.q, layer.k, layer.v, layer.o
    if keys is not None and layer.q_norm is not None:
        layer = layer.replace(
            q_norm=unscale(layer.q_norm, pairs(keys, 1)[0]),
            k_norm=scale(layer.k_norm, pairs(keys, 1)[0]),
        )
    elif keys is not None:
        q = _write(q, -pairs(keys, config.num_attention_heads).ravel())
        k = _write(k, pairs(keys, config.num_key_value_heads).ravel())
    if values is not None:
        v = _write(v, values.ravel())
        o = _read(o, over_heads(values, config.num_attention_heads).ravel())
    return layer.replace(
        attention_norm=scale(layer.attention_norm, qkv),
        mlp_norm=scale(layer.mlp_norm, gate_up),
        q=_read(q, qkv),
        k=_read(k, qkv),
        v=_read(v, qkv),
        o=o,
        gate=_read(layer.gate, gate_up),
        up=_read(layer.up, gate_up),
    )


def _read(linear: Linear, log) -> Linear:
    """A layer whose input comes e^log times as large."""
    if log is None:
        return linear
    return linear.replace(weight=unscale(linear.weight, log[:, None]))


def _write(linear: Linear, log) -> Linear:
    """A layer whose output is to be e^log times as large."""
    return jax.tree.map(lambda x: scale(x, log), linear)


def fuse(
    params: Params,
    rotations: Rotations,
    config: ModelConfig,
    shifts: Shifts | None = None,
    scales: Scales | None = None,
) -> tuple[Params, Rotations, Shifts | None]:
    """Multiply rotations and scales into the weights, in float64, and cast once to their dtype.

    params: folded (`fold_norms`). Returns the fused parameters, what is left to do online (key, and
    down whose inverse is in the weights now), and the shifts in the rotated basis. The function of
    the network is unchanged. Raises ValueError where the norms are not folded.
    """
    norms = (params.layers.attention_norm, params.layers.mlp_norm, params.norm)
    if params.head is None or not all((norm == 1).all() for norm in norms):
        raise ValueError("the norms of these parameters are not folded: call fold_norms first")
    params = params.replace(
        embed=fuse_table(params.embed, rotations),
        layers=fuse_layers(params.layers, rotations, config, scales),
        head=fuse_table(params.head.T, rotations).T,
    )
    return params, left_online(rotations), fuse_shifts(shifts, rotations, config, scales)


def left_online(rotations: Rotations) -> Rotations:
    """What acts at run time once the rest is in the weights."""
    return Rotations(key=rotations.key, down=rotations.down, fused=True)


def fuse_table(table: Float[Array, "vocab hidden"], rotations: Rotations) -> Any:
    """`fuse` for the embedding alone, or for the head transposed."""
    with jax.enable_x64(True):
        return _fuse_rows(table, _refined(rotations).residual)


def fuse_layers(
    layers: Layers, rotations: Rotations, config: ModelConfig, scales: Scales | None = None
) -> Layers:
    """`fuse` for some layers alone; rotations and scales are of these layers, on a leading axis."""
    with jax.enable_x64(True):
        scales = jax.tree.map(_wide, scales or Scales())
        return _fuse_layers(layers, _refined(rotations), scales, config)


def fuse_shifts(
    shifts: Shifts | None, rotations: Rotations, config: ModelConfig, scales: Scales | None = None
) -> Shifts | None:
    """`rotate_shifts` in float64, for fused weights; None for None."""
    if shifts is None:
        return None
    with jax.enable_x64(True):
        wide, scales = jax.tree.map(_wide, (shifts, scales))
        turned = rotate_shifts(wide, _refined(rotations), config, scales)
        return jax.tree.map(jnp.float32, turned)


def _refined(rotations: Rotations) -> Rotations:
    """In float64, and orthogonal to within it."""
    if rotations.fused:
        raise ValueError("these rotations are fused already")
    return jax.tree.map(_orthogonal, jax.tree.map(_wide, rotations), is_leaf=is_signed)


def _wide(x):
    return jnp.asarray(x, jnp.float64)


@jax.jit
def _orthogonal(rotation):
    """Bring matrices that are orthogonal to within float32 there within float64.

    One Newton-Schulz step, R (3 I - R^T R) / 2, squares the error. Signs stay as they are.
    """
    if isinstance(rotation, Hadamard):
        return rotation
    if isinstance(rotation, Kronecker):
        left, right = _orthogonal(rotation.left), _orthogonal(rotation.right)
        return rotation.replace(left=left, right=right)
    return 1.5 * rotation - 0.5 * rotation @ (rotation.mT @ rotation)


@partial(jax.jit, static_argnums=3)
def _fuse_layers(
    layers: Layers, rotations: Rotations, scales: Scales, config: ModelConfig
) -> Layers:
    def fuse_one(inputs):
        layer, turns, scales = inputs
        wide = jax.tree.map(lambda x: x.astype(jnp.float64), layer)
        wide = rotate_layer(wide, rotations.replace(**turns), config, scales)
        return jax.tree.map(lambda new, old: new.astype(old.dtype), wide, layer)

    # one layer in float64 at a time
    return jax.lax.map(fuse_one, (layers, by_layer(rotations), scales))


@jax.jit
def _fuse_rows(x: Float[Array, "rows n"], rotation) -> Float[Array, "rows n"]:
    def fuse_one(row):
        return rotate(row.astype(jnp.float64), rotation).astype(x.dtype)

    return jax.lax.map(fuse_one, x, batch_size=4096)


def rotate_shifts(
    shifts: Shifts, rotations: Rotations, config: ModelConfig, scales: Scales | None = None
) -> Shifts:
    """The same shifts in the basis of the rotated activations, as fused weights read them."""

    def one_layer(inputs):
        shifts, scales, own = inputs
        sites = layer_sites(rotations.replace(**own), scales, config.head_dim)
        turned = {n: None if mu is None else sites[n].go(mu) for n, mu in vars(shifts).items()}
        return Shifts(**turned)

    return jax.vmap(one_layer)((shifts, scales or Scales(), by_layer(rotations)))
