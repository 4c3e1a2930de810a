"""What tables are made of: rows by method, and text cells in Markdown."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any


def by_method(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The rows of each method, in order."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["method"], []).append(row)
    return found


def is_learned(row: dict[str, Any]) -> bool:
    """Whether what a row judges was learned in its run."""
    return "optimiser" in row


def markdown_table(
    columns: Sequence[str], lines: Iterable[Sequence[str]], words: Collection[str]
) -> str:
    """A table in Markdown.

    Args:
        columns: their names.
        lines: cells under them.
        words: names of columns that hold no numbers.
    """
    rule = ["---" if name in words else "---:" for name in columns]
    return "\n".join(f"| {' | '.join(line)} |" for line in [columns, rule, *lines]) + "\n"
