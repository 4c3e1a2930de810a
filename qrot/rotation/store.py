"""Rotation files: one safetensors file with the metadata that say whose rotations they are."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from qrot.errors import InputError
from qrot.grid import OFF
from qrot.hadamard.factors import hadamard_factors, hadamard_matrix
from qrot.rotation.forms import FORMS, Hadamard, Rotation, form_name
from qrot.rotation.transform import Online, Transform

FORMAT = "qrot rotations 4"
# 3: a matrix has no name of its own, and its number of axes says what it is. 2: the same without
# the factors of Hadamard matrices.
_OLDER = ("qrot rotations 3", "qrot rotations 2")


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
    partial = path.with_name(path.name + ".partial")
    save_file(tensors, partial, {key: json.dumps(value) for key, value in header.items()})
    partial.replace(path)


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
        for part, x in _factors(rotation).items():
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
    digest: str | None = None,
    weight_bits: int | None = None,
) -> tuple[Transform, dict[str, Any]]:
    """Read what `save_rotations` wrote, and its metadata.

    Args:
        path: of the file.
        digest: of the model to be rotated; None not to compare it.
        weight_bits: that rotations are to have been learned for: those of the weights, or 16 where
            a method rounds them that makes up for its errors. Warns where they were learned for
            others; None not to.

    Raises:
        InputError: where the file is not qrot's, is damaged, or was fitted to another model: a
            rotation is worth nothing elsewhere.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such rotation file")
    try:
        with safe_open(path, "numpy") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = {key: json.loads(value) for key, value in (file.metadata() or {}).items()}
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"{path}: not a readable rotation file ({error})") from error
    form = metadata.pop("format", None)
    older = form in _OLDER
    needed = {"model", "digest", "blocks" if older else "forms"}
    if form not in (FORMAT, *_OLDER) or not needed <= metadata.keys():
        raise InputError(f"{path}: not a rotation file of qrot")
    if digest is not None:
        check_digest(path, metadata, digest)
    trained = metadata.get("trained_weight_bits")
    if trained is not None and weight_bits is not None:
        warn_of_weights(path, trained, weight_bits)
    if older:
        tensors, forms = _translated(tensors, metadata.pop("blocks"))
    else:
        forms = metadata.pop("forms")
    return acting_from(path, tensors, forms, Transform), metadata


def acting_from(path: Path, tensors: Mapping[str, np.ndarray], forms: Mapping[str, Any], kind: Any):
    """The inverse of `acting_tensors`; raises InputError, with the path, where it is damaged.

    Args:
        path: of the file that the tensors come from.
        tensors: by dotted name.
        forms: as `acting_tensors` has them.
        kind: `Transform` or `Online`.
    """
    trees: dict[str, dict[str, Any]] = {tree: {} for tree in kind.__dataclass_fields__}
    rotations: dict[str, dict[str, np.ndarray]] = {}
    for name, tensor in tensors.items():
        tree, _, rest = name.partition(".")
        if tree not in trees or not rest:
            raise InputError(f"{path}: holds {name}, which no rotation file has")
        if tree == "rotations":
            rotation, _, part = rest.partition(".")
            rotations.setdefault(rotation, {})[part] = tensor
        else:
            trees[tree][rest] = jnp.asarray(tensor)
    if rotations.keys() != forms.keys():
        raise InputError(
            f"{path}: its tensors are not those of {', '.join(forms) or 'no rotation'}"
        )
    for name, parts in rotations.items():
        trees["rotations"][name] = _rotation(path, name, parts, forms[name])
    return kind(**trees)


def _rotation(
    path: Path, name: str, parts: dict[str, np.ndarray], about: Mapping[str, Any]
) -> Rotation:
    form = FORMS.get(about.get("form", ""))
    factors = {part: x for part, x in parts.items() if part.startswith("factor")}
    fields = {part: jnp.asarray(x) for part, x in parts.items() if part not in factors}
    static = {key: value for key, value in about.items() if key != "form"}
    if form is None or {*fields, *static} != set(form.__dataclass_fields__):
        raise InputError(f"{path}: the rotation {name} is of no form that qrot has")
    rotation = form(**fields, **static)
    if factors:
        _check_factors(path, rotation, [factors[part] for part in sorted(factors)])
    return rotation


def _check_factors(path: Path, rotation: Rotation, theirs: list[np.ndarray]) -> None:
    """Raise InputError where a Hadamard rotation was made with other matrices than this qrot's."""
    ours = list(_factors(rotation).values())
    # One vector of random numbers tells any two matrices apart, however they are factored.
    size = int(np.prod([len(x) for x in ours]))
    probe = np.random.default_rng(0).standard_normal(size)
    same = size == int(np.prod([len(x) for x in theirs]))
    if not same or not np.allclose(_product(probe, theirs), _product(probe, ours)):
        raise InputError(f"{path}: made with other Hadamard matrices than this qrot has")


def _factors(rotation: Rotation) -> dict[str, np.ndarray]:
    """The +-1 factors of a Hadamard matrix by name; {} for other forms."""
    if not isinstance(rotation, Hadamard):
        return {}
    orders = hadamard_factors(rotation.block or rotation.signs.shape[-1])
    return {f"factor{i}": np.array(hadamard_matrix(n)) for i, n in enumerate(orders)}


def _product(x: np.ndarray, factors: list[np.ndarray]) -> np.ndarray:
    for factor in factors:
        x = np.einsum("sk,st->kt", x.reshape(len(factor), -1), factor.astype(np.float64))
    return x.ravel()


def _translated(
    tensors: dict[str, np.ndarray], blocks: dict[str, int | None]
) -> tuple[dict[str, np.ndarray], dict[str, dict[str, Any]]]:
    """Tensors and forms of a file of format 2 or 3, in which a matrix's number of axes says what it
    is: a whole one has two beside those of layers, blocks three, one for each kv head an axis more
    before the blocks."""
    layer_axes = {"residual": 0, "value": 1, "key": 1, "down": 1}
    found, forms = {}, {}
    for name, x in tensors.items():
        tree, rotation, *part = name.split(".")
        if tree != "rotations":
            found[name] = x
        elif part:
            found[name] = x
            kronecker = f"rotations.{rotation}.left" in tensors
            form = {"form": "kronecker" if kronecker else "hadamard"}
            forms[rotation] = form if kronecker else {**form, "block": blocks.get(rotation)}
        else:
            axes = x.ndim - layer_axes.get(rotation, 0)
            if axes == 4 and x.shape[-3] == 1:  # for each kv head a whole one
                x, axes = x[..., 0, :, :], 2
            form = "dense" if axes == 2 else "blocks"
            forms[rotation] = {"form": form}
            found[f"{name}.{'matrix' if form == 'dense' else form}"] = x
    return found, forms


def check_digest(path: Path, metadata: Mapping[str, Any], digest: str) -> None:
    """Raise InputError where rotations were fitted to another model than the one with `digest`."""
    if metadata["digest"] != digest:
        raise InputError(
            f"{path}: fitted to {metadata['model']} ({metadata['digest']}), not to this model "
            f"({digest})"
        )


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
