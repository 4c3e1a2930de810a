"""The table of zero-shot scores that results.json makes, task by task."""

from __future__ import annotations

import json
import statistics
from itertools import groupby
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from qrot.report.tables import by_method, markdown_table

COLUMNS = ("task", "method", "seeds", "acc, %", "acc_norm, %", "perplexity")
_WORDS = ("task", "method")


def score_cells(results: dict[str, Any]) -> list[tuple[str, ...]]:
    """A line of text cells for each task and method, under `COLUMNS`, the seeds taken together."""
    lines = []
    for name in results.get("zeroshot", {}).get("tasks", {}):
        for method, group in by_method(results["rows"]).items():
            seeds = str(sum(row["seed"] is not None for row in group) or "")
            found = [row["zeroshot"][name] for row in group]
            cells = (
                _cell(found, "acc", 100, 1),
                _cell(found, "acc_norm", 100, 1),
                _cell(found, "perplexity", 1, 2),
            )
            lines.append((name, method.replace("_", " "), seeds, *cells))
    return lines


def _cell(found: list[dict[str, Any]], key: str, factor: int, digits: int) -> str:
    """The mean over seeds ± the standard error over rows, which more seeds do not make smaller."""
    if key not in found[0]:
        return ""
    mean = factor * statistics.fmean(scores[key] for scores in found)
    digits = 0 if mean >= 1000 else digits
    text = f"{mean:,.{digits}f}"
    errors = [scores[f"{key}_stderr"] for scores in found]
    if None not in errors:
        text += f" ± {factor * statistics.fmean(errors):,.{digits}f}"
    return text


def score_table(results: dict[str, Any]) -> Table:
    """The scores as a table for a terminal of 80 columns: a task is a line of its own."""
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in COLUMNS[1:]:
        drawn.add_column(name, justify="left" if name in _WORDS else "right", no_wrap=True)
    for name, lines in groupby(score_cells(results), lambda line: line[0]):
        drawn.add_row(Text(name, style="bold"))
        for line in lines:
            drawn.add_row(f"  {line[1]}", *line[2:])
    return drawn


def score_markdown(results: dict[str, Any]) -> str:
    """The scores as a table in Markdown, with their title."""
    return f"{score_title(results)}\n\n{markdown_table(COLUMNS, score_cells(results), _WORDS)}"


def score_title(results: dict[str, Any]) -> str:
    """The protocol in a few sentences."""
    p = results["zeroshot"]
    tasks = ", ".join(f"{name} ({task['rows']:,} rows)" for name, task in p["tasks"].items())
    between = ""
    if any(task["kind"] == "choices" for task in p["tasks"].values()):
        between = f" {json.dumps(p['separator'])} between query and choice; acc_norm by character."
    return (
        f"Zero-shot: {tasks}, {'with' if p['bos'] else 'no'} BOS.{between} Mean over seeds ± "
        "standard error over rows."
    )
