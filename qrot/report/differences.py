"""Runs side by side, as tables."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from rich import box
from rich.table import Table

from qrot.report.results import spread
from qrot.report.tables import markdown_table
from qrot.study.compare import LEVEL, Group, difference

NOTE = (
    f"Nats a token above the reference, with the {LEVEL:.0%} interval that the spread over seeds "
    "gives: of the differences seed by seed where both rows have the same seeds (Student), else of "
    "the difference of the means (Welch). The text is the same for all and is not in it."
)
COLUMNS = ("row", "seeds", "perplexity", "nats above", f"{LEVEL:.0%} interval", "verdict")
WORDS = ("row", "verdict")


def lines(groups: Sequence[Group], base: Group) -> list[tuple[str, ...]]:
    """A line of text cells for each group.

    Args:
        groups: see `qrot.study.compare.grouped`.
        base: the one of them that the others are compared with.

    Returns:
        The lines, under `COLUMNS`.
    """
    out = []
    for group in groups:
        seeds = str(sum(seed is not None for seed in group.nll) or "")
        ppl = spread([row["perplexity"] for row in group.rows])
        if group is base:
            out.append((group.name, seeds, ppl, "", "", "reference"))
            continue
        found = difference(group, base)
        interval = ""
        if found.interval is not None:
            interval = f"{found.interval[0]:+.3f} to {found.interval[1]:+.3f}"
        out.append((group.name, seeds, ppl, f"{found.mean:+.3f}", interval, found.verdict))
    return out


def terminal(found: list[tuple[str, ...]]) -> Table:
    """The lines as a table for a terminal."""
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in COLUMNS:
        words = name in WORDS
        drawn.add_column(
            name, justify="left" if words else "right", no_wrap=not words, overflow="fold"
        )
    for line in found:
        drawn.add_row(*line)
    return drawn


def markdown(found: list[tuple[str, ...]]) -> str:
    """The lines as a table in Markdown."""
    return markdown_table(COLUMNS, found, WORDS)


def as_csv(found: list[tuple[str, ...]]) -> str:
    """The lines as comma-separated values."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([COLUMNS, *found])
    return text.getvalue()
