"""What a rotation does to a model's weights: untie, fold the norms, fuse.

The order matters: an embedding that doubles as the output projection must be untied before the
last norm is folded into the projection, and the norms must be free of scales before the residual
stream is rotated, since only then RMSNorm(x R) = RMSNorm(x) R.
"""

from __future__ import annotations

from dataclasses import replace as replace_config
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from qrot.model.config import ModelConfig
from qrot.model.params import Layers, Linear, Model, Params
from qrot.rotation.rotations import Rotations, Shifts, per_head, rotate


def untie(params: Params) -> Params:
    """Give a model with tied embeddings an output projection of its own; others are unchanged."""
    return params if params.head is not None else params.replace(head=jnp.asarray(params.embed).T)


def fold_norms(model: Model) -> Model:
    """Untie, and move the scale of every norm into the linear layers that read it.

    The norms keep scales of one. The norms of q and k (Qwen3) stay: they act within a head, after
    the projection.
    """
    params = untie(model.params)
    layers = params.layers

    def fold(linear: Linear, scale) -> Linear:
        return linear.replace(weight=_times(linear.weight, scale[:, :, None]))

    layers = layers.replace(
        q=fold(layers.q, layers.attention_norm),
        k=fold(layers.k, layers.attention_norm),
        v=fold(layers.v, layers.attention_norm),
        gate=fold(layers.gate, layers.mlp_norm),
        up=fold(layers.up, layers.mlp_norm),
        attention_norm=jnp.ones_like(layers.attention_norm),
        mlp_norm=jnp.ones_like(layers.mlp_norm),
    )
    params = params.replace(
        layers=layers,
        head=_times(params.head, params.norm[:, None]),
        norm=jnp.ones_like(params.norm),
    )
    return model.replace(
        params=params, config=replace_config(model.config, tie_word_embeddings=False)
    )


@jax.jit
def _times(weight, scale):
    wide = jnp.promote_types(weight.dtype, jnp.float32)  # so that bfloat16 is rounded once
    return (weight.astype(wide) * scale.astype(wide)).astype(weight.dtype)


def rotate_layer(layer: Layers, rotations: Rotations, config: ModelConfig) -> Layers:
    """Fuse rotations into the weights of one layer (no `layers` axis), in the weights' own dtype.

    rotations: with the value rotation of this layer. With row vectors a reading weight becomes
    R^T W, a writing weight W R, a writing bias b R. Differentiable; `fuse` calls it in float64.
    """
    residual, value = rotations.residual, rotations.value

    def read(linear: Linear, rotation, split=rotate) -> Linear:
        # R^T W = (W^T R)^T: the columns of W are turned as row vectors.
        return linear.replace(weight=split(linear.weight.T, rotation).T)

    def write(linear: Linear, rotation, split=rotate) -> Linear:
        return jax.tree.map(lambda x: split(x, rotation), linear)

    def heads(x: Float[Array, "*batch n"], rotation) -> Float[Array, "*batch n"]:
        return per_head(rotate, x, rotation, config.head_dim)

    return layer.replace(
        q=read(layer.q, residual),
        k=read(layer.k, residual),
        v=write(read(layer.v, residual), value, heads),
        o=write(read(layer.o, value, heads), residual),
        gate=read(layer.gate, residual),
        up=read(layer.up, residual),
        down=write(read(layer.down, rotations.down), residual),
    )


def fuse(
    params: Params,
    rotations: Rotations,
    config: ModelConfig,
    shifts: Shifts | None = None,
) -> tuple[Params, Rotations, Shifts | None]:
    """Multiply rotations into the weights, in float64, and cast once to the weights' dtype.

    params: folded (`fold_norms`). Returns the fused parameters, what is left to do online (key, and
    down whose inverse is in the weights now), and the shifts in the rotated basis. The function of
    the network is unchanged. Raises ValueError where the norms are not folded.
    """
    if rotations.fused:
        raise ValueError("these rotations are fused already")
    norms = (params.layers.attention_norm, params.layers.mlp_norm, params.norm)
    if params.head is None or not all((norm == 1).all() for norm in norms):
        raise ValueError("the norms of these parameters are not folded: call fold_norms first")
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: _orthogonal(jnp.asarray(x, jnp.float64)), rotations)
        layers = _fuse_layers(params.layers, wide, config)
        embed = _fuse_rows(params.embed, wide.residual)
        head = _fuse_rows(params.head.T, wide.residual).T
        if shifts is not None:
            turned = rotate_shifts(jax.tree.map(jnp.float64, shifts), wide, config)
            shifts = jax.tree.map(jnp.float32, turned)
    online = Rotations(key=rotations.key, down=rotations.down, fused=True)
    return params.replace(layers=layers, embed=embed, head=head), online, shifts


@jax.jit
def _orthogonal(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Bring matrices that are orthogonal to within float32 there within float64.

    One Newton-Schulz step, R (3 I - R^T R) / 2, squares the error. Signs stay as they are.
    """
    if x.ndim < 2:
        return x
    return 1.5 * x - 0.5 * x @ (x.mT @ x)


@partial(jax.jit, static_argnums=2)
def _fuse_layers(layers: Layers, rotations: Rotations, config: ModelConfig) -> Layers:
    def fuse_one(inputs):
        layer, value = inputs
        wide = jax.tree.map(lambda x: x.astype(jnp.float64), layer)
        wide = rotate_layer(wide, rotations.replace(value=value), config)
        return jax.tree.map(lambda new, old: new.astype(old.dtype), wide, layer)

    return jax.lax.map(fuse_one, (layers, rotations.value))  # one layer in float64 at a time


@jax.jit
def _fuse_rows(x: Float[Array, "rows n"], rotation) -> Float[Array, "rows n"]:
    def fuse_one(row):
        return rotate(row.astype(jnp.float64), rotation).astype(x.dtype)

    return jax.lax.map(fuse_one, x, batch_size=4096)


def rotate_shifts(shifts: Shifts, rotations: Rotations, config: ModelConfig) -> Shifts:
    """The same shifts in the basis of the rotated activations, as fused weights read them."""

    o = shifts.o
    if o is not None and rotations.value is not None:
        o = jax.vmap(lambda mu, turn: per_head(rotate, mu, turn, config.head_dim))(
            o, rotations.value
        )
    turned = {
        name: None if shift is None else rotate(shift, rotation)
        for name, shift, rotation in (
            ("qkv", shifts.qkv, rotations.residual),
            ("gate_up", shifts.gate_up, rotations.residual),
            ("down", shifts.down, rotations.down),
        )
    }
    return Shifts(o=o, **turned)
