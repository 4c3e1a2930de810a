"""The forward pass: a pure function of parameters, tokens and rotations.

Layers are scanned. Every place where a quantiser may sit is a *site*: the input of q, k, v; of o;
of gate, up; of down; and the keys and values of the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from qrot.grid import fake_quantise, quantise
from qrot.kernels.attention import attention
from qrot.kernels.rotate_quantize import rotate_quantize
from qrot.model.config import ModelConfig, RopeScaling
from qrot.model.packed import in_integers, linear
from qrot.model.params import Layers, PackedLinear, Params
from qrot.rotation.rotations import (
    Clips,
    Hadamard,
    Rotations,
    Scales,
    Shifts,
    by_layer,
    rotate,
    unrotate,
)
from qrot.rotation.sites import layer_sites
from qrot.scheme import READERS, LayerScheme, Scheme, layer_scheme, segments


@struct.dataclass
class PerLayer:
    """What a layer reads besides its weights; the same with a leading axis for all layers."""

    turns: Any = struct.field(default_factory=dict)  # rotations of its own, by site
    shifts: Shifts = struct.field(default_factory=Shifts)
    clips: Clips = struct.field(default_factory=Clips)
    scales: Scales = struct.field(default_factory=Scales)
    window: Any = None
    nudges: Any = None  # by site [taps, ...]: added at the tapped positions, to differentiate by


def forward(
    params: Params,
    tokens: Int[Array, "batch length"],
    config: ModelConfig,
    *,
    rotations: Rotations | None = None,
    scheme: Scheme | None = None,
    shifts: Shifts | None = None,
    clips: Clips | None = None,
    scales: Scales | None = None,
    prepare: Callable[[Layers, Rotations, Scales, LayerScheme], Layers] | None = None,
    remat: bool = False,
    dtype: Any = None,
) -> Float[Array, "batch length vocab"]:
    """Logits of a decoder, with activations, keys and values quantised by `scheme`.

    Weights are used as they are; `scheme.weights` is for those who quantise them before
    (`qrot.quantize`) or in `prepare`.

    rotations: either fused into params, then only key and down act here, online; or not, then each
      site computes Q(x R) R^T, which is what the fused network computes as long as its weights are
      not quantised, without touching a weight.
    scales: of rotations that are not fused; once fused they are in the weights.
    prepare: applied to each layer's weights before use, with that layer's rotations and scales.
    remat: recompute each layer in the backward pass instead of storing its intermediates.
    dtype: of the computation; the parameters' own if None.
    """
    return forward_with_taps(
        params,
        tokens,
        config,
        taps=None,
        rotations=rotations,
        scheme=scheme,
        shifts=shifts,
        clips=clips,
        scales=scales,
        prepare=prepare,
        remat=remat,
        dtype=dtype,
    )[0]


def forward_with_taps(
    params: Params,
    tokens: Int[Array, "batch length"],
    config: ModelConfig,
    *,
    taps: Int[Array, " taps"] | None,
    rotations: Rotations | None = None,
    scheme: Scheme | None = None,
    shifts: Shifts | None = None,
    clips: Clips | None = None,
    scales: Scales | None = None,
    prepare: Callable[[Layers, Rotations, Scales, LayerScheme], Layers] | None = None,
    remat: bool = False,
    dtype: Any = None,
) -> tuple[Float[Array, "batch length vocab"], dict[str, Float[Array, "layers taps ..."]]]:
    """`forward`, and the input of each site at some positions of the flattened batch.

    {"qkv", "o", "gate_up", "down"}: [layers, taps, n], and {"keys", "values"}: [layers, taps,
    kv_heads, head_dim]; before rotation and quantisation where the rotations are not fused.
    """
    rotations = rotations or Rotations()
    scheme = scheme or Scheme()
    dtype = dtype or params.embed.dtype
    rope, windows = tables(config, tokens.shape[1], dtype)
    own = PerLayer(
        by_layer(rotations), shifts or Shifts(), clips or Clips(), scales or Scales(), windows
    )

    hidden = jnp.take(params.embed, tokens, axis=0).astype(dtype)
    if rotations.fused:
        hidden = rotate(hidden, rotations.residual)
    tapped = []
    for start, stop, grids in segments(scheme, config.num_hidden_layers):

        def step(h, inputs, grids=grids):
            layer, own = inputs
            turns = rotations.replace(**own.turns)
            if prepare is not None:
                layer = prepare(layer, turns, own.scales, grids)
            return decoder_layer(h, layer, own, turns, grids, scheme, config, rope, taps)

        if remat:
            step = jax.checkpoint(step, prevent_cse=False)
        inputs = (params.layers, own)
        if (start, stop) != (0, config.num_hidden_layers):
            inputs = jax.tree.map(lambda x, a=start, b=stop: x[a:b], inputs)
        hidden, seen = jax.lax.scan(step, hidden, inputs)
        tapped.append(seen)
    logits = project(hidden, params, config, rotations)
    return logits, jax.tree.map(lambda *runs: jnp.concatenate(runs), *tapped)


def tables(config: ModelConfig, length: int, dtype) -> tuple[tuple[Array, Array], Any]:
    """(cos and sin of the positions, sliding window of each layer or None)."""
    rope = rope_table(config, length, jnp.promote_types(dtype, jnp.float32))
    return rope, None if config.sliding_window is None else jnp.asarray(config.sliding_window)


def project(
    hidden: Float[Array, "batch length hidden"],
    params: Params,
    config: ModelConfig,
    rotations: Rotations | None = None,
) -> Float[Array, "batch length vocab"]:
    """Logits of the last layer's output."""
    hidden = rms_norm(hidden, params.norm, config.rms_norm_eps)
    if rotations is not None and rotations.fused:
        hidden = unrotate(hidden, rotations.residual)
    head = params.embed.T if params.head is None else params.head
    return hidden @ head.astype(hidden.dtype)


