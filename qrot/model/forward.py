"""The forward pass: a pure function of a network and tokens. Layers are scanned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from qrot.model.config import ModelConfig
from qrot.model.layer import Context, Rope, decoder_layer, rms_norm, rope_table
from qrot.model.params import Layers, Network
from qrot.rotation.forms import Rotation, unrotate
from qrot.rotation.transform import Online, Transform, split_layers, with_shared
from qrot.scheme import LayerScheme, segments

# What a layer's weights become before it runs, and what acts beside those: of the layer, all that
# is put on it, its grids, and what there is beside.
Prepare = Callable[..., tuple[Layers, Transform | Online]]


def forward(
    network: Network,
    tokens: Int[Array, "batch length"],
    *,
    remat: bool = False,
    dtype: Any = None,
) -> Float[Array, "batch length vocab"]:
    """Logits of a network, with activations, keys and values quantised by its scheme.

    Args:
        network: its weights are used as they are.
        tokens: of texts of equal length.
        remat: recompute each layer in the backward pass instead of storing its intermediates.
        dtype: of the computation; the parameters' own if None.

    Returns:
        Logits in that dtype.
    """
    hidden = embedded(network, tokens, dtype)
    return project(network, run_layers(network, hidden, remat=remat))


def embedded(
    network: Network, tokens: Int[Array, "batch length"], dtype: Any = None
) -> Float[Array, "batch length hidden"]:
    """The residual stream before the first layer, in the parameters' own dtype if None."""
    table = network.params.embed
    return jnp.take(table, tokens, axis=0).astype(dtype or table.dtype)


def run_layers(
    network: Network,
    hidden: Float[Array, "batch length hidden"],
    *,
    prepare: Prepare | None = None,
    beside: tuple[Any, ...] = (),
    remat: bool = False,
) -> Float[Array, "batch length hidden"]:
    """The residual stream behind the last layer.

    Args:
        network: its layers and what acts beside them.
        hidden: the residual stream before the first layer.
        prepare: applied to each layer before it runs.
        beside: more of each layer for `prepare`, with a leading axis of layers.
        remat: as in `forward`.
    """
    _, shared = split_layers(network.online)
    rope = rope_table(network.config, hidden.shape[1], jnp.promote_types(hidden.dtype, jnp.float32))
    for grids, inputs in runs_of_layers(network, *beside):

        def step(h, inputs, grids=grids):
            layer, own, window, *more = inputs
            online = with_shared(own, shared)
            if prepare is not None:
                layer, online = prepare(layer, online, grids, *more)
            return decoder_layer(
                h, layer, layer_context(network, online, window, rope, grids)
            ), None

        if remat:
            step = jax.checkpoint(step, prevent_cse=False)
        hidden, _ = jax.lax.scan(step, hidden, inputs)
    return hidden


def runs_of_layers(network: Network, *beside: Any) -> Iterator[tuple[LayerScheme, Any]]:
    """Runs of layers with the same grids: (grids, (layers, what each has of its own, windows)).

    Args:
        network: its layers.
        beside: more with a leading axis of layers, appended to what is yielded.
    """
    own, _ = split_layers(network.online)
    count = network.config.num_hidden_layers
    inputs = (network.params.layers, own, windows(network.config), *beside)
    for start, stop, grids in segments(network.scheme, count):
        if (start, stop) == (0, count):
            yield grids, inputs
        else:
            yield grids, jax.tree.map(lambda x, a=start, b=stop: x[a:b], inputs)


def windows(config: ModelConfig) -> Int[Array, " layers"] | None:
    """The sliding window of each layer; None where none has one."""
    return None if config.sliding_window is None else jnp.asarray(config.sliding_window)


def layer_context(
    network: Network, online: Transform | Online, window: Any, rope: Rope, grids: LayerScheme
) -> Context:
    """The context of one layer of a network."""
    return Context(
        online=online,
        window=window,
        rope=rope,
        grids=grids,
        config=network.config,
        scale_gradient=network.scheme.scale_gradient,
    )


def project(
    network: Network,
    hidden: Float[Array, "batch length hidden"],
    rotation: Rotation | None = None,
) -> Float[Array, "batch length vocab"]:
    """Logits of the last layer's output.

    Args:
        network: its last norm and head.
        hidden: the residual stream behind the last layer.
        rotation: that the residual stream comes in and the head does not know of; None for none.
    """
    params = network.params
    hidden = unrotate(rms_norm(hidden, params.norm, network.config.rms_norm_eps), rotation)
    head = params.embed.T if params.head is None else params.head
    return hidden @ head.astype(hidden.dtype)
