"""What each step of learning was: metrics.jsonl, a line a step. Needs no JAX."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from qrot.errors import InputError
from qrot.files.plain import MOST_JSON, parse_json, read_bytes, short, shown
from qrot.files.whole import write_text

_MOST_STEPS = 10**9
_LARGEST = 1e39  # more than a number of 32 bits; what is larger is not finite there


def load_history(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl: each has the number of its step, a message where learning was
    rolled back, and other numbers, which are not finite where it diverged.

    Raises:
        InputError: with the path and the line, where one is damaged.
    """
    lines = read_bytes(path, MOST_JSON).splitlines()
    return [_parsed(path, i, line) for i, line in enumerate(lines, 1)]


def seconds(path: Path) -> float:
    """What the steps in a metrics.jsonl took; 0 where there is none, or a kill cut off its end."""
    if not path.exists() or not read_bytes(path, MOST_JSON).endswith(b"\n"):
        return 0.0
    return sum(line.get("seconds", 0.0) for line in load_history(path))


def _parsed(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        values = parse_json(line)
        if not isinstance(values, dict) or type(step := values.get("step")) is not int:
            raise InputError("not of a step")
        if not 0 <= step <= _MOST_STEPS:
            raise InputError(f"there is no step {short(step)}")
        for key, value in values.items():
            _check(key, value)
    except InputError as error:
        raise InputError(f"{path}: damaged (line {number}: {error})") from error
    return values


def _check(key: str, value: Any) -> None:
    if key == "message":
        if not isinstance(value, str):
            raise InputError(f"message: expected a text, not {short(value)}")
    elif isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{shown(key)}: expected a number, not {short(value)}")
    elif _LARGEST < abs(value) < math.inf:
        raise InputError(f"{shown(key)}: {short(value)} is too large")
    elif key == "seconds" and not 0 <= value <= _LARGEST:
        raise InputError(f"seconds: {value} are none")


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
    for i, line in enumerate(read_bytes(path, MOST_JSON).splitlines(keepends=True), 1):
        if step > 0 and line.endswith(b"\n") and _parsed(path, i, line)["step"] <= step:
            lines.append(line.decode())
    write_text(path, "".join(lines))
