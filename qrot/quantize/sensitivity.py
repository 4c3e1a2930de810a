"""What rounding each projection of each layer costs, in nats a token, without rounding the network.

Layers are gone through one at a time, forwards and back, as in `qrot.calibrate.capture`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from qrot.grid import Grid
from qrot.calibrate.capture import loss_gradient
from qrot.model.config import ModelConfig
from qrot.model.forward import PerLayer, plain_layer
from qrot.model.params import Layers, Params
from qrot.sites import PROJECTIONS
from qrot.quantize.rtn import round_weight
from qrot.rotation.forms import Rotations, by_layer
from qrot.scheme import READERS

# Measured on SmolLM2, see docs/methods/mixed.md.
RUN = 32

_SITE = {name: site for site, names in READERS.items() for name in names}


def sensitivity(
    params: Params,
    config: ModelConfig,
    rows: Int[np.ndarray, "count length"],
    grids: tuple[Grid, ...],
    *,
    rotations: Rotations | None = None,
    seed: int = 0,
    batch: int = 2,
    advance: Callable[[], None] = lambda: None,
) -> Float[np.ndarray, "layers projections grids"]:
    """Nats a token that each projection, alone, is expected to cost on each grid.

    Rounding changes a weight by E, and what it makes of an input x by x E. With g the derivative by
    that output of a window's negative log-likelihood, for tokens drawn from the network's own
    predictions, these move, in Kullback-Leibler divergence and to second order, by
      1/2 (sum_t x_t E g_t^T)^2 on average over windows.
    Few windows say little of that mean, so the square is taken of each run of RUN tokens: what is
    further apart is taken to be independent. E is that of rounding to nearest.

    rows: tokens to measure on. rotations: what `fuse` left online; None where nothing was fused.
    advance: called twice for each layer. Activations and cache are not quantised. All hidden states
    are on the host. Raises ValueError where the rotations are not fused.
    """
    rotations = rotations or Rotations(fused=True)
    if not rotations.fused:
        raise ValueError("what is measured are the weights that the network has: fuse first")
    embed = np.asarray(params.embed)
    hidden = [embed[rows[i : i + batch]] for i in range(0, len(rows), batch)]
    layers, windows, before = config.num_hidden_layers, config.sliding_window, []

    def at(i: int):
        layer, turns = jax.tree.map(lambda x: x[i], (params.layers, by_layer(rotations)))
        own = PerLayer(turns, window=None if windows is None else windows[i])
        return layer, own

    for i in range(layers):
        before.append(hidden)
        run = partial(_forward, *at(i), rotations, config=config)
        hidden = [np.asarray(run(h)) for h in hidden]
        advance()
    keys = jax.random.split(jax.random.key(seed), len(hidden))
    felt = [
        np.asarray(loss_gradient(h, params, key, config))
        for h, key in zip(hidden, keys, strict=True)
    ]
    costs = []
    for i in reversed(range(layers)):
        layer, own = at(i)
        changes = _changes(layer, grids)
        total = np.zeros((len(PROJECTIONS), len(grids)))
        for j, h in enumerate(before.pop()):
            g, cost = _backward(layer, own, rotations, h, felt[j], changes, config=config)
            felt[j], total = np.asarray(g), total + np.asarray(cost, np.float64)
        costs.append(total / rows.size)
        advance()
    return np.stack(costs[::-1])


def _run(layer: Layers, own: PerLayer, rotations: Rotations, h, config: ModelConfig, observe):
    return plain_layer(h, layer, own, rotations, config, observe=observe)[0]


@partial(jax.jit, static_argnames="config")
def _forward(layer, own, rotations, h: Float[Array, "batch length n"], *, config: ModelConfig):
    return _run(layer, own, rotations, h, config, lambda site, x: None)


@partial(jax.jit, static_argnames="grids")
def _changes(layer: Layers, grids: tuple[Grid, ...]) -> dict[str, list[Float[Array, "in out"]]]:
    """E of each projection on each grid."""

    def of(name: str):
        weight = getattr(layer, name).weight
        return [round_weight(weight, grid) - weight for grid in grids]

    return {name: of(name) for name in PROJECTIONS}


@partial(jax.jit, static_argnames="config")
def _backward(layer, own, rotations, h, g, changes, *, config: ModelConfig):
    """(derivative by the layer's input, costs [projections, grids] over all tokens); g: by its
    output."""

    def run(h, nudges):
        seen = {}
        nudged = {
            name: linear.replace(bias=nudge if linear.bias is None else linear.bias + nudge)
            for name, nudge in nudges.items()
            for linear in [getattr(layer, name)]
        }
        out = _run(layer.replace(**nudged), own, rotations, h, config, seen.__setitem__)
        return out, seen

    still = {n: jnp.zeros((*h.shape[:2], getattr(layer, n).weight.shape[1])) for n in PROJECTIONS}
    _, pull, seen = jax.vjp(run, h, still, has_aux=True)
    to_input, to_outputs = pull(g)

    def cost(name: str, change):
        moved = jnp.sum(seen[_SITE[name]] @ change * to_outputs[name], axis=-1)
        runs = jnp.pad(moved, ((0, 0), (0, -moved.shape[1] % RUN))).reshape(-1, RUN)
        return jnp.sum(jnp.square(jnp.sum(runs, axis=1))) / 2

    return to_input, jnp.array([[cost(n, e) for e in changes[n]] for n in PROJECTIONS])
