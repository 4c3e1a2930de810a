"""The anatomy of a model's outliers, before and after a rotation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int
from rich import box
from rich.table import Table

from qrot.evaluate.outliers import FIGURES, Outliers, outliers
from qrot.grid import Grid, fake_quantise
from qrot.calibrate.capture import Captured, capture, capture_hidden
from qrot.learn.site_wise import expected_cost
from qrot.model.config import ModelConfig
from qrot.network import fuse
from qrot.model.params import Model, Params
from qrot.sites import PROJECTIONS
from qrot.rotation.forms import Learned, Rotations, by_layer, rotate
from qrot.rotation.basis import layer_sites
from qrot.scheme import Scheme, layer_schemes

SITES = ("qkv", "keys", "values", "o", "gate_up", "down")
_TOP = 3  # channels and tokens that are named
_RANKED = 8  # places of the ranking that are shown


def inspect(
    model: Model,
    rows: Int[np.ndarray, "count length"],
    learned: Learned,
    scheme: Scheme,
    *,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Measure every site of every layer, before and after what is learned, in plain values.

    model: folded. scheme: whose rounding errors are told. advance: called STEPS times.
    Returns {"sites": {site: [{"before": {...}, "after": {...}}, one a layer]}, "weights": the same
    by projection}. Figures are those of `qrot.evaluate.outliers`, with the channels of
    the largest values, and in the residual stream the tokens: text, place in the window, size.
    `error` is ||x - Q(x)||^2 /
    ||x||^2, and `cost` what that rounding will cost, in nats a token (`qrot.learn.site_wise.
    expected_cost`). The residual stream has neither, as it is not rounded.
    """
    config, plain = model.config, Learned(Rotations())
    captured, _ = capture(model, rows, taps=rows.shape[1], seed=0, gradients=True)
    advance()
    hidden = capture_hidden(model, rows)
    found = {"sites": {"residual": residual_figures(hidden, learned)}}
    _name_tokens(found["sites"]["residual"], model, rows, hidden)
    advance()
    for site in SITES:
        each = [getattr(grids, site) for grids in layer_schemes(scheme, config.num_hidden_layers)]
        pairs = (site_figures(site, captured, state, config, each) for state in (plain, learned))
        found["sites"][site] = _paired(*pairs)
        advance()
    turned, _, _ = fuse(model.params, learned.rotations, config, None, learned.scales)
    both = model.params, turned
    found["weights"] = {n: _paired(*(_weights(params, n) for params in both)) for n in PROJECTIONS}
    advance()
    return found


STEPS = 3 + len(SITES)


def _paired(before: list[Any], after: list[Any]) -> list[dict[str, Any]]:
    return [{"before": b, "after": a} for b, a in zip(before, after, strict=True)]


def _figures(x: Outliers) -> dict[str, Any]:
    told: dict[str, Any] = {name: float(getattr(x, name)) for name in FIGURES}
    largest = np.asarray(x.largest)
    told["channels"] = [[int(i), float(largest[i])] for i in np.argsort(-largest)[:_TOP]]
    return told


def residual_figures(
    hidden: Float[np.ndarray, "layers_and_last count length n"], learned: Learned
) -> list[dict[str, Any]]:
    """The figures of the residual stream before and after its rotation, layer by layer."""
    told = []
    for layer in hidden:
        x = jnp.asarray(layer, jnp.float32).reshape(-1, layer.shape[-1])
        turned = rotate(x, learned.rotations.residual)
        told.append({"before": _figures(outliers(x)), "after": _figures(outliers(turned))})
    return told


def _name_tokens(told: list[dict[str, Any]], model: Model, rows, hidden) -> None:
    """Add to each layer the tokens of the largest values: text, place in the window, size."""
    for figures, layer in zip(told, hidden, strict=True):
        tops = np.abs(layer.astype(np.float32)).max(-1)
        most = np.argsort(-tops.ravel())[:_TOP]
        figures["before"]["tokens"] = [
            [_word(model, int(rows[at])), int(at[1]), float(tops[at])]
            for at in zip(*np.unravel_index(most, tops.shape), strict=True)
        ]


def _word(model: Model, token: int) -> str:
    return str(token) if model.tokenizer is None else model.tokenizer.decode([token])


