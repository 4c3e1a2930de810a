"""Decoding: token after token, with the keys and values of those before in a cache.

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

from qrot.errors import InputError
from qrot.grid import Grid
from qrot.kernels.kv4 import PackedHeads, append, attend, empty_heads, fits
from qrot.model.forward import embedded, layer_context, project, runs_of_layers
from qrot.model.layer import decoder_layer, rope_table
from qrot.model.params import Network
from qrot.rotation.transform import split_layers, with_shared
from qrot.scheme import layer_schemes


class Cache(struct.PyTreeNode):
    """Keys and values of the tokens so far; places from `position` on are empty.

    Attributes:
        keys, values: as attention reads them.
        position: tokens so far, the same for the whole batch.
        dtype: of the computation.
    """

    keys: PackedHeads | Float[Array, "layers batch length kv_heads head_dim"]
    values: PackedHeads | Float[Array, "layers batch length kv_heads head_dim"]
    position: Int[Array, ""]
    dtype: Any = struct.field(pytree_node=False)

    @property
    def length(self) -> int:
        """Tokens that it has room for."""
        heads = self.keys.codes if isinstance(self.keys, PackedHeads) else self.keys
        return heads.shape[2]


def empty_cache(
    network: Network, batch: int, length: int, dtype: Any = None, *, packed: bool = False
) -> Cache:
    """A cache with room for `length` tokens.

    Args:
        network: whose keys and values it is to hold.
        batch: texts.
        length: tokens of each.
        dtype: of the computation; the parameters' own if None.
        packed: whether keys and values are stored as integers. Those with overrides by layer, with
            more than 8 bits or with one scale for all tokens are stored as values, on their grid.

    Raises:
        InputError: where a group does not divide head_dim, or token by token is not the same as all
            at once (a `threshold`, which looks for outliers in all tokens that are there).
    """
    config, dtype = network.config, dtype or network.params.embed.dtype
    layers = config.num_hidden_layers
    schemes = layer_schemes(network.scheme, layers)
    if any(grid.on and grid.threshold for scheme in schemes for grid in scheme.sites.values()):
        raise InputError(
            "activations.threshold looks for outliers in all tokens at once: a network with it "
            "does not write token by token"
        )
    shape = (layers, batch, length, config.num_key_value_heads, config.head_dim)
    wide = jnp.promote_types(dtype, jnp.float32)

    def empty(site: str) -> Any:
        grids: set[Grid] = {scheme.sites[site] for scheme in schemes}
        if packed and len(grids) == 1 and fits(grid := grids.pop()):
            return empty_heads(shape, grid, wide)
        return jnp.zeros(shape, dtype)

    return Cache(empty("keys"), empty("values"), jnp.zeros((), jnp.int32), jnp.dtype(dtype))


def decode_step(
    network: Network, tokens: Int[Array, "batch new"], cache: Cache
) -> tuple[Float[Array, "batch new vocab"], Cache]:
    """Logits of some more tokens, one or many, and the cache with them in it.

    Step by step it comes to the same as `forward`, except where all tokens share a scale
    (granularity `tensor`). More tokens than the cache has room for overwrite its last places: make
    it long enough.

    Args:
        network: as for `forward`.
        tokens: that come next.
        cache: of those before, whose dtype is that of the computation.
    """
    hidden, cache = _decode(network, tokens, cache)
    return project(network, hidden), cache


def _decode(network: Network, tokens, cache: Cache) -> tuple[Array, Cache]:
    """The last layer's output at the new tokens, and the cache with them in it."""
    dtype, first = cache.dtype, cache.position
    _, shared = split_layers(network.online)
    packed = tuple(
        site
        for site, heads in (("keys", cache.keys), ("values", cache.values))
        if isinstance(heads, PackedHeads)
    )
    rope = jax.tree.map(
        lambda table: jax.lax.dynamic_slice_in_dim(table, first, tokens.shape[1]),
        rope_table(network.config, cache.length, jnp.promote_types(dtype, jnp.float32)),
    )
    index = jnp.arange(network.config.num_hidden_layers, dtype=first.dtype)
    state = (embedded(network, tokens, dtype), cache.keys, cache.values)
    for grids, inputs in runs_of_layers(network, index):

        def step(state, inputs, grids=grids):
            hidden, keys, values = state
            layer, own, window, i = inputs

            def through_cache(q, k, v, window):
                nonlocal keys, values  # written in place: they are carried through the scan
                keys, values = _written(keys, k, i, first), _written(values, v, i, first)
                return attend(q, keys, values, window, first=first, layer=i)

            online = with_shared(own, shared)
            context = layer_context(network, online, window, rope, grids)
            context = context.replace(packed_cache=packed)
            hidden = decoder_layer(hidden, layer, context, attend=through_cache)
            return (hidden, keys, values), None

        state, _ = jax.lax.scan(step, state, inputs)
    hidden, keys, values = state
    return hidden, Cache(keys, values, first + tokens.shape[1], dtype)


