"""Decoding: token after token, with the keys and values of those before kept in a cache.

The cache holds what attention reads: keys after RoPE and values, rotated where that is done online,
and rounded as they enter it: as integers, where the cache was made for that. A cache is a pytree, a
step is a pure function.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int, Key

from qrot.grid import Grid
from qrot.kernels.kv4 import PackedHeads, append, attend, empty_heads, fits
from qrot.model.config import ModelConfig
from qrot.model.forward import PerLayer, decoder_layer, project, tables
from qrot.model.params import Params
from qrot.rotation.rotations import Clips, Rotations, Scales, Shifts, by_layer, rotate
from qrot.scheme import Scheme, layer_schemes, segments


@struct.dataclass
class Cache:
    """Keys and values of the tokens so far; places from `position` on are empty."""

    keys: PackedHeads | Float[Array, "layers batch length kv_heads head_dim"]
    values: PackedHeads | Float[Array, "layers batch length kv_heads head_dim"]
    position: Int[Array, ""]  # tokens so far, the same for the whole batch
    dtype: Any = struct.field(pytree_node=False)  # of the computation

    @property
    def length(self) -> int:
        """Tokens that it has room for."""
        heads = self.keys.codes if isinstance(self.keys, PackedHeads) else self.keys
        return heads.shape[2]


def empty_cache(
    config: ModelConfig,
    batch: int,
    length: int,
    dtype: Any = jnp.float32,
    *,
    packed: Scheme | None = None,
) -> Cache:
    """A cache with room for `length` tokens; dtype: of the computation.

    packed: the scheme whose keys and values it is to hold as integers. Those with overrides by
    layer, with more than 8 bits or with one scale for all tokens are held as values, on their grid.
    Raises InputError where a group does not divide head_dim.
    """
    layers = config.num_hidden_layers
    shape = (layers, batch, length, config.num_key_value_heads, config.head_dim)
    wide = jnp.promote_types(dtype, jnp.float32)

    def empty(role: str):
        if packed is not None:
            grids: set[Grid] = {getattr(grids, role) for grids in layer_schemes(packed, layers)}
            if len(grids) == 1 and fits(grid := grids.pop()):
                return empty_heads(shape, grid, wide)
        return jnp.zeros(shape, dtype)

    return Cache(empty("keys"), empty("values"), jnp.zeros((), jnp.int32), jnp.dtype(dtype))


def decode_step(
    params: Params,
    tokens: Int[Array, "batch new"],
    cache: Cache,
    config: ModelConfig,
    *,
    rotations: Rotations | None = None,
    scheme: Scheme | None = None,
    shifts: Shifts | None = None,
    clips: Clips | None = None,
    scales: Scales | None = None,
) -> tuple[Float[Array, "batch new vocab"], Cache]:
    """Logits of some more tokens, one or many, and the cache with them in it.

    Arguments and result are as those of `forward`, in the cache's dtype; step by step it comes to
    the same, except where all tokens share a scale (granularity `tensor`). More tokens than the
    cache has room for overwrite its last places: make it long enough.
    """
    hidden, cache = _decode(params, tokens, cache, config, rotations, scheme, shifts, clips, scales)
    return project(hidden, params, config, rotations), cache


def _decode(params, tokens, cache: Cache, config, rotations, scheme, shifts, clips, scales):
    """The last layer's output at the new tokens, and the cache with them in it."""
    rotations, scheme = rotations or Rotations(), scheme or Scheme()
    dtype, first = cache.dtype, cache.position
    whole, windows = tables(config, cache.length, dtype)
    roles = {"keys": cache.keys, "values": cache.values}
    kept = tuple(role for role, held in roles.items() if isinstance(held, PackedHeads))
    rope = jax.tree.map(
        lambda table: jax.lax.dynamic_slice_in_dim(table, first, tokens.shape[1]), whole
    )
    own = PerLayer(
        by_layer(rotations), shifts or Shifts(), clips or Clips(), scales or Scales(), windows
    )
    inputs = (jnp.arange(config.num_hidden_layers, dtype=first.dtype), params.layers, own)
    hidden = jnp.take(params.embed, tokens, axis=0).astype(dtype)
    if rotations.fused:
        hidden = rotate(hidden, rotations.residual)
    state = (hidden, cache.keys, cache.values)
    for start, stop, grids in segments(scheme, config.num_hidden_layers):

        def step(state, inputs, grids=grids):
            hidden, keys, values = state
            i, layer, own = inputs

            def through_cache(q, k, v, window):
                nonlocal keys, values  # written in place: they are carried through the scan
                keys, values = _written(keys, k, i, first), _written(values, v, i, first)
                return attend(q, keys, values, window, first=first, layer=i)

            turns = rotations.replace(**own.turns)
            options = {"attend": through_cache, "kept": kept}
            hidden, _ = decoder_layer(
                hidden, layer, own, turns, grids, scheme, config, rope, **options
            )
            return (hidden, keys, values), None

        part = jax.tree.map(lambda x, a=start, b=stop: x[a:b], inputs)
        state, _ = jax.lax.scan(step, state, part)
    hidden, keys, values = state
    return hidden, Cache(keys, values, first + tokens.shape[1], dtype)


