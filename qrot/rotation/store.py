"""Rotation files: one safetensors file with the metadata that say whose rotations they are."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from qrot.errors import located
from qrot.files.own import open_own_file
from qrot.files.tensors import write_tensor_file
from qrot.grid import OFF
from qrot.identity import Identity
from qrot.rotation.about import check_about, check_model, fitted_to
from qrot.rotation.forms import form_name
from qrot.rotation.read import acting_from, factors_of, translated
from qrot.rotation.transform import Online, Transform
from qrot.sites import Sizes

FORMAT = "qrot rotations 4"
# 3: a matrix has no name of its own, and its number of axes says what it is. 2: the same without
# the factors of Hadamard matrices.
_WITHOUT_FACTORS = "qrot rotations 2"
_OLDER = ("qrot rotations 3", _WITHOUT_FACTORS)
_OWN = ("format", "forms", "blocks")  # of the header, beside what metadata it has


def save_rotations(path: Path, acting: Transform | Online, metadata: Mapping[str, Any]) -> None:
    """Write one safetensors file: float32 tensors by name, and the metadata that say whose it is.

    Tensors are `rotations.<name>.<part>`, `scales.<name>`, `shifts.<site>` and `clips.<site>`.
    Hadamard matrices come as signs and their int8 Kronecker factors, so that a reader needs no
    constructions of its own.

    Args:
        path: of the file, which appears whole or not at all.
        acting: what is saved.
        metadata: must hold `model` and `digest` (see `load_rotations`); scheme, grids, objective,
            seed and `trained_weight_bits` belong there too.
    """
    tensors, forms = acting_tensors(acting)
    header = {"format": FORMAT, "forms": forms, **metadata}
    texts = {key: json.dumps(value) for key, value in header.items()}
    write_tensor_file(path, tensors.items(), texts)


def acting_tensors(
    acting: Transform | Online,
) -> tuple[dict[str, np.ndarray], dict[str, dict[str, Any]]]:
    """(Tensors by dotted name, {rotation: its form, and the fields of it that are no tensors})."""
    tensors: dict[str, np.ndarray] = {}
    forms: dict[str, dict[str, Any]] = {}
    for name, rotation in acting.rotations.items():
        forms[name] = {"form": form_name(rotation)}
        for part, x in vars(rotation).items():
            if part == "block":
                forms[name][part] = x
            else:
                tensors[f"rotations.{name}.{part}"] = _float32(x)
        for part, x in factors_of(rotation).items():
            tensors[f"rotations.{name}.{part}"] = x
    for tree, arrays in vars(acting).items():
        if tree != "rotations":
            tensors |= {f"{tree}.{name}": _float32(x) for name, x in arrays.items()}
    return tensors, forms


def _float32(x: Any) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(x, np.float32))


def load_rotations(
    path: Path,
    *,
    sizes: Sizes | None = None,
    identity: Identity | None = None,
    allow_mismatch: bool | None = None,
    weight_bits: int | None = None,
) -> tuple[Transform, dict[str, Any]]:
    """Read what `save_rotations` wrote, and its metadata.

    Args:
        path: of the file.
        sizes: of the model to be rotated; None not to compare shapes with it, which `fuse` does.
        identity: of the model to be rotated; None not to compare it.
        allow_mismatch: whether another model than that is a warning only, which the metadata then
            has as `mismatch`; None where the caller has no option for it.
        weight_bits: that rotations are to have been learned for: those of the weights, or 16 where
            a method rounds them that makes up for its errors. Warns where they were learned for
            others; None not to.

    Returns:
        The transform, whose rotations are orthogonal to within float32, and what it is.

    Raises:
        InputError: where the file is not qrot's, is damaged, or was fitted to another model: a
            rotation is worth nothing elsewhere; and where it holds what is no rotation, see
            `qrot.rotation.read.acting_from`.
    """
    tensors, header = open_own_file(path, "rotation", (FORMAT, *_OLDER))
    metadata = _metadata(path, header)
    mismatch = None
    if identity is not None:
        mismatch = check_model(path, metadata, identity, allow=allow_mismatch)
    arrays, forms = {name: tensor.view() for name, tensor in tensors.items()}, header.get("forms")
    with located(path):
        if header["format"] in _OLDER:
            arrays, forms = translated(arrays, header.get("blocks"))
        needed = header["format"] != _WITHOUT_FACTORS
        transform = acting_from(arrays, forms, Transform, sizes, factors=needed)
    trained = metadata.get("trained_weight_bits")
    if trained is not None and weight_bits is not None:
        warn_of_weights(path, trained, weight_bits)
    return transform, metadata | ({"mismatch": mismatch} if mismatch else {})


def read_metadata(path: Path) -> dict[str, Any]:
    """The metadata of `load_rotations`, without the rotations; raises InputError likewise."""
    return _metadata(path, open_own_file(path, "rotation", (FORMAT, *_OLDER))[1])


def _metadata(path: Path, header: Mapping[str, Any]) -> dict[str, Any]:
    metadata = {key: value for key, value in header.items() if key not in _OWN}
    with located(path):
        check_about(metadata)
    fitted_to(path, metadata)
    return metadata


def warn_of_weights(path: Path, trained: int, wanted: int) -> None:
    """Warn where rotations learned with weights at `trained` bits meet others.

    Args:
        path: of the rotations.
        trained: bits of the weights in training.
        wanted: bits that they have to be learned for, see `load_rotations`.
    """
    if trained != wanted:
        used = f"{wanted} bits"
        if wanted == OFF:
            used = f"{OFF} bits, or by a method that makes up for its errors"
        warnings.warn(
            f"{path} was learned with weights at {trained} bits and is used with weights at {used}:"
            " rotations learned for rounded weights suit no other weights, and those learned at 16 "
            "bits are meant for gptq, quip or weights left alone",
            stacklevel=3,
        )