def _written(cached: Any, new: Any, layer, first) -> Any:
    """The keys or values of all layers with those of some tokens in one."""
    place = (layer, jnp.zeros_like(first), first)
    if isinstance(cached, PackedHeads):
        return append(cached, new, place)
    at = (*place, *(jnp.zeros_like(first),) * 2)
    return jax.lax.dynamic_update_slice(cached, new[None], at)


def next_token(
    logits: Float[Array, "batch vocab"],
    temperature: Float[Array, " batch"],
    key: Key[Array, ""],
    *,
    top_k: int | None = None,
) -> Int[Array, " batch"]:
    """A token drawn by its logits over the temperature; the likeliest where that is 0.

    Args:
        logits: of the tokens that may come next.
        temperature: of each text.
        key: of what is drawn.
        top_k: draw among so many of the likeliest; None among all.
    """
    logits = logits.astype(jnp.float32)
    likeliest = logits.argmax(-1)

    def draw():
        allowed = logits
        if top_k is not None:
            least = jax.lax.top_k(logits, min(top_k, logits.shape[-1]))[0][:, -1:]
            allowed = jnp.where(logits < least, -jnp.inf, logits)
        divisor = jnp.where(temperature > 0, temperature, 1)[:, None]
        return jnp.where(temperature > 0, jax.random.categorical(key, allowed / divisor), likeliest)

    return jax.lax.cond((temperature > 0).any(), draw, lambda: likeliest)


@partial(jax.jit, static_argnames=("steps", "top_k", "dtype", "packed"))
def generate(
    network: Network,
    prompt: Int[Array, "batch length"],
    key: Key[Array, ""],
    *,
    steps: int,
    temperature: float | Float[Array, "..."] = 1.0,
    top_k: int | None = None,
    dtype: Any = None,
    packed: bool = False,
) -> Int[Array, "batch steps"]:
    """The `steps` tokens that the network writes after a prompt; past any end-of-text, too.

    Args:
        network: as for `forward`.
        prompt: texts of equal length.
        key: of what is drawn.
        steps: tokens to write.
        temperature: what logits are divided by before one is drawn; 0 takes the likeliest token.
            One number, or an array that broadcasts against [batch, steps].
        top_k: draw among so many of the likeliest; None among all.
        dtype: of the computation and the cache; the parameters' own if None.
        packed: whether keys and values are stored as integers.
    """
    batch, length = prompt.shape
    temperature = jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), (batch, steps))

    def choose(hidden, temperature, key):
        return next_token(project(network, hidden[:, -1:])[:, 0], temperature, key, top_k=top_k)

    def step(state, inputs):
        token, cache = state
        hidden, cache = _decode(network, token[:, None], cache)
        token = choose(hidden, *inputs)
        return (token, cache), token

    cache = empty_cache(network, batch, length + steps, dtype, packed=packed)
    hidden, cache = _decode(network, prompt, cache)
    keys = jax.random.split(key, steps)
    token = choose(hidden, temperature[:, 0], keys[0])
    _, more = jax.lax.scan(step, (token, cache), (temperature.T[1:], keys[1:]))
    return jnp.concatenate([token[:, None], more.T], axis=1)
