"""What learning makes small. An objective is a pure function (learned, params, batch) -> scalar.

To add one: write the function, say in `OBJECTIVES` what its batches are, and name it in a config.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from qrot.evaluate.perplexity import token_nll
from qrot.grid import Scheme, fake_quantise, segments
from qrot.model.config import ModelConfig
from qrot.model.forward import forward
from qrot.model.fuse import rotate_layer, rotate_shifts
from qrot.model.params import Params
from qrot.quantize.rtn import rtn_layer
from qrot.rotation.rotations import Clips, Rotations, Shifts, per_head, rotate, unrotate


@struct.dataclass
class Learned:
    """All that is put on a model; what an optimiser moves is for `qrot.learn.loop` to say."""

    rotations: Rotations
    shifts: Shifts | None = None
    clips: Clips | None = None


def cross_entropy(
    learned: Learned,
    params: Params,
    tokens: Int[Array, "batch length"],
    config: ModelConfig,
    scheme: Scheme,
) -> Float[Array, ""]:
    """Next-token cross-entropy of the quantised network, nats a token (SpinQuant, 2024).

    With weights at 16 bits no weight is touched: each site computes Q(x R) R^T. With fewer, each
    layer's weights are rotated and rounded on their way through the scan.
    """
    rotations, shifts = learned.rotations, learned.shifts
    if scheme.rounds_weights:
        rotations = rotations.replace(fused=True)
        if shifts is not None:
            shifts = rotate_shifts(shifts, rotations, config)

    def rotate_and_round(layer, turns, grids):
        turned = rotate_layer(layer, turns, config)
        return rtn_layer(turned, grids, scale_gradient=scheme.scale_gradient)

    logits = forward(
        params,
        tokens,
        config,
        rotations=rotations,
        scheme=scheme,
        shifts=shifts,
        clips=learned.clips,
        prepare=rotate_and_round if scheme.rounds_weights else None,
    )
    return token_nll(logits, tokens).mean()


def reconstruction(
    learned: Learned,
    params: Params,
    captured: dict[str, Float[Array, "layers vectors ..."]],
    config: ModelConfig,
    scheme: Scheme,
) -> Float[Array, ""]:
    """Mean over layers and sites of ||X W - Q(X R) Q(R^T W)||^2 / ||X W||^2.

    Sites: the inputs of q, k, v; of o; of gate, up; of down; and the values, for which W = I.
    `captured` holds X, from a full-precision pass.
    """
    rotations, clips = learned.rotations, learned.clips or Clips()
    shifts = learned.shifts or Shifts()

    def one_layer(total, inputs, grids):
        layer, x, value, shift, clip = inputs
        turns = rotations.replace(value=value)

        def quantise(y, name, grid, mu=None):
            ratio = getattr(clip, name)
            if mu is None:
                return fake_quantise(y, grid, clip=ratio, scale_gradient=scheme.scale_gradient)
            return quantise(y - mu, name, grid) + mu

        def rotate_heads(y, rotation):
            return per_head(rotate, y, rotation, config.head_dim)

        def unrotate_heads(y, rotation):
            return per_head(unrotate, y, rotation, config.head_dim)

        sites = {
            "qkv": (turns.residual, rotate, unrotate, ("q", "k", "v"), grids.qkv),
            "o": (value, rotate_heads, unrotate_heads, ("o",), grids.o),
            "gate_up": (turns.residual, rotate, unrotate, ("gate", "up"), grids.gate_up),
            "down": (turns.down, rotate, unrotate, ("down",), grids.down),
        }
        rounded = None
        if scheme.rounds_weights:
            rounded = rtn_layer(
                rotate_layer(layer, turns, config), grids, scale_gradient=scheme.scale_gradient
            )
        for name, (turn, go, back, readers, grid) in sites.items():
            if rounded is None and (not grid.on or turn is None or name == "down"):
                continue  # nothing that is learned acts here
            mu = getattr(shift, name)
            mu = None if mu is None else go(mu, turn)
            y = quantise(go(x[name], turn), name, grid, mu)
            wrong = right = 0.0
            for reader in readers:
                weight = getattr(layer, reader).weight
                exact = x[name] @ weight
                if rounded is None:
                    error = (back(y, turn) - x[name]) @ weight
                else:
                    written = turns.residual if reader in ("o", "down") else None
                    if reader == "v":
                        exact = rotate_heads(exact, value)
                    exact = rotate(exact, written)
                    error = y @ getattr(rounded, reader).weight - exact
                wrong, right = wrong + jnp.square(error).sum(), right + jnp.square(exact).sum()
            total = total + wrong / right
        if grids.values.on and value is not None:
            y = quantise(rotate(x["values"], value), "values", grids.values)
            error = unrotate(y, value) - x["values"]
            total = total + jnp.square(error).sum() / jnp.square(x["values"]).sum()
        return total, None

    inputs = (params.layers, captured, rotations.value, shifts, clips)
    total = jnp.zeros(())
    for start, stop, grids in segments(scheme, config.num_hidden_layers):
        part = jax.tree.map(lambda x, a=start, b=stop: x[a:b], inputs)
        total, _ = jax.lax.scan(partial(one_layer, grids=grids), total, part)
    return total / config.num_hidden_layers


class Objective(NamedTuple):
    """A loss and what its batches are made of: rows of tokens, or captured site inputs."""

    loss: Callable[..., Float[Array, ""]]
    batch: str  # "tokens" or "captured"


OBJECTIVES = {
    "cross_entropy": Objective(cross_entropy, "tokens"),
    "reconstruction": Objective(reconstruction, "captured"),
}
