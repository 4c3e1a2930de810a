"""Figures of rows under one another: perplexity, differences, seconds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from qrot.report.results import spread
from qrot.report.svg import (
    LETTER,
    NARROW,
    Number,
    Scale,
    dot,
    line,
    number,
    rect,
    shortened,
    svg,
    wide_span,
    words,
)
from qrot.study.compare import Difference

BAR = 14
SEED = 3.6  # radius of a dot


@dataclass(frozen=True)
class Bar:
    """What has one bar: a value for each seed, None for what has no seed."""

    name: str
    values: dict[int | None, Number]
    kind: Literal["plain", "full", "best"] = "plain"

    @property
    def finite(self) -> list[Number]:
        """The values that can be drawn."""
        return [x for x in self.values.values() if math.isfinite(x)]

    @property
    def deviation(self) -> Number:
        """The sample standard deviation; 0 of one value."""
        return statistics.stdev(self.finite) if len(self.finite) > 1 else 0

    @property
    def words(self) -> str:
        """Mean and spread, as in the tables."""
        broken = len(self.finite) < len(self.values)
        return "not finite" if broken else spread(self.finite)


@dataclass(frozen=True)
class Rows:
    """Where rows stand: names on the left, or above on a phone; a column of numbers right."""

    width: Number
    names: Sequence[str]
    numbers: Number  # width of that column

    @property
    def phone(self) -> bool:
        """Whether names stand above their bars."""
        return self.width <= NARROW

    @property
    def left(self) -> Number:
        """Where bars begin."""
        longest = LETTER * max(map(len, self.names)) + 20
        return 2.0 if self.phone else min(max(longest, 140.0), 290.0)

    @property
    def right(self) -> Number:
        """Where bars end."""
        return self.width - 4 if self.phone else self.width - self.numbers - 16

    @property
    def height(self) -> Number:
        """Of all rows."""
        return len(self.names) * self.step

    @property
    def step(self) -> Number:
        """From one row to the next."""
        return 48.0 if self.phone else 36.0

    def middle(self, row: int) -> Number:
        """Of a row's bar, from the top."""
        return row * self.step + (32 if self.phone else 18)

    def heads(self, row: int, value: str) -> list[str]:
        """The name and the number of a row."""
        base = self.middle(row) - 15 if self.phone else self.middle(row) + 4.5
        name_width = self.width - self.numbers if self.phone else self.left - 14
        return [
            words(0, base, shortened(self.names[row], name_width), "name"),
            words(self.width, base, value, "value", "end"),
        ]

    def axis(self, scale: Scale, unit: str) -> list[str]:
        """Faint lines at round values, the values below them, and what they are."""
        end, out, last = self.height + 4, [], -math.inf
        for tick in scale.ticks:
            x, label = scale.at(tick), number(tick)
            out.append(line(x, 0, x, end, "grid"))
            half = 3.4 * len(label) + 4
            if x - half > last and x + half < self.width + 8:
                out.append(words(x, end + 15, label, "tick", "middle"))
                last = x + half
        return [*out, words(self.left, end + 33, unit, "tick")]


def logarithmic(bars: Sequence[Bar]) -> bool:
    """Whether the bars are drawn on a logarithmic scale."""
    every = [x for bar in bars for x in bar.finite]
    return bool(every) and wide_span(every)


def caption(bars: Sequence[Bar]) -> str:
    """How to read `perplexity` of these bars."""
    told = ["Bars: means."]
    if any(len(bar.values) > 1 for bar in bars):
        told.append("Dots: seeds. Whiskers: one standard deviation to either side.")
    if any(bar.kind == "full" for bar in bars):
        told.append("Dashed: full precision.")
        if logarithmic(bars):
            told.append("Bars begin there, and are as long as the nats lost.")
    elif logarithmic(bars):
        told.append("On this scale a bar's end counts, not its length.")
    return " ".join(told)


