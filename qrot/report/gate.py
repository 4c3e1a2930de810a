"""The verdict of a run's gate, as a table for a terminal and as a section of the report."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from qrot.report import page
from qrot.run.verdict import failures, short_name

COLUMNS = ("limit", "", "value", "at most", "on")
_WORDS = ("limit", "", "on")
_VERDICTS = {True: "passed", False: "FAILED"}


def gate_cells(gate: dict[str, Any]) -> list[tuple[str, ...]]:
    """A line of text cells for each limit on each text, under `COLUMNS`.

    Args:
        gate: the contents of gate.json.
    """
    return [
        (
            line["name"],
            _VERDICTS[line["passed"]],
            _value(line),
            f"{line['limit']:.4g}",
            short_name(line["text"]),
        )
        for line in gate["limits"]
    ]


def _value(line: dict[str, Any]) -> str:
    """With its interval, or the site that it is of."""
    text = f"{line['value']:.4g}"
    if line.get("interval"):
        low, high = line["interval"]
        text += f" [{low:.3g}, {high:.3g}]"
    return f"{text} ({line['site']})" if line.get("site") else text


def gate_title(gate: dict[str, Any]) -> str:
    """Whether the gate passed, and what it judged."""
    row, count = gate["of"]["row"], len(gate["limits"])
    if gate["passed"]:
        return f"Gate passed: {row} is within {'its limit' if count == 1 else 'all limits'}."
    return f"Gate FAILED: {row} is above {len(failures(gate['limits']))} of {count} limits."


def gate_table(gate: dict[str, Any]) -> Table:
    """The limits as a table for a terminal."""
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in COLUMNS:
        fold = name == COLUMNS[-1]
        justify = "left" if name in _WORDS else "right"
        drawn.add_column(name, justify=justify, no_wrap=not fold, overflow="fold")
    for line in gate_cells(gate):
        style = "bold red" if line[1] == _VERDICTS[False] else ""
        drawn.add_row(*(Text(cell, style=style) for cell in line))
    return drawn


def gate_section(gate: dict[str, Any]) -> str:
    """The section of the report, its verdict above the table, as HTML."""
    of, words = gate["of"], failures(gate["limits"])
    told = f"Of {of['network']}, sha256 {of['digest']}, of the model {of['fingerprint']}."
    if any(line.get("interval") for line in gate["limits"]):
        told += " In brackets: 95 %."
    return page.section(
        "Gate",
        page.verdict(gate["passed"], gate_title(gate)),
        *(page.note(f"{sentence[0].upper()}{sentence[1:]}.") for sentence in words),
        page.table(COLUMNS, gate_cells(gate), _WORDS),
        page.note(told),
    )