def site_figures(
    site: str,
    captured: Captured,
    learned: Learned,
    config: ModelConfig,
    grids: Sequence[Grid],
) -> list[dict[str, Any]]:
    """The figures of one site in the basis that its grid sees, layer by layer, and the relative
    squared error of that grid; with gradients also what rounding will cost.
    """
    told = []
    for i, grid in enumerate(grids):
        own, scales, shifts, clips = jax.tree.map(
            lambda x, i=i: x[i],
            (by_layer(learned.rotations), learned.scales, learned.shifts, learned.clips),
        )
        place = layer_sites(learned.rotations.replace(**own), scales, config.head_dim)[site]
        x = jnp.asarray(captured.inputs[site][i], jnp.float32)
        mu, clip = getattr(shifts, site, None), getattr(clips, site, None)
        x = x if mu is None else x - mu
        y = place.go(x)
        figures = _figures(outliers(y.reshape(len(y), -1)))
        figures["error"] = float(_error(y, grid, clip))
        if captured.gradients is not None:
            g = jnp.asarray(captured.gradients[site][i], jnp.float32)
            weight = jnp.asarray(captured.weight)
            figures["cost"] = float(expected_cost(x, g, weight, grid, place, clip))
        told.append(figures)
    return told


@partial(jax.jit, static_argnames="grid")
def _error(y, grid: Grid, clip):
    return jnp.square(fake_quantise(y, grid, clip=clip) - y).sum() / jnp.square(y).sum()


def _weights(params: Params, name: str) -> list[dict[str, Any]]:
    """A weight's outputs stand for tokens: each is a vector of inputs with a scale of its own."""
    return [_figures(outliers(weight.T)) for weight in getattr(params.layers, name).weight]


def tables(found: dict[str, Any], scheme: Scheme) -> list[Table]:
    """What was found, for a terminal: sites, weights, where the outliers are, and a ranking."""
    sites = found["sites"]
    rounded = {name: layers for name, layers in sites.items() if name in SITES}
    return [
        _anatomy(sites, "Activations, before and after", FIGURES_TOLD),
        _anatomy(found["weights"], "Weights: an output stands for a token", FIGURES_TOLD),
        _anatomy(rounded, f"Rounded as {scheme.name} has it", ROUNDING_TOLD),
        _channels(sites),
        _ranking(sites),
    ]


def _table(title: str, *columns: str, words: int = 1) -> Table:
    drawn = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    for i, name in enumerate(columns):
        drawn.add_column(name, justify="left" if i < words else "right", no_wrap=True)
    return drawn


# How a figure of all layers comes out of theirs: the worst layer, the median one, mean, sum.
FIGURES_TOLD = {
    "ratio": ("max/median", np.max),
    "crest": ("max/rms", np.median),
    "kurtosis": ("kurtosis", np.max),
}
ROUNDING_TOLD = {"error": ("squared error", np.mean), "cost": ("nats a token", np.sum)}


def _anatomy(kinds: dict[str, Any], title: str, told: dict[str, Any]) -> Table:
    drawn = _table(title, "", *(head for name, _ in told.values() for head in (name, "after")))
    for kind, layers in kinds.items():
        cells = [
            _short(float(total([layer[when][name] for layer in layers])))
            for name, (_, total) in told.items()
            for when in ("before", "after")
        ]
        drawn.add_row(kind, *cells)
    return drawn


def _short(x: float) -> str:
    if x >= 10_000:
        return f"{x / 1000:,.0f}k"
    if x >= 1000:
        return f"{x:,.0f}"
    return f"{x:.1f}" if x >= 10 else f"{x:.2f}" if x >= 0.1 else f"{x:.2g}"


def _channels(sites: dict[str, Any]) -> Table:
    drawn = _table(
        "Where they are, before", "", "layer", "channels (largest |x|)", "tokens", words=4
    )
    for site, layers in sites.items():
        worst = max(range(len(layers)), key=lambda i, layers=layers: layers[i]["before"]["ratio"])
        before = layers[worst]["before"]
        channels = ", ".join(f"{i} ({_short(size)})" for i, size in before["channels"])
        tokens = ", ".join(f"{text!r} at {at}" for text, at, _ in before.get("tokens", []))
        drawn.add_row(site, str(worst), channels, tokens)
    return drawn


def _ranking(sites: dict[str, Any]) -> Table:
    drawn = _table("What it will cost most to round, after", "site", "layer", "nats", "of all")
    costs = [
        (layer["after"]["cost"], site, i)
        for site, layers in sites.items()
        for i, layer in enumerate(layers)
        if "cost" in layer["after"]
    ]
    total = sum(cost for cost, _, _ in costs)
    for cost, site, i in sorted(costs, reverse=True)[:_RANKED]:
        drawn.add_row(site, str(i), f"{cost:.4f}", f"{cost / total:.0%}" if total else "")
    drawn.add_section()
    drawn.add_row("all", "", f"{total:.4f}", "")
    return drawn
