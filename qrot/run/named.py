"""Schemes and grids by name, in place of their sections: `scheme: NVFP4`, `weights: MXFP4`."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

from qrot.errors import InputError
from qrot.files.plain import shown
from qrot.grid import GRIDS, Grid

# What W4A4KV4 and the like stand for, but for their bits.
_WEIGHTS = {"kind": "symmetric", "granularity": "channel", "clip": "mse"}
_OTHERS = {"kind": "asymmetric"}
_ROLES = ("weights", "activations", "keys", "values")
_NAME = re.compile(
    r"(?:W(?P<weights>\w+?)A(?P<activations>\d+)|(?P<both>\D\w*?\d)(?P<alone>A16)?)(?:KV(?P<cache>\w+))?",
    re.IGNORECASE,
)


def expanded(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings with the sections that names in `scheme` stand for.

    Raises:
        InputError: where a name is not known.
    """
    scheme = settings.get("scheme")
    if isinstance(scheme, str):
        scheme = _scheme(scheme)
    if isinstance(scheme, dict):
        sections = {
            role: _named(grid, f"scheme.{role}") if isinstance(grid, str) else grid
            for role, grid in scheme.items()
        }
        return {**settings, "scheme": sections}
    return settings


def _scheme(name: str) -> dict[str, Any]:
    match = _NAME.fullmatch(name)
    if match is None:
        raise _unknown("scheme", name, "W4A4KV4, NVFP4, MXFP4A16 or FP8KV8")
    both, cache = match["both"], match["cache"]
    activations = match["activations"] or (None if match["alone"] else both)
    parts = (match["weights"] or both, activations, cache, cache)
    return {
        role: _grid(part, role, "scheme")
        for role, part in zip(_ROLES, parts, strict=True)
        if part is not None
    }


def _grid(name: str, role: str, key: str) -> dict[str, Any]:
    """Settings of a grid: of so many bits, or of `GRIDS`."""
    if name.isdecimal() and len(name) <= 2:
        return {"bits": int(name), **(_WEIGHTS if role == "weights" else _OTHERS)}
    return _named(name, key)


def _named(name: str, key: str) -> dict[str, Any]:
    grid = GRIDS.get(name.upper())
    if grid is None:
        raise _unknown(key, name, ", ".join(GRIDS))
    plain = asdict(Grid())
    return {key: x for key, x in asdict(grid).items() if x != plain[key]}


def _unknown(key: str, name: str, known: str) -> InputError:
    return InputError(f"{key}: {shown(name)} is no name such as {known}")
