"""The anatomy of a model's outliers, before and after what is put on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from qrot.calibrate.capture import Captured, capture, capture_hidden
from qrot.evaluate.outliers import FIGURES, Outliers, outliers
from qrot.grid import Grid, fake_quantise
from qrot.learn.objectives.fisher import expected_cost
from qrot.learn.site_wise import sums_by_site
from qrot.model.params import Model, Network
from qrot.network import fuse
from qrot.rotation.basis import site_basis
from qrot.rotation.forms import Rotation, rotate
from qrot.rotation.transform import Transform, of_layer
from qrot.scheme import layer_schemes
from qrot.sites import PROJECTIONS, SITES, Site

STEPS = 3 + len(SITES)
_TOP = 3  # channels and tokens that are named


def inspect(
    model: Model,
    rows: Int[np.ndarray, "count length"],
    transform: Transform,
    *,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Measure every site of every layer, before and after a transform, in plain values.

    Args:
        model: folded; its scheme is that whose rounding errors are measured.
        rows: tokens of the windows to look at.
        transform: what comes between before and after.
        advance: called STEPS times.

    Returns:
        {"sites": {site: [{"before": {...}, "after": {...}}, one a layer]}, "weights": the same by
        projection}. Figures are those of `qrot.evaluate.outliers`, with the channels of the largest
        values, and in the residual stream the tokens: text, place in the window, size. `error` is
        ||x - Q(x)||^2 / ||x||^2, and `cost` what that rounding will cost, in nats a token
        (`qrot.learn.objectives.fisher.expected_cost`). The residual stream has neither, as it is
        not rounded.
    """
    network = model.network
    vectors = rows.shape[1]
    captured, _ = capture(network, rows, vectors=vectors, seed=0, gradients=True)
    advance()
    hidden = capture_hidden(network, rows)
    found = {"sites": {"residual": residual_figures(hidden, transform.rotations.get("residual"))}}
    _name_tokens(found["sites"]["residual"], model, rows, hidden)
    advance()
    for site in SITES.values():
        pairs = (site_figures(site, captured, state, network) for state in (Transform(), transform))
        found["sites"][site.name] = _paired(*pairs)
        advance()
    fused = fuse(network, transform.replace(shifts={}, clips={}))
    both = network.params.layers, fused.params.layers
    found["weights"] = {
        name: _paired(*(_weights(layers.linear(name).weight) for layers in both))
        for name in PROJECTIONS
    }
    advance()
    return found


def _paired(before: list[Any], after: list[Any]) -> list[dict[str, Any]]:
    return [{"before": b, "after": a} for b, a in zip(before, after, strict=True)]


def _figures(x: Outliers) -> dict[str, Any]:
    found: dict[str, Any] = {name: float(getattr(x, name)) for name in FIGURES}
    largest = np.asarray(x.largest)
    found["channels"] = [[int(i), float(largest[i])] for i in np.argsort(-largest)[:_TOP]]
    return found


def residual_figures(
    hidden: Float[np.ndarray, "layers_and_last count length n"], rotation: Rotation | None
) -> list[dict[str, Any]]:
    """The figures of the residual stream before and after its rotation, layer by layer."""
    layers = []
    for layer in hidden:
        x = jnp.asarray(layer, jnp.float32).reshape(-1, layer.shape[-1])
        rotated = rotate(x, rotation)
        layers.append({"before": _figures(outliers(x)), "after": _figures(outliers(rotated))})
    return layers


def _name_tokens(
    layers: list[dict[str, Any]],
    model: Model,
    rows: Int[np.ndarray, "count length"],
    hidden: Float[np.ndarray, "layers_and_last count length n"],
) -> None:
    """Add to each layer the tokens of the largest values: text, place in the window, size."""
    for figures, layer in zip(layers, hidden, strict=True):
        tops = np.abs(layer.astype(np.float32)).max(-1)
        most = np.argsort(-tops.ravel())[:_TOP]
        figures["before"]["tokens"] = [
            [_word(model, int(rows[at])), int(at[1]), float(tops[at])]
            for at in zip(*np.unravel_index(most, tops.shape), strict=True)
        ]


def _word(model: Model, token: int) -> str:
    return str(token) if model.tokenizer is None else model.tokenizer.decode([token])


def site_figures(
    site: Site, captured: Captured, transform: Transform, network: Network
) -> list[dict[str, Any]]:
    """The figures of one site in the basis that its grid sees, layer by layer.

    Args:
        site: a row of `SITES`.
        captured: of the network.
        transform: that makes the basis.
        network: whose scheme has the grids.

    Returns:
        Figures, and the relative squared error of the grid; with captured gradients also what
        rounding will cost.
    """
    config, layers = network.config, []
    for i, grids in enumerate(layer_schemes(network.scheme, config.num_hidden_layers)):
        vectors = captured.inputs, captured.gradients
        x, g = (None if each is None else each[site.name][i] for each in vectors)
        own, sizes = of_layer(transform, i), (site.name, grids.sites[site.name], config.head_dim)
        found, error, cost = _measured(x, g, captured.weight, own, *sizes)
        figures = _figures(found) | {"error": float(error)}
        layers.append(figures if cost is None else figures | {"cost": float(cost)})
    return layers


@partial(jax.jit, static_argnames=("name", "grid", "head_dim"))
def _measured(
    x: Float[Array, "vectors *width"],
    g: Float[Array, "vectors *width"] | None,
    weight: Float[Array, " vectors"],
    own: Transform,
    name: str,
    grid: Grid,
    head_dim: int,
) -> tuple[Outliers, Float[Array, ""], Float[Array, ""] | None]:
    """What vectors of a site of one layer, and the derivatives there, come to in its basis."""
    basis, clip = site_basis(SITES[name], own, head_dim), own.clips.get(name)
    x = x.astype(jnp.float32) - own.shifts.get(name, 0)
    y = basis.forward(x)
    cost = None
    if g is not None:
        cost = expected_cost(x, g.astype(jnp.float32), weight, grid, basis, clip)
    error = jnp.square(fake_quantise(y, grid, clip=clip) - y).sum() / jnp.square(y).sum()
    return outliers(y.reshape(len(y), -1)), error, cost


def site_costs(network: Network, transform: Transform, captured: Captured) -> dict[str, float]:
    """What rounding is expected to cost at each site, summed over the layers, in nats a token.

    Args:
        network: whose scheme has the grids.
        transform: that makes the bases.
        captured: of the network, with gradients.
    """
    return {name: float(x) for name, x in _costs(transform, network, captured).items()}


_costs = jax.jit(partial(sums_by_site, expected_cost))


def _weights(weights: Iterable[Float[Array, "in out"]]) -> list[dict[str, Any]]:
    """A weight's outputs stand for tokens: each is a vector of inputs with a scale of its own."""
    return [_figures(outliers(weight.T)) for weight in weights]
