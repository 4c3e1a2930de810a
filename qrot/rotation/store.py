"""Rotation files: one safetensors file with the metadata that say whose rotations they are."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from qrot.errors import InputError
from qrot.grid import OFF
from qrot.kernels.hadamard import hadamard_factors, hadamard_matrix
from qrot.rotation.rotations import (
    Clips,
    Hadamard,
    Kronecker,
    Learned,
    Rotations,
    Scales,
    Shifts,
    is_signed,
)

_FORMAT = "qrot rotations 3"
_OLDER = "qrot rotations 2"  # the same without the factors of Hadamard matrices
_BESIDE = {"shifts": Shifts, "clips": Clips, "scales": Scales}


def save_rotations(path: Path, learned: Learned, metadata: dict[str, Any]) -> None:
    """Write one safetensors file: float32 tensors by name, and the metadata that say whose it is.

    Hadamard matrices come as signs and their int8 Kronecker factors, so that a reader needs no
    constructions of its own. metadata must hold `model` and `digest` (see `load_rotations`);
    scheme, grids, objective, seed and `trained_weight_bits` belong there too.
    """
    tensors, blocks = {}, {}
    for tree, value in vars(learned).items():
        for name, leaf in vars(value).items() if value is not None else ():
            if is_signed(leaf):
                blocks[name] = getattr(leaf, "block", None)
                tensors |= {f"{tree}.{name}.{part}": x for part, x in _factors(leaf).items()}
                parts = {f".{part}": x for part, x in vars(leaf).items() if part != "block"}
            else:
                parts = {"": leaf}
            for part, x in parts.items():
                if x is not None and not isinstance(x, bool):
                    wide = np.ascontiguousarray(np.asarray(x, np.float32))
                    tensors[f"{tree}.{name}{part}"] = wide
    header = {"format": _FORMAT, "blocks": blocks, **metadata}
    partial = path.with_name(path.name + ".partial")
    save_file(tensors, partial, {key: json.dumps(value) for key, value in header.items()})
    partial.replace(path)


def load_rotations(
    path: Path,
    *,
    digest: str | None = None,
    weight_bits: int | None = None,
    weight_method: str = "rtn",
) -> tuple[Learned, dict[str, Any]]:
    """Read what `save_rotations` wrote, and its metadata.

    digest: of the model to be rotated. weight_bits: of the weights that it will have,
    weight_method: what rounds them; warns where the rotations were learned for others. Raises
    InputError where the file is not qrot's, is damaged, or was fitted to another model: a rotation
    is worth nothing elsewhere.
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
    if metadata.pop("format", None) not in (_FORMAT, _OLDER) or not needed <= metadata.keys():
        raise InputError(f"{path}: not a rotation file of qrot")
    if digest is not None:
        check_digest(path, metadata, digest)
    trained = metadata.get("trained_weight_bits")
    if trained is not None and weight_bits is not None:
        warn_of_weights(path, trained, weight_bits, weight_method)
    blocks = metadata.pop("blocks")
    sites: dict[str, dict[str, Any]] = {tree: {} for tree in ("rotations", *_BESIDE)}
    for name, tensor in tensors.items():
        tree, site, *part = name.split(".")
        if part:
            sites[tree].setdefault(site, {})[part[0]] = tensor
        else:
            sites[tree][site] = tensor
    for site, parts in sites["rotations"].items():
        if isinstance(parts, dict):
            sites["rotations"][site] = _signed(path, parts, blocks[site])
    beside = {tree: kind(**sites[tree]) if sites[tree] else None for tree, kind in _BESIDE.items()}
    return Learned(Rotations(**sites["rotations"]), **beside), metadata


def check_digest(path: Path, metadata: dict[str, Any], digest: str) -> None:
    """Raise InputError where rotations were fitted to another model than the one with `digest`."""
    if metadata["digest"] != digest:
        raise InputError(
            f"{path}: fitted to {metadata['model']} ({metadata['digest']}), not to this model "
            f"({digest})"
        )


def warn_of_weights(
    path: Path, trained: int, weight_bits: int | None = None, weight_method: str = "rtn"
) -> None:
    """Warn where rotations learned with weights at `trained` bits meet others.

    Weights at `weight_bits` are what they have to be learned for, or at 16 bits where a method
    rounds that makes up for its errors.
    """
    if trained != (weight_bits if weight_method == "rtn" else OFF):
        by = f"that {weight_method} rounds"
        used = f"at {weight_bits} bits" if weight_method == "rtn" else by
        warnings.warn(
            f"{path} was learned with weights at {trained} bits and is used with weights {used}: "
            "rotations learned for rounded weights suit no other weights, and those learned at 16 "
            "bits are meant for gptq, quip or weights left alone",
            stacklevel=3,
        )


def _factors(leaf: Hadamard | Kronecker) -> dict[str, np.ndarray]:
    if isinstance(leaf, Kronecker):
        return {}
    orders = hadamard_factors(leaf.block or leaf.signs.shape[-1])
    return {f"factor{i}": np.array(hadamard_matrix(n)) for i, n in enumerate(orders)}


def _signed(path: Path, parts: dict[str, Any], block: int | None) -> Hadamard | Kronecker:
    if "left" in parts:
        return Kronecker(**parts)
    leaf = Hadamard(parts["signs"], block)
    theirs = [np.asarray(parts[name], np.float64) for name in sorted(parts) if name != "signs"]
    if theirs:
        # One vector of random numbers tells any two matrices apart, however they are factored.
        probe = np.random.default_rng(0).standard_normal(block or leaf.signs.shape[-1])
        ours = [np.asarray(x, np.float64) for x in _factors(leaf).values()]
        products = [_product(probe, factors) for factors in (theirs, ours)]
        if products[0].shape != products[1].shape or not np.allclose(products[0], products[1]):
            raise InputError(f"{path}: made with other Hadamard matrices than this qrot has")
    return leaf


def _product(x: np.ndarray, factors: list[np.ndarray]) -> np.ndarray:
    for factor in factors:
        x = np.einsum("sk,st->kt", x.reshape(len(factor), -1), factor)
    return x.ravel()