def decoder_layer(
    h: Float[Array, "batch length hidden"],
    layer: Layers,
    own: PerLayer,
    rotations: Rotations,
    grids: LayerScheme,
    scheme: Scheme,
    config: ModelConfig,
    rope: tuple[Array, Array],
    taps: Int[Array, " taps"] | None = None,
    observe: Callable[[str, Any], None] = lambda site, x: None,
    attend: Callable[[Array, Any, Any, Any], Array] | None = None,
    kept: tuple[str, ...] = (),
) -> tuple[Float[Array, "batch length hidden"], dict[str, Any]]:
    """One layer (no `layers` axis anywhere): hidden states in and out, and its tapped sites.

    observe: told, for each of qkv, o, gate_up and down, what its weights read.
    attend: instead of `attention`, given the same: queries, keys and values as they enter a cache,
      and the window. kept: which of keys and values it is given as integers.
    Inputs of packed weights are rounded to integers where their grid allows.
    """
    eps, seen = config.rms_norm_eps, {}
    # What is fused is not turned again; what is turned here is turned back after rounding.
    sites = layer_sites(rotations, own.scales, config.head_dim)
    integers = {*kept, *_integer_sites(layer, grids)}
    if integers and not rotations.fused:
        raise ValueError("what is turned back after rounding is no integer: fuse first")

    def heads(x):
        return x.reshape(*x.shape[:-1], -1, config.head_dim)

    def tap(name: str, x, features: int = 1):
        if taps is None:
            return x
        flat = x.reshape(-1, *x.shape[x.ndim - features :])
        seen[name] = flat[taps]
        return x if own.nudges is None else flat.at[taps].add(own.nudges[name]).reshape(x.shape)

    def rounded(name: str, x) -> Any:
        """What is in the site's basis already, on its grid."""
        grid, clip = getattr(grids, name), getattr(own.clips, name)
        shift = getattr(own.shifts, name, None)
        if shift is not None:
            shift = shift.astype(x.dtype)
            if not rotations.fused:  # fused shifts are in that basis, too
                shift = sites[name].go(shift)
            x = x - shift
        if name in integers:
            return quantise(x, grid, clip=clip).replace(shift=shift)
        x = fake_quantise(x, grid, clip=clip, scale_gradient=scheme.scale_gradient)
        return x if shift is None else x + shift

    def back(name: str, x):
        return x if name in integers else sites[name].back(x)  # the weights hold integers' way back

    def round_trip(name: str, x):
        return back(name, rounded(name, sites[name].go(x))) if getattr(grids, name).on else x

    x = round_trip("qkv", tap("qkv", rms_norm(h, layer.attention_norm, eps)))
    observe("qkv", x)
    q, k, v = (heads(linear(x, weight, h.dtype)) for weight in (layer.q, layer.k, layer.v))
    if layer.q_norm is not None:
        q, k = rms_norm(q, layer.q_norm, eps), rms_norm(k, layer.k_norm, eps)
    q, k = apply_rope(q, rope), apply_rope(k, rope)
    k, v = tap("keys", k, 2), tap("values", v, 2)
    if grids.keys.on:
        q, k = sites["keys"].dual(q), rounded("keys", sites["keys"].go(k))
    v = rounded("values", sites["values"].go(v))
    x = (attend or attention)(q, k, v, own.window)  # in the basis of the values
    if taps is not None:
        x = sites["o"].go(tap("o", sites["o"].back(x)))
    x = back("o", rounded("o", x))
    observe("o", x)
    h = h + linear(x, layer.o, h.dtype)

    x = round_trip("gate_up", tap("gate_up", rms_norm(h, layer.mlp_norm, eps)))
    observe("gate_up", x)
    x = tap("down", jax.nn.silu(linear(x, layer.gate, h.dtype)) * linear(x, layer.up, h.dtype))
    turn = rotations.down
    if "down" in integers and isinstance(turn, Hadamard):  # in one pass
        x = rotate_quantize(
            x,
            grids.down,
            block=turn.block,
            signs=turn.signs,
            shift=own.shifts.down,
            clip=own.clips.down,
        )
    elif rotations.fused:  # the weights hold the way back
        x = rounded("down", sites["down"].go(x))
    else:
        x = round_trip("down", x)
    observe("down", x)
    return h + linear(x, layer.down, h.dtype), seen


