"""How far other weights have moved the outliers, as a table for a terminal and in the report."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from qrot.report import page
from qrot.report.anatomy import heat_pictures, place_name

COLUMNS = ("site", "moved, mean", "moved, most", "cost before", "cost now", "aligned")
_WORDS = ("site",)
_DECISIONS = {
    "keep": "the old rotations are kept, {}",
    "warm": "learning goes on from the old rotations, {}",
    "relearn": "rotations are learned from scratch",
}
_NOTE = (
    "Moved: the distance of Hellinger between the shares that the channels of a site have in its "
    "energy, by layer, 0 for the same ones, 1 for other ones. Cost: nats a token that rounding the "
    "site is expected to cost under the old rotations, with the old weights, with the new ones, "
    "and there once the rotations are aligned: turned by what takes the new activations closest "
    "to the old ones."
)


def refresh_cells(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """A line of text cells for each site, under `COLUMNS`.

    Args:
        found: the contents of refresh.json.
    """
    return [
        (
            name,
            f"{np.mean(site['distance']):.3f}",
            f"{max(site['distance']):.3f}",
            f"{site['cost']['before']:.3g}",
            f"{site['cost']['after']:.3g}",
            f"{site['cost']['aligned']:.3g}",
        )
        for name, site in found["moved"]["sites"].items()
    ]


def refresh_title(found: dict[str, Any]) -> str:
    """What was measured of the old rotations, and what follows.

    Args:
        found: the contents of refresh.json.
    """
    kl, settings = found["moved"]["kl"], found["settings"]

    def on(when: str) -> str:
        times = f" ({kl[when] / kl['before']:.2f} times)" if kl["before"] > 0 else ""
        return f"{kl[when]:.4g}{times}"

    which = "aligned" if kl["aligned"] < settings["align"] * kl["after"] else "as they are"
    return (
        f"Divergence under the old rotations, nats a token: {kl['before']:.4g} on the old weights, "
        f"{on('after')} on the new ones, {on('aligned')} there once aligned. They are kept "
        f"where it changed by {settings['keep']:g} times or less, and learned from scratch from "
        f"{settings['relearn']:g} times on: {_DECISIONS[found['decision']].format(which)}."
    )


def refresh_table(found: dict[str, Any]) -> Table:
    """The sites as a table for a terminal.

    Args:
        found: the contents of refresh.json.
    """
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in COLUMNS:
        drawn.add_column(name, justify="left" if name in _WORDS else "right")
    for line in refresh_cells(found):
        drawn.add_row(*line)
    return drawn


def refresh_section(found: dict[str, Any]) -> str:
    """The section of the report, with the channels before and after, as HTML.

    Args:
        found: the contents of refresh.json.
    """
    of, picture = found["of"], found["moved"]["picture"]
    pictures = {
        "Before": np.array(picture["before"], float),
        "After": np.array(picture["after"], float),
    }
    caption = (
        f"{place_name(picture['site'])[0].upper()}{place_name(picture['site'])[1:]}, the site that "
        "moved most: layers down, channels across, each cell the largest |x| of those that it "
        "stands for."
    )
    size = (len(found["moved"]["sites"][picture["site"]]["distance"]), picture["channels"])
    where = f"Of the weights {of['difference']}. " if of["difference"] else ""
    return page.section(
        "Refreshed",
        page.note(refresh_title(found)),
        page.table(COLUMNS, refresh_cells(found), _WORDS),
        page.note(_NOTE),
        heat_pictures(pictures, size, caption, down="layers"),
        page.note(
            f"{where}From {of['parent']} ({of['row']}), weights {of['before']}, to weights "
            f"{of['after']}."
        ),
    )
