"""Rotation files: one safetensors file with the metadata that say whose rotations they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from qrot.errors import InputError
from qrot.rotation.rotations import Clips, Hadamard, Rotations, Shifts

_FORMAT = "qrot rotations 1"


def save_rotations(
    path: Path,
    rotations: Rotations,
    metadata: dict[str, Any],
    *,
    shifts: Shifts | None = None,
    clips: Clips | None = None,
) -> None:
    """Write one safetensors file: float32 tensors by name, and the metadata that say whose it is.

    metadata must hold `model` and `digest` (see `load_rotations`); scheme, objective, seed and the
    weights it was trained for belong there too.
    """
    tensors, blocks = {}, {}
    trees = {"rotations": rotations, "shifts": shifts, "clips": clips}
    for tree, value in trees.items():
        for name, leaf in vars(value).items() if value is not None else ():
            if isinstance(leaf, Hadamard):
                tensors[f"{tree}.{name}.signs"] = np.asarray(leaf.signs, np.float32)
                blocks[name] = leaf.block
            elif leaf is not None and not isinstance(leaf, bool):
                tensors[f"{tree}.{name}"] = np.ascontiguousarray(np.asarray(leaf, np.float32))
    header = {"format": _FORMAT, "blocks": blocks, **metadata}
    partial = path.with_name(path.name + ".partial")
    save_file(tensors, partial, {key: json.dumps(value) for key, value in header.items()})
    partial.replace(path)


def load_rotations(
    path: Path, *, digest: str | None = None
) -> tuple[Rotations, Shifts | None, Clips | None, dict[str, Any]]:
    """Read rotations, shifts, clips and metadata back.

    digest: of the model to be rotated. Raises InputError where the file is not qrot's, is damaged,
    or was fitted to another model: a rotation is worth nothing elsewhere.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such rotation file")
    try:
        with safe_open(path, "numpy") as file:
            tensors = {name: jnp.asarray(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
            metadata = {key: json.loads(value) for key, value in (file.metadata() or {}).items()}
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"{path}: not a readable rotation file ({error})") from error
    needed = {"model", "digest", "blocks"}
    if metadata.pop("format", None) != _FORMAT or not needed <= metadata.keys():
        raise InputError(f"{path}: not a rotation file of qrot")
    if digest is not None and metadata["digest"] != digest:
        raise InputError(
            f"{path}: fitted to {metadata['model']} ({metadata['digest']}), not to this model "
            f"({digest})"
        )
    blocks = metadata.pop("blocks")
    trees: dict[str, dict[str, Any]] = {"rotations": {}, "shifts": {}, "clips": {}}
    for name, tensor in tensors.items():
        tree, site, *form = name.split(".")
        trees[tree][site] = Hadamard(tensor, blocks[site]) if form else tensor
    return (
        Rotations(**trees["rotations"]),
        Shifts(**trees["shifts"]) if trees["shifts"] else None,
        Clips(**trees["clips"]) if trees["clips"] else None,
        metadata,
    )
