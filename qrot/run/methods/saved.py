"""What another run has kept: rotations, or a whole network, which is judged as it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from qrot.errors import InputError
from qrot.model.params import Model, Network
from qrot.progress import ROUND
from qrot.quantize.keep import is_network, load_network, read_about
from qrot.rotation.about import check_model
from qrot.rotation.store import load_rotations
from qrot.rotation.transform import Transform
from qrot.run.about import keep_transform
from qrot.run.config import RunConfig
from qrot.run.inputs import Inputs
from qrot.run.method import Method, Prepared

# What a row tells of a file: of what was learned and for which model, and of a network's weights.
_LEARNED = ("objective", "trained_weight_bits", "mismatch")
_WEIGHTS = ("weight_method", "mixed", "hidden_kept")


def prepare(inputs: Inputs, name: str, seed: int) -> Prepared:
    """What is in the file, and where it comes from."""
    config, path, model = inputs.config, _path(inputs.config), inputs.model
    if is_network(path):
        with inputs.stages.stage(f"{name}: reading the network", seconds=ROUND * inputs.millions):
            network, metadata = _network(path, config, model)
        known = _known(metadata, *_LEARNED, *_WEIGHTS)
        facts = {"network": str(path), "weights": metadata["weight_bits"], **known}
        return Prepared(network=jax.tree.map(jnp.asarray, network), facts=facts)
    transform, metadata = saved_rotations(config, model, config.fitting_weight_bits)
    keep_transform(inputs, RECORD.name, transform)  # the run stands on its own then
    return Prepared(transform, {"rotations": str(path), **_known(metadata, *_LEARNED)})


def _known(metadata: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    known = {key: metadata[key] for key in keys if key in metadata}
    if metadata.get("seed") is not None:
        known["rotation_seed"] = metadata["seed"]
    return known


def expect(config: RunConfig, model: Model) -> Transform:
    """What is in a file of rotations; nothing is put on a whole network, which is only tried."""
    path = _path(config)
    if is_network(path):
        _network(path, config, model)
        return Transform()
    return saved_rotations(config, model)[0]


def recall(inputs: Inputs, row: Mapping[str, Any]) -> Transform | None:
    """What is in a file of rotations; None for a whole network, or where it was moved since."""
    path, config = _path(inputs.config), inputs.config
    if not path.exists() or is_network(path):
        return None
    return saved_rotations(config, inputs.model)[0]


def _network(path: Path, config: RunConfig, model: Model) -> tuple[Network, dict[str, Any]]:
    about = read_about(path)
    mismatch = check_model(path, about, model.identity, allow=config.allow_mismatch)
    if about.get("weight_bits") is None:
        raise InputError(f"{path}: says no weight_bits")
    network, about = load_network(path, model.network.config)
    return network, about | ({"mismatch": mismatch} if mismatch else {})


def saved_rotations(
    config: RunConfig, model: Model, weight_bits: int | None = None
) -> tuple[Transform, dict[str, Any]]:
    """The rotation file that a configuration names, and its metadata; see `load_rotations`."""
    return load_rotations(
        _path(config),
        sizes=model.network.config,
        identity=model.identity,
        allow_mismatch=config.allow_mismatch,
        weight_bits=weight_bits,
    )


def _path(config: RunConfig) -> Path:
    return Path(config.saved or "")


RECORD = Method("saved", prepare, file="saved", expect=expect, recall=recall)
