"""The anatomy of a model's outliers as tables for a terminal."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich import box
from rich.table import Table

_RANKED = 8  # places of the ranking that are shown


def tables(found: dict[str, Any], scheme: str) -> list[Table]:
    """Sites, weights, where the outliers are, and a ranking.

    Args:
        found: what `qrot.run.inspect.inspect` returns.
        scheme: the name of the scheme whose rounding errors are told.
    """
    sites = found["sites"]
    rounded = {name: layers for name, layers in sites.items() if "error" in layers[0]["before"]}
    return [
        _anatomy(sites, "Activations, before and after", FIGURES_TOLD),
        _anatomy(found["weights"], "Weights: an output stands for a token", FIGURES_TOLD),
        _anatomy(rounded, f"Rounded as {scheme} has it", ROUNDING_TOLD),
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
