"""The anatomy of a model's outliers, before and after what is put on it."""

from __future__ import annotations

import math
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
        own, grid = of_layer(transform, i), grids.sites[site.name]
        basis, clip = site_basis(site, own, config.head_dim), own.clips.get(site.name)
        x = jnp.asarray(captured.inputs[site.name][i], jnp.float32)
        mu = own.shifts.get(site.name)
        x = x if mu is None else x - mu
        y = basis.forward(x)
        figures = _figures(outliers(y.reshape(len(y), -1)))
        figures["error"] = float(_error(y, grid, clip))
        if captured.gradients is not None:
            g = jnp.asarray(captured.gradients[site.name][i], jnp.float32)
            weight = jnp.asarray(captured.weight)
            figures["cost"] = float(expected_cost(x, g, weight, grid, basis, clip))
        layers.append(figures)
    return layers


def site_costs(
    network: Network,
    transform: Transform,
    captured: Captured,
    *,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """What rounding is expected to cost at each site, summed over the layers, in nats a token.

    Args:
        network: whose scheme has the grids.
        transform: that makes the bases.
        captured: of the network, with gradients.
        advance: called for each site.
    """
    costs = {}
    for name, site in SITES.items():
        figures = site_figures(site, captured, transform, network)
        costs[name] = math.fsum(layer["cost"] for layer in figures)
        advance()
    return costs


@partial(jax.jit, static_argnames="grid")
def _error(
    y: Float[Array, "vectors *width"], grid: Grid, clip: Float[Array, ""] | None
) -> Float[Array, ""]:
    return jnp.square(fake_quantise(y, grid, clip=clip) - y).sum() / jnp.square(y).sum()


def _weights(weights: Iterable[Float[Array, "in out"]]) -> list[dict[str, Any]]:
    """A weight's outputs stand for tokens: each is a vector of inputs with a scale of its own."""
    return [_figures(outliers(weight.T)) for weight in weights]
