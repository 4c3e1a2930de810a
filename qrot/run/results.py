"""What is kept in a run folder as JSON, read and written; no JAX is needed for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qrot.errors import InputError
from qrot.files import write_text

# Files of a run folder.
RESULTS = "results.json"  # the protocol, the environment, and a row for each method and seed
METRICS = "metrics.jsonl"  # a line for each step of learning
ANATOMY = "anatomy.json"  # what the activations look like

# Methods that others are measured against: on no grid, on it as it is, and with a random rotation,
# whose loss is the gap to close.
FULL_PRECISION = "full_precision"
NO_ROTATION = "no_rotation"
RANDOM = "random_hadamard"


def row_name(method: str, seed: int | None) -> str:
    """The name of a row of results, such as "learned, seed 0"."""
    return method.replace("_", " ") + ("" if seed is None else f", seed {seed}")


def read_results(path: Path) -> dict[str, Any] | None:
    """The contents of results.json or another file like it.

    Args:
        path: of the file.

    Returns:
        What is in it; None where there is no file.

    Raises:
        InputError: where it is damaged.
    """
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise InputError(f"{path}: damaged ({error}); delete it to measure again") from error


def write_results(path: Path, results: dict[str, Any]) -> None:
    """Replace results.json at once, so that a reader or a kill never meets half of it.

    Args:
        path: of the file.
        results: plain values.

    Raises:
        OSError: where it cannot be written.
    """
    write_text(path, json.dumps(results, indent=2) + "\n")
