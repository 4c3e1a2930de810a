"""The objective of one layer at a time, on captured hidden states."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from qrot.model.config import ModelConfig
from qrot.model.forward import PerLayer, decoder_layer, tables
from qrot.network import rotate_shifts
from qrot.model.params import Params
from qrot.quantize.rtn import rotate_and_round
from qrot.rotation.forms import Clips, Learned, Scales, Shifts, by_layer, rotate
from qrot.scheme import Scheme, segments


def layer_reconstruction(
    learned: Learned,
    params: Params,
    hidden: Float[Array, "layers_and_last batch length n"],
    config: ModelConfig,
    scheme: Scheme,
) -> Float[Array, ""]:
    """Mean over layers of ||f_q(H) - f(H)||^2 / ||f(H) - H||^2, f a whole decoder layer.

    hidden: H of each layer and the last one's output, of the full-precision network; so layers are
    independent of each other, and none feels what those before it did wrong. First tokens are left
    out: theirs would be the only errors that count.
    """
    rotations, shifts, scales = learned.rotations, learned.shifts, learned.scales
    fused = scheme.rounds_weights
    if fused and shifts is not None:
        shifts = rotate_shifts(shifts, rotations, config, scales)
    rope, windows = tables(config, hidden.shape[2], jnp.float32)
    own = PerLayer(
        by_layer(rotations),
        shifts or Shifts(),
        learned.clips or Clips(),
        scales or Scales(),
        windows,
    )

    def step(total, inputs, grids):
        layer, own, before, after = inputs
        before, after = before.astype(jnp.float32), after.astype(jnp.float32)
        turns = rotations.replace(**own.turns, fused=fused)
        done = jnp.square(after - before)[:, 1:].sum()
        if fused:
            layer = rotate_and_round(layer, turns, own.scales, grids, config, scheme)
            before, after = (rotate(h, rotations.residual) for h in (before, after))
        out, _ = decoder_layer(before, layer, own, turns, grids, scheme, config, rope)
        return total + jnp.square(out - after)[:, 1:].sum() / done, None

    total = jnp.zeros(())
    xs = (params.layers, own, hidden[:-1], hidden[1:])
    for start, stop, grids in segments(scheme, config.num_hidden_layers):
        part = jax.tree.map(lambda x, a=start, b=stop: x[a:b], xs)
        total, _ = jax.lax.scan(partial(step, grids=grids), total, part)
    return total / config.num_hidden_layers