def _integer_sites(layer: Layers, grids: LayerScheme) -> list[str]:
    """The sites that packed weights read and whose grid makes integers."""
    return [
        site
        for site, readers in READERS.items()
        if in_integers(getattr(grids, site))
        and any(isinstance(getattr(layer, name), PackedLinear) for name in readers)
    ]


def plain_layer(
    h: Float[Array, "batch length hidden"],
    layer: Layers,
    own: PerLayer,
    rotations: Rotations,
    config: ModelConfig,
    **options: Any,
) -> tuple[Float[Array, "batch length hidden"], dict[str, Any]]:
    """`decoder_layer` with nothing rounded. rotations: the turns of `own` take their places."""
    plain = Scheme()
    rope, _ = tables(config, h.shape[1], h.dtype)
    turned, grids = rotations.replace(**own.turns), layer_scheme(plain, 0)
    return decoder_layer(h, layer, own, turned, grids, plain, config, rope, **options)


def rms_norm(
    x: Float[Array, "*batch n"], scale: Float[Array, " n"], eps: float
) -> Float[Array, "*batch n"]:
    """x / sqrt(mean(x^2) + eps) * scale, at least in float32 (Zhang and Sennrich, 2019)."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * scale.astype(x.dtype)


def rope_table(config: ModelConfig, length: int, dtype) -> tuple[Array, Array]:
    """cos and sin of the rotary embedding, each [length, head_dim / 2] (Su et al., 2021)."""
    exponent = np.arange(0, config.head_dim, 2) / config.head_dim
    frequency = _scaled(config.rope_theta**-exponent, config.rope_scaling)
    angle = jnp.arange(length, dtype=dtype)[:, None] * jnp.asarray(frequency, dtype)
    return jnp.cos(angle), jnp.sin(angle)


def _scaled(frequency: np.ndarray, scaling: RopeScaling | None) -> np.ndarray:
    if scaling is None:
        return frequency
    if scaling.kind == "linear":
        return frequency / scaling.factor
    # llama3: `turns` of the original context tell slow frequencies from fast ones.
    turns = scaling.original_max_position_embeddings * frequency / (2 * np.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = np.clip((turns - scaling.low_freq_factor) / span, 0, 1)
    return frequency * (keep + (1 - keep) / scaling.factor)


def apply_rope(
    x: Float[Array, "batch length heads head_dim"], rope: tuple[Array, Array]
) -> Float[Array, "batch length heads head_dim"]:
    """Turn the pairs (x_i, x_{i + head_dim / 2}) by their position's angles."""
    cos, sin = (table[:, None, :].astype(x.dtype) for table in rope)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
