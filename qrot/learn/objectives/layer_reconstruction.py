"""The error of one layer at a time, on captured hidden states."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from qrot.learn.objective import Objective
from qrot.learn.quantised import rounding
from qrot.model.forward import layer_context, runs_of_layers
from qrot.model.layer import decoder_layer, rope_table
from qrot.model.params import Network
from qrot.rotation.forms import rotate
from qrot.rotation.transform import Transform, split_layers, with_shared


def layer_reconstruction(
    transform: Transform,
    network: Network,
    hidden: Float[Array, "layers_and_last batch length n"],
) -> Float[Array, ""]:
    """Mean over layers of ||f_q(H) - f(H)||^2 / ||f(H) - H||^2, f a whole decoder layer.

    Args:
        transform: what is put on the network.
        network: folded, with nothing online.
        hidden: H of each layer and the last one's output, of the full-precision network; so layers
            are independent of each other, and none has to make up for those before it. First
            tokens are left out: theirs would be the only errors that count.
    """
    _, shared = split_layers(transform)
    prepare, residual = rounding(network), transform.rotations.get("residual")
    rope = rope_table(network.config, hidden.shape[2], jnp.float32)

    def step(total, inputs, grids):
        layer, per_layer, window, before, after = inputs
        before, after = before.astype(jnp.float32), after.astype(jnp.float32)
        acting = with_shared(per_layer, shared)
        added = jnp.square(after - before)[:, 1:].sum()
        if prepare is not None:
            layer, acting = prepare(layer, acting, grids)
            before, after = (rotate(h, residual) for h in (before, after))
        out = decoder_layer(before, layer, layer_context(network, acting, window, rope, grids))
        return total + jnp.square(out - after)[:, 1:].sum() / added, None

    total = jnp.zeros(())
    acting = network.replace(online=transform)
    for grids, inputs in runs_of_layers(acting, hidden[:-1], hidden[1:]):
        total, _ = jax.lax.scan(partial(step, grids=grids), total, inputs)
    return total / network.config.num_hidden_layers


RECORD = Objective(
    "layer_reconstruction",
    layer_reconstruction,
    "hidden",
    "reconstruction error (relative to what a layer adds)",
)