def _written(held: Any, new: Any, layer, first) -> Any:
    """The keys or values of all layers with those of some tokens in one."""
    place = (layer, jnp.zeros_like(first), first)
    if isinstance(held, PackedHeads):
        return append(held, new, place)
    at = (*place, *(jnp.zeros_like(first),) * 2)
    return jax.lax.dynamic_update_slice(held, new[None], at)


def next_token(
    logits: Float[Array, "batch vocab"],
    temperature: Float[Array, " batch"],
    key: Key[Array, ""],
    *,
    top_k: int | None = None,
) -> Int[Array, " batch"]:
    """A token drawn by its logits over the temperature; the likeliest where that is 0.

    top_k: draw among so many of the likeliest; None among all.
    """
    logits = logits.astype(jnp.float32)
    likeliest = logits.argmax(-1)

    def draw():
        kept = logits
        if top_k is not None:
            least = jax.lax.top_k(logits, min(top_k, logits.shape[-1]))[0][:, -1:]
            kept = jnp.where(logits < least, -jnp.inf, logits)
        heat = jnp.where(temperature > 0, temperature, 1)[:, None]
        return jnp.where(temperature > 0, jax.random.categorical(key, kept / heat), likeliest)

    return jax.lax.cond((temperature > 0).any(), draw, lambda: likeliest)


@partial(jax.jit, static_argnames=("config", "steps", "top_k", "scheme", "dtype", "packed"))
def generate(
    params: Params,
    prompt: Int[Array, "batch length"],
    key: Key[Array, ""],
    config: ModelConfig,
    *,
    steps: int,
    temperature: float | Float[Array, "..."] = 1.0,
    top_k: int | None = None,
    rotations: Rotations | None = None,
    scheme: Scheme | None = None,
    shifts: Shifts | None = None,
    clips: Clips | None = None,
    scales: Scales | None = None,
    dtype: Any = None,
    packed: bool = False,
) -> Int[Array, "batch steps"]:
    """The `steps` tokens that the network writes after a prompt; past any end-of-text, too.

    temperature: what logits are divided by before one is drawn; 0 takes the likeliest token. One
      number, or an array that broadcasts against [batch, steps].
    top_k: draw among so many of the likeliest; None among all.
    dtype: of the computation and the cache; the parameters' own if None. packed: whether keys and
    values are kept as integers. The rest as in `forward`.
    """
    batch, length = prompt.shape
    beside = (config, rotations, scheme, shifts, clips, scales)
    heat = jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), (batch, steps))

    def choose(hidden, heat, key):
        logits = project(hidden[:, -1:], params, config, rotations)[:, 0]
        return next_token(logits, heat, key, top_k=top_k)

    def step(state, inputs):
        token, cache = state
        hidden, cache = _decode(params, token[:, None], cache, *beside)
        token = choose(hidden, *inputs)
        return (token, cache), token

    cache = empty_cache(
        config,
        batch,
        length + steps,
        dtype or params.embed.dtype,
        packed=scheme if packed else None,
    )
    hidden, cache = _decode(params, prompt, cache, *beside)
    keys = jax.random.split(key, steps)
    token = choose(hidden, heat[:, 0], keys[0])
    _, more = jax.lax.scan(step, (token, cache), (heat.T[1:], keys[1:]))
    return jnp.concatenate([token[:, None], more.T], axis=1)
