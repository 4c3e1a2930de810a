"""Pictures of mixed bits, for a terminal: a layer a column, a projection a line."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from qrot.run.results import row_name

_WIDTH = 60  # layers in a line
_COLOURS = ("grey70", "sky_blue1", "green3", "yellow3", "orange1", "red3")  # few bits to many


def bits_maps(results: dict[str, Any]) -> list[Group]:
    """A picture of the bits of each row that has mixed ones.

    Args:
        results: the contents of results.json.
    """
    return [
        drawn for row in results["rows"] if "mixed" in row for drawn in _maps(row, row["mixed"])
    ]


def _maps(row: dict[str, Any], mixed: dict[str, Any]) -> list[Group]:
    bits: dict[str, list[str]] = {name: text.split() for name, text in mixed["bits"].items()}
    layers = max(map(len, bits.values()))
    names = sorted({b for column in bits.values() for b in column}, key=int)
    colours = dict(zip(names, _COLOURS, strict=False))
    width = max(len(b) for b in names)
    name, maps = row_name(row["method"], row["seed"]), []
    for start in range(0, layers, _WIDTH // width):
        stop = min(start + _WIDTH // width, layers)
        title = f"{name}: bits of the weights in layers {start} to {stop - 1}"
        drawn = Table(box=None, show_header=False, pad_edge=False)
        for projection, column in bits.items():
            cells = [
                (b.rjust(width), f"black on {colours.get(b, _COLOURS[-1])}")
                for b in column[start:stop]
            ]
            drawn.add_row(projection, Text.assemble(*cells))
        maps.append(Group(title, drawn))  # a title of the table's own would wrap at its width
    return maps
