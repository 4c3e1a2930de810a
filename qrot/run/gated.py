"""What a run's gate has found, put to what is exported of the run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from qrot.errors import InputError
from qrot.export.format import Options
from qrot.export.source import Source
from qrot.files.plain import read_yaml, readable
from qrot.identity import digest
from qrot.run.results import GATE, read_gate
from qrot.run.verdict import failures

_TOLD = ("name", "text", "limit", "value", "passed")


def gated(source: Source, options: Options, *, ungated: bool = False) -> Source:
    """A source that says what the gate of its run has found, as `gate` in its `about`.

    That has `passed` (null where nothing was measured), `row`, `limits` and `ungated`: whether it
    is exported against the gate, and then `reason`. Where there is no gate it is absent.

    Args:
        source: what is to be exported.
        options: what else is asked for.
        ungated: whether it is exported though the gate is against it.

    Raises:
        InputError: where the gate failed, was not measured yet, or passed something else, and
            `ungated` is not given.
    """
    about = {key: value for key, value in source.about.items() if key != "gate"}
    folder = _run_folder(Path(source.about["file"]))
    if folder is None:
        return replace(source, about=about)
    found = read_gate(folder / GATE)
    reason = _reason(folder, found, source, options)
    if reason is not None and not ungated:
        raise InputError(f"{folder}: {reason}; --ungated exports it all the same")
    told: dict[str, Any] = {"passed": None, "row": None, "limits": []}
    if found is not None:
        limits = [{key: line[key] for key in _TOLD} for line in found["limits"]]
        told = {"passed": found["passed"], "row": found["of"]["row"], "limits": limits}
    told |= {"ungated": reason is not None} | ({"reason": reason} if reason else {})
    return replace(source, about={**about, "gate": told})


def _run_folder(file: Path) -> Path | None:
    """The run folder with a gate that a file lies in; None where there is none."""
    # The run's own, or one in it for each seed, or for the kept networks.
    return next((folder for folder in file.resolve().parents[:2] if _has_gate(folder)), None)


def _has_gate(folder: Path) -> bool:
    config = folder / "config.yaml"
    with readable(folder):
        if (folder / GATE).exists():
            return True
        there = config.is_file()
    settings = read_yaml(config) if there else None
    return isinstance(settings, dict) and settings.get("gate") is not None


def _reason(
    folder: Path, found: dict[str, Any] | None, source: Source, options: Options
) -> str | None:
    """What the gate has against an export; None for nothing."""
    if found is None:
        return f"has a gate that was not measured yet (`qrot gate {folder}` does)"
    if not found["passed"]:
        return f"its gate failed ({'; '.join(failures(found['limits']))})"
    of, file = found["of"], Path(source.about["file"])
    if source.network is not None and digest([file]) != of["digest"]:
        return f"its gate passed {of['row']} in {of['network']}, which {file.name} is not"
    if source.network is None and source.about.get("row") != of["row"]:
        return f"its gate passed {of['row']}, not {source.about.get('row')}"
    asked = {
        "--scheme": options.scheme,
        "--weights": options.weights,
        "--type": options.type,
    }
    other = [name for name, value in asked.items() if value is not None]
    if other:
        return f"its gate passed {of['network']}, and {' and '.join(other)} makes another network"
    return None
