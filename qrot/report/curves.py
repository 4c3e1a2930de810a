"""Figures over steps and over layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from qrot.report.svg import (
    NARROW,
    Number,
    Scale,
    apart,
    dot,
    line,
    number,
    path,
    svg,
    wide_span,
    words,
)

Points = list[tuple[Number, Number]]


def learning(runs: Sequence[tuple[str, list[dict[str, Any]]]], unit: str, width: Number) -> str:
    """Loss by step of each seed: training, and held out.

    Args:
        runs: the name of each, and the lines of its metrics.jsonl.
        unit: of the loss.
        width: of the picture.

    Returns:
        The picture as SVG.
    """
    drawn = [(name, _points(h, "loss"), _points(h, "held_out")) for name, h in runs]
    every = [loss for _, training, held_out in drawn for _, loss in training + held_out]
    last = max((step for _, *both in drawn for points in both for step, _ in points), default=1)
    phone = width <= NARROW
    height, left, right, bottom = (250 if phone else 320), 54, (70 if phone else 130), 44
    y = _vertical(every, 12, height - bottom)
    x = Scale(0, max(last, 1), left, width - right)
    parts = _frame(x, y, width - right, height - bottom)
    parts += [words(left, height - 4, "step", "tick")]
    ends, told = [], []
    for i, (name, training, held_out) in enumerate(drawn):
        shade = f"run{i % 3}"
        place = [(x.at(step), y.at(loss)) for step, loss in held_out]
        if len(training) > 1:
            parts.append(path([(x.at(a), y.at(b)) for a, b in training], f"training {shade}"))
        if not held_out:
            continue
        parts.append(path(place, f"curve {shade}"))
        for (a, b), (step, loss) in zip(place, held_out, strict=True):
            parts.append(dot(a, b, 3, f"point {shade}", f"{name}, step {step:g}: {loss:.4g}"))
        step, best = min(held_out, key=lambda point: point[1])
        parts.append(dot(x.at(step), y.at(best), 6.5, f"ring {shade}"))
        ends.append((place[-1], f"{name}: {best:.4g}" if not phone else f"{best:.4g}", i % 3))
        told.append(f"{name} from {held_out[0][1]:.4g} to {best:.4g} at step {step:g}")
    for name, history in runs:
        for entry in history:
            if "message" in entry:
                at = x.at(entry["step"])
                parts.append(line(at, 12, at, height - bottom, "reference"))
                told.append(f"{name} rolled back at step {entry['step']}")
    for place, (end, label, i) in zip(apart([end[1] for end, *_ in ends], 15), ends, strict=True):
        parts.append(words(end[0] + 12, place + 4, label, f"label{i}"))
    label = f"Held-out loss by step, {unit}: {'; '.join(told)}"
    return svg(width, height, label, parts)


def by_layer(title: str, series: dict[str, list[Number]], unit: str, limits: list[Number]) -> str:
    """A small panel: a number by layer, `before` broken, `after` full.

    Args:
        title: of the panel.
        series: values by layer, under `before` and `after`.
        unit: of the values.
        limits: values that the scale is to show, so that panels share it.

    Returns:
        The picture as SVG.
    """
    width, height, left, bottom = 200, 150, 34, 22
    y = _vertical(limits, 24, height - bottom)
    layers = max(map(len, series.values()))
    x = Scale(0, max(layers - 1, 1), left, width - 6)
    parts = [words(0, 11, title, "name"), *_frame(x, y, width - 6, height - bottom)]
    told = []
    for when, values in series.items():
        points = [(i, v) for i, v in enumerate(values) if math.isfinite(v)]
        if not points:
            continue
        places = [(x.at(i), y.at(v)) for i, v in points]
        parts.append(path(places, f"curve {when}"))
        for (a, b), (i, v) in zip(places, points, strict=True):
            parts.append(dot(a, b, 3.5, "hover", f"layer {i}, {when}: {v:.3g}"))
        told.append(f"{when} {min(v for _, v in points):.3g} to {max(v for _, v in points):.3g}")
    return svg(width, height, f"{title}, {unit} by layer: {'; '.join(told)}", parts)


def _points(history: list[dict[str, Any]], key: str) -> Points:
    return [(h["step"], h[key]) for h in history if key in h and math.isfinite(h[key])]


def _vertical(values: Sequence[Number], top: Number, bottom: Number) -> Scale:
    """From low below to high above, a little wider than the values."""
    values = [v for v in values if math.isfinite(v)] or [0.0, 1.0]
    low, high = min(values), max(values)
    if wide_span(values):
        return Scale(low / 1.2, high * 1.2, bottom, top, log=True)
    margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return Scale(max(low - margin, 0) if low >= 0 else low - margin, high + margin, bottom, top)


def _frame(x: Scale, y: Scale, right: Number, bottom: Number) -> list[str]:
    """Faint lines at round values, and the values beside them."""
    parts, last = [], math.inf
    for tick in y.ticks:
        at = y.at(tick)
        if last - at >= 16:
            parts += [line(x.start, at, right, at, "grid")]
            parts += [words(x.start - 6, at + 4, number(tick), "tick", "end")]
            last = at
    last = -math.inf
    for tick in x.ticks:
        if tick == round(tick) and x.at(tick) - last >= 28:
            parts.append(words(x.at(tick), bottom + 16, f"{tick:.0f}", "tick", "middle"))
            last = x.at(tick)
    return parts