def perplexity(bars: Sequence[Bar], width: Number, unit: str = "perplexity") -> str:
    """A bar for the mean, a dot for each seed, a line of a standard deviation to either side.

    From zero; where values are more than `SPAN` times apart, on a logarithmic scale from full
    precision, so that a bar is as long as what is lost in nats.

    Args:
        bars: one a row.
        width: of the picture.
        unit: of the values.

    Returns:
        The picture as SVG.
    """
    every = [x for bar in bars for x in bar.finite]
    rows, log = Rows(width, [bar.name for bar in bars], 118), logarithmic(bars)
    reach = max(
        [*every, *(statistics.fmean(b.finite) + b.deviation for b in bars if b.finite)] or [1]
    )
    full = next((bar.finite[0] for bar in bars if bar.kind == "full" and bar.finite), None)
    low = 0.8 * min(every) if log else 0.0
    scale = Scale(low, 1.02 * reach, rows.left, rows.right, log)
    origin = scale.at(full if log and full is not None else scale.low)
    parts = rows.axis(scale, unit + (", logarithmic scale" if log else ""))
    if full is not None:
        parts.append(line(scale.at(full), 0, scale.at(full), rows.height + 4, "reference"))
    for i, bar in enumerate(bars):
        y, values = rows.middle(i), bar.finite
        mean = statistics.fmean(values) if values else math.inf
        label = bar.words
        parts += rows.heads(i, label)
        end = scale.at(mean) if values else rows.right
        kind = f"bar {bar.kind}" + (" broken" if len(values) < len(bar.values) else "")
        start, end = min(origin, end), max(origin, end, min(origin, end) + 2)
        parts.append(rect(start, y - BAR / 2, end - start, BAR, kind, f"{bar.name}: {label}"))
        if len(values) > 1:
            half = bar.deviation
            parts += whisker(scale.at(mean - half), scale.at(mean + half), y)
            for seed, value in bar.values.items():
                if math.isfinite(value):
                    tip = f"{bar.name}, seed {seed}: {value:,.2f}"
                    parts.append(dot(scale.at(value), y, SEED, "seed", tip))
    label = "; ".join(f"{bar.name} {bar.words}" for bar in bars)
    return svg(width, rows.height + 42, f"{unit} by method: {label}", parts)


def whisker(low: Number, high: Number, y: Number) -> list[str]:
    """A spread or an interval."""
    ends = [line(x, y - 4, x, y + 4, "whisker") for x in (low, high)]
    return [line(low - 1, y, high + 1, y, "halo"), line(low, y, high, y, "whisker"), *ends]


def differences(found: Sequence[tuple[str, Difference | None]], width: Number) -> str:
    """Nats above the reference with their intervals.

    Args:
        found: the name of each row and its difference; None for the reference itself.
        width: of the picture.

    Returns:
        The picture as SVG.
    """
    reach = [0.0]
    for _, one in found:
        if one is not None:
            reach += [one.mean, *(one.interval or ())]
    reach = [x for x in reach if math.isfinite(x)]
    rows = Rows(width, [name for name, _ in found], 190)
    margin = 0.04 * (max(reach) - min(reach)) or 1.0
    scale = Scale(min(reach) - margin, max(reach) + margin, rows.left, rows.right)
    parts = rows.axis(scale, "nats a token above the reference; left is better")
    parts.append(line(scale.at(0), 0, scale.at(0), rows.height + 4, "zero"))
    told = []
    for i, (name, one) in enumerate(found):
        y = rows.middle(i)
        if one is None:
            parts += rows.heads(i, "reference")
            continue
        value = f"{one.mean:+.3f}"
        if one.interval is not None:
            value += f" ({one.interval[0]:+.3f} to {one.interval[1]:+.3f})"
        told.append(f"{name} {value}, {one.verdict}")
        parts += rows.heads(i, value)
        start, end = sorted((scale.at(0), scale.at(one.mean)))
        sure = one.verdict in ("better", "worse", "equal")
        kind = f"bar {'best' if one.verdict == 'better' else 'plain'}{'' if sure else ' unsure'}"
        tip = f"{name}: {value}, {one.verdict}"
        parts.append(rect(start, y - BAR / 2, end - start, BAR, kind, tip))
        if one.interval is not None:
            parts += whisker(scale.at(one.interval[0]), scale.at(one.interval[1]), y)
    label = "Nats above the reference: " + "; ".join(told)
    return svg(width, rows.height + 42, label, parts)


def seconds(found: Sequence[tuple[str, dict[str, Number]]], width: Number) -> str:
    """Seconds a seed of each method, and what they went into.

    Args:
        found: the name of each method, and its seconds by part from the left.
        width: of the picture.

    Returns:
        The picture as SVG.
    """
    rows = Rows(width, [name for name, _ in found], 90)
    longest = max(sum(parts.values()) for _, parts in found)
    scale = Scale(0, longest * 1.02 or 1.0, rows.left, rows.right)
    drawn, told = rows.axis(scale, "seconds a seed"), []
    for i, (name, parts) in enumerate(found):
        y, before, total = rows.middle(i), 0.0, sum(parts.values())
        drawn += rows.heads(i, f"{total:,.0f} s")
        for part, spent in parts.items():
            x, end = scale.at(before), scale.at(before + spent)
            tip = f"{name}, {part}: {spent:,.1f} s"
            drawn.append(rect(x, y - BAR / 2, max(end - x - 1, 0.6), BAR, f"bar {part}", tip))
            before += spent
        told.append(f"{name} {total:,.0f} s")
    return svg(width, rows.height + 42, f"Seconds a seed: {'; '.join(told)}", drawn)
