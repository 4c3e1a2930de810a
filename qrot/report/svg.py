"""Scales, ticks and the few shapes that the figures are made of, as SVG text.

Every figure is drawn at two widths, for a desk and for a phone, and the style sheet shows one:
text that is scaled with a picture cannot be read on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

Number = float | int
WIDE, NARROW = 820, 350
SPAN = 30.0  # largest by smallest value from which on a scale is logarithmic
LETTER = 6.6  # mean width of one at 12 px
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Scale:
    """Values from low to high, on a line from start to stop in pixels."""

    low: Number
    high: Number
    start: Number
    stop: Number
    log: bool = False

    def at(self, value: Number) -> Number:
        """The place of a value; beyond an end, that end."""
        of = _log if self.log else float
        low, high = of(self.low), of(self.high)
        share = (of(value) - low) / (high - low) if high > low else 0.5
        return self.start + min(max(share, 0.0), 1.0) * (self.stop - self.start)

    @property
    def ticks(self) -> list[Number]:
        """A handful of round values."""
        return log_ticks(self.low, self.high) if self.log else ticks(self.low, self.high)


def wide_span(values: Iterable[Number]) -> bool:
    """Whether values are so far apart that only a logarithmic scale shows them all."""
    values = list(values)
    return min(values) > 0 and max(values) > SPAN * min(values)


def ticks(low: Number, high: Number) -> list[Number]:
    """Multiples of 1, 2 or 5 times a power of ten, about five of them."""
    if not high > low:
        return [low]
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def log_ticks(low: Number, high: Number) -> list[Number]:
    """Powers of ten, at most six; with 2 and 5 times them where there are less than three."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    inside = [10.0**p for p in powers if low <= 10.0**p <= high]
    if len(inside) < 3:
        return [m * 10.0**p for p in powers for m in (1, 2, 5) if low <= m * 10.0**p <= high]
    return inside[:: math.ceil(len(inside) / 6)]


def number(x: Number) -> str:
    """A number for an axis or a label: three or four digits, thousands set apart."""
    if not math.isfinite(x):
        return "not finite"
    if x and not 1e-4 <= abs(x) < 1e7:
        digits, power = f"{x:.1e}".split("e")
        return f"{float(digits):g}·10{str(int(power)).translate(_SUPERSCRIPT)}"
    if abs(x) >= 1000:
        return f"{x:,.0f}"
    return f"{x:.4g}"


def svg(width: Number, height: Number, label: str, parts: Iterable[str]) -> str:
    """A picture as wide as its place, with words for those who do not see it."""
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(label)}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )


def both(draw: Callable[[Number], str]) -> str:
    """A figure at both widths."""
    return f'<div class="wide">{draw(WIDE)}</div><div class="narrow">{draw(NARROW)}</div>'


def words(x: Number, y: Number, text: str, kind: str = "", anchor: str = "start") -> str:
    """Text whose base line starts, ends or has its middle at (x, y)."""
    style = f' class="{kind}"' if kind else ""
    place = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x:.4g}" y="{y:.4g}"{style}{place}>{escape(text)}</text>'


def line(x1: Number, y1: Number, x2: Number, y2: Number, kind: str) -> str:
    """A straight line."""
    return f'<path class="{kind}" d="M{x1:.5g} {y1:.5g}L{x2:.5g} {y2:.5g}"/>'


def path(points: Sequence[tuple[Number, Number]], kind: str) -> str:
    """A line through points."""
    return f'<path class="{kind}" d="M{"L".join(f"{x:.5g} {y:.5g}" for x, y in points)}"/>'


def rect(x: Number, y: Number, width: Number, height: Number, kind: str, tip: str = "") -> str:
    """A rectangle with a tooltip."""
    return (
        f'<rect class="{kind}" x="{x:.5g}" y="{y:.5g}" width="{max(width, 0):.5g}" '
        f'height="{height:.5g}">{_tip(tip)}</rect>'
    )


def dot(x: Number, y: Number, radius: Number, kind: str, tip: str = "") -> str:
    """A circle with a tooltip."""
    return f'<circle class="{kind}" cx="{x:.5g}" cy="{y:.5g}" r="{radius:g}">{_tip(tip)}</circle>'


def shortened(text: str, width: Number) -> str:
    """Text that fits into a width, its end cut off if need be."""
    most = int(width / LETTER)
    return text if len(text) <= most else text[: most - 1] + "…"


def apart(places: Sequence[Number], least: Number) -> list[Number]:
    """Places of labels, moved down where they would be closer than `least`; order is kept."""
    order, moved, last = sorted(range(len(places)), key=places.__getitem__), list(places), -math.inf
    for i in order:
        last = moved[i] = max(places[i], last + least)
    return moved


def _tip(text: str) -> str:
    return f"<title>{escape(text)}</title>" if text else ""


def _log(x: Number) -> Number:
    return math.log(max(x, 1e-300))
