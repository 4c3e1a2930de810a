"""What each step of learning was: metrics.jsonl, a line a step. Needs no JAX."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qrot.files import write_text


def load_history(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def append(path: Path, metrics: dict[str, Any]) -> None:
    """Add a line."""
    with path.open("a") as file:
        file.write(json.dumps(metrics) + "\n")


def forget_after(path: Path, step: int) -> None:
    """Drop the lines of later steps, and a line cut off by a kill.

    Args:
        path: of the file, if there is one.
        step: that learning goes on from; 0 where it begins, for which nothing stays.
    """
    if not path.exists():
        return
    lines = []
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n") and json.loads(line)["step"] <= step and step > 0:
            lines.append(line)
    write_text(path, "".join(lines))
