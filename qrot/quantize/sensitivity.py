"""What rounding each projection of each layer costs, in nats a token, without rounding the network.

Layers are gone through one at a time, forwards and back.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from qrot.calibrate.moments import outputs
from qrot.calibrate.walk import Hidden, Place, backwards, forwards, predicted_gradients, pull
from qrot.grid import Grid
from qrot.model.params import Layers, Network
from qrot.quantize.method import Advance, Rows
from qrot.quantize.rtn import round_weight
from qrot.sites import INPUTS, PROJECTIONS, SITE_OF

# Measured on SmolLM2, see docs/methods/mixed.md.
RUN = 32

_OUTPUTS = tuple(f"{name}_output" for name in PROJECTIONS)
Changes = dict[str, list[Float[Array, "in out"]]]


def sensitivity(
    network: Network,
    rows: Rows,
    grids: tuple[Grid, ...],
    *,
    seed: int = 0,
    batch: int = 2,
    advance: Advance = lambda: None,
) -> Float[np.ndarray, "layers projections grids"]:
    """Nats a token that each projection, alone, is expected to cost on each grid.

    Rounding changes a weight by E, and what it makes of an input x by x E. With g the derivative by
    that output of a window's negative log-likelihood, for tokens drawn from the network's own
    predictions, these move, in Kullback-Leibler divergence and to second order, by
      1/2 (sum_t x_t E g_t^T)^2 on average over windows.
    Few windows say little of that mean, so the square is taken of each run of RUN tokens: what is
    further apart is taken to be independent. E is that of rounding to nearest.

    Args:
        network: fused, or with nothing on it. Activations and cache are not quantised.
        rows: tokens to measure on.
        grids: that weights may be rounded to.
        seed: of the drawn tokens.
        batch: windows that run at once.
        advance: called twice for each layer.

    Raises:
        ValueError: where rotations are not fused.
    """
    entered: list[Hidden] = []
    costs: list[np.ndarray] = []

    def forward(place: Place) -> Hidden:
        entered.append(place.hidden)
        return outputs(place)

    def backward(place: Place, gradients: Hidden) -> Hidden:
        changes = _changes(place.layer, grids)
        total, before = np.zeros((len(PROJECTIONS), len(grids))), []
        entered.pop()
        for h, g in zip(place.hidden, gradients, strict=True):
            to_input, cost = pull(
                h,
                g,
                place.layer,
                place.context,
                changes,
                names=INPUTS,
                wrt=_OUTPUTS,
                statistic=_costs,
            )
            before.append(np.asarray(to_input))
            total += np.asarray(cost, np.float64)
        costs.append(total / rows.size)
        return before

    last = forwards(network, rows, forward, batch=batch, advance=advance)
    gradients = predicted_gradients(network, last, seed)
    backwards(network, entered, gradients, backward, advance=advance)
    return np.stack(costs[::-1])


@partial(jax.jit, static_argnames="grids")
def _changes(layer: Layers, grids: tuple[Grid, ...]) -> Changes:
    """E of each projection on each grid."""

    def of(name: str) -> list[Array]:
        weight = layer.linear(name).weight
        return [round_weight(weight, grid) - weight for grid in grids]

    return {name: of(name) for name in PROJECTIONS}


def _costs(
    inputs: dict[str, Array], gradients: dict[str, Array], changes: Changes
) -> Float[Array, "projections grids"]:
    """What each change costs over all tokens: 1/2 the squares of its runs' derivatives."""

    def cost(name: str, change: Array) -> Array:
        moved = jnp.sum(inputs[SITE_OF[name]] @ change * gradients[f"{name}_output"], axis=-1)
        runs = jnp.pad(moved, ((0, 0), (0, -moved.shape[1] % RUN))).reshape(-1, RUN)
        return jnp.sum(jnp.square(jnp.sum(runs, axis=1))) / 2

    return jnp.array([[cost(name, e) for e in changes[name]] for name in PROJECTIONS])
