"""What is kept in a run folder as JSON, read and written; no JAX is needed for it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qrot.errors import InputError
from qrot.files.plain import read_json, readable, short, shown
from qrot.files.whole import write_text
from qrot.run.contents import Anatomy, KeptScores, Results
from qrot.run.contents_verdicts import BeforeFile, GateFile, RefreshFile
from qrot.run.explain import build

# Files of a run folder.
RESULTS = "results.json"  # the protocol, the environment, and a row for each method and seed
METRICS = "metrics.jsonl"  # a line for each step of learning
ANATOMY = "anatomy.json"  # what the activations look like
GATE = "gate.json"  # how far the kept network is from full precision, and what is above its limit
GATE_XML = "gate.xml"  # the same for a CI system
ALIGNED = "aligned.safetensors"  # the rotations of the parent, aligned with these weights
BEFORE = "before.json"  # beside rotations: what a refresh has measured of the weights they fit
REFRESH = "refresh.json"  # how far the weights of the parent have moved, and what follows

# Methods that others are measured against: on no grid, on it as it is, and with a random rotation,
# whose loss is the gap to close.
FULL_PRECISION = "full_precision"
NO_ROTATION = "no_rotation"
RANDOM = "random_hadamard"

_LEARNED = ("objective", "steps", "trained_weight_bits")  # of a row that has an optimiser


def row_name(method: str, seed: int | None) -> str:
    """The name of a row of results, such as "learned, seed 0"."""
    return method.replace("_", " ") + ("" if seed is None else f", seed {seed}")


def learned_file(folder: Path, row: Mapping[str, Any]) -> Path | None:
    """The rotation file of a row that was learned in a run folder; None where the row names none.

    Raises:
        InputError: where the row names a file elsewhere.
    """
    own = Path(row.get("rotations", ""))
    if own.is_absolute() or ".." in own.parts:
        raise InputError(f"{folder / RESULTS}: rotations: {short(str(own))} is not in the folder")
    return folder / own if own.name else None


def read_results(path: Path) -> dict[str, Any] | None:
    """The contents of results.json.

    Args:
        path: of the file.

    Returns:
        What is in it; None where there is no file.

    Raises:
        InputError: with file and key, where it is damaged.
    """
    found = _read(path, Results)
    if found is not None:
        try:
            _check_rows(found)
        except InputError as error:
            raise _damaged(path, error) from error
    return found


def _read(path: Path, kind: type) -> dict[str, Any] | None:
    """A JSON file whose contents are of this kind; None where there is none."""
    with readable(path):
        if not path.exists():
            return None
    try:
        found = read_json(path)
        build(kind, found)
    except InputError as error:
        raise _damaged(path, error) from error
    return found


def _damaged(path: Path, error: InputError) -> InputError:
    reason = str(error).removeprefix(f"{path}: ")
    return InputError(f"{path}: damaged ({reason}); delete it to measure again")


def _check_rows(results: dict[str, Any]) -> None:
    """Raise InputError where a row lacks what goes with something else that is there."""
    rows, tasks = results["rows"], results.get("zeroshot", {}).get("tasks", {})
    other = "other_text" in results["protocol"] or any("other_nll" in row for row in rows)
    other = other or any("other_perplexity" in row for row in rows)
    for i, row in enumerate(rows):
        needed = list(_LEARNED) if "optimiser" in row else []
        needed += ["other_nll", "other_perplexity"] if other else []
        needed += ["weight_method"] if "weight_seconds" in row else []
        _check_keys(row, needed, f"rows.{i}")
        for name, task in tasks.items():
            scores = row.get("zeroshot", {}).get(name, {})
            _check_keys(scores, _scores(task["kind"]), f"rows.{i}.zeroshot.{shown(name)}")


def _check_keys(section: dict[str, Any], needed: Sequence[str], where: str) -> None:
    for key in needed:
        if key not in section or (section[key] is None and not key.endswith("_stderr")):
            raise InputError(f"{where}.{key}: this key is needed")


def _scores(kind: str) -> list[str]:
    """The scores that a task of this kind has, each with its error."""
    names = ("acc", *{"choices": ("acc_norm",), "continuation": ("perplexity",)}.get(kind, ()))
    return [name + end for name in names for end in ("", "_stderr")]


def read_anatomy(path: Path) -> dict[str, Any] | None:
    """The contents of anatomy.json; as `read_results`."""
    return _read(path, Anatomy)


def read_gate(path: Path) -> dict[str, Any] | None:
    """The contents of gate.json; as `read_results`."""
    return _read(path, GateFile)


def read_before(path: Path) -> dict[str, Any] | None:
    """The contents of before.json; as `read_results`."""
    return _read(path, BeforeFile)


def read_refresh(path: Path) -> dict[str, Any] | None:
    """The contents of refresh.json; as `read_results`."""
    return _read(path, RefreshFile)


def read_scores(path: Path) -> dict[str, Any] | None:
    """The scores that `qrot.run.zeroshot` keeps while a row is judged; as `read_results`."""
    return _read(path, KeptScores)


def write_results(path: Path, results: dict[str, Any]) -> None:
    """Replace results.json at once, so that a reader or a kill never meets half of it.

    Args:
        path: of the file.
        results: plain values.

    Raises:
        OSError: where it cannot be written.
    """
    write_text(path, json.dumps(results, indent=2) + "\n")
