"""What the activations look like, from anatomy.json."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from qrot.report import page
from qrot.report.curves import by_layer
from qrot.report.heatmap import heat, scale_bar
from qrot.report.svg import Number
from qrot.sites import SITES


def anatomy_sections(found: dict[str, Any]) -> list[str]:
    """The sections on outliers, one activation, and rounding errors."""
    after = f"after: {found['after']}" if found["after"] else ""
    key = page.key([("before", "before"), *([("after", after)] if after else [])])
    crest = _panels(found, "crest", "max by rms")
    error = _panels(found, "error", "squared error")
    return [
        page.section("One activation", *_activation(found)),
        page.section(
            "Outliers by layer",
            key,
            crest,
            page.note(
                "The largest value of a token by its root mean square, the median over "
                f"{found['tokens']} tokens. 1 if all values are equal in size. Panels share a "
                "scale."
            ),
        )
        if crest
        else "",
        page.section(
            "Rounding error by layer",
            key,
            error,
            page.note(
                "||x - Q(x)||² / ||x||² of what is rounded, in the basis in which it is rounded, "
                "on the grids of this run and with the clip ratios that were learned. Where a few "
                "tokens are huge it is mostly theirs. Panels share a scale."
            ),
        )
        if error
        else "",
    ]


def place_name(place: str) -> str:
    """A site in words, or the residual stream, which is none."""
    site = SITES.get(place)
    if site is None:
        return "residual stream"
    return site.name if site.cached else f"input of {', '.join(site.readers)}"


def _panels(found: dict[str, Any], figure: str, unit: str) -> str:
    series = {
        name: site[figure]
        for name, site in found["sites"].items()
        if figure in site and any(v > 0 for values in site[figure].values() for v in values)
    }
    limits = [
        v
        for site in series.values()
        for values in site.values()
        for v in values
        if v > 0 and math.isfinite(v)
    ]
    if not limits:
        return ""
    return page.panels(by_layer(place_name(n), site, unit, limits) for n, site in series.items())


def _activation(found: dict[str, Any]) -> list[str]:
    one = found["activation"]
    names = {"before": "Before", "after": f"After: {found['after']}"}
    pictures = {names[w]: np.array(one[w], float) for w in ("before", "after") if w in one}
    caption = (
        f"Residual stream, {one['place']}, where the largest value of all layers is: tokens down, "
        "channels across, each cell the largest |x| of those that it stands for. Above: channels "
        "of the largest values, and what these are."
    )
    size = (found["tokens"], one["channels"])
    return [heat_pictures(pictures, size, caption, loud={names["before"]: one["loud"]})]


def heat_pictures(
    pictures: Mapping[str, Float[np.ndarray, "down channels"]],
    size: tuple[int, int],
    caption: str,
    *,
    down: str = "tokens",
    loud: Mapping[str, Sequence[Sequence[Number]]] | None = None,
) -> str:
    """Pictures of |x| side by side on one scale of colours.

    Args:
        pictures: by title, cells, each the largest |x| of what it stands for.
        size: what goes down, and channels, that the cells stand for.
        caption: of all of them.
        down: what goes down, in the plural.
        loud: by title, channels to name, and their largest |x|.

    Returns:
        The figure as HTML; nothing where no value can be drawn.
    """
    every = np.concatenate([cells.ravel() for cells in pictures.values()])
    top = float(every.max())
    if not (math.isfinite(top) and top > 0):
        return ""
    # A few cells of a hundred, first tokens above all, would take most of the colours.
    low, high = np.quantile(every, [0.02, 0.98])
    limits = (max(float(f"{low:.2g}"), 1e-4 * top), max(float(f"{high:.2g}"), 1e-4 * top))
    drawn = [
        f"<div><h3>{page.escape(title)}</h3>"
        + heat(cells, limits, title=title, size=size, down=down, loud=(loud or {}).get(title, ()))
        + "</div>"
        for title, cells in pictures.items()
    ]
    ramp = f'<div class="ramp">{scale_bar(limits)}</div>'
    return page.figure(page.panels(drawn, "pictures") + ramp, caption)
