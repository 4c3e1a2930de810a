"""What another run has kept: rotations, or a whole network, which is judged as it is."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from qrot.errors import InputError
from qrot.model.params import Model
from qrot.progress import ROUND
from qrot.quantize.keep import load_network, read_about
from qrot.rotation.store import check_digest, load_rotations
from qrot.rotation.transform import Transform
from qrot.run.config import RunConfig
from qrot.run.inputs import Inputs
from qrot.run.method import Method, Prepared

# What a row tells of a file, as the file has it: of what was learned, and of a network's weights.
_LEARNED = ("objective", "trained_weight_bits")
_WEIGHTS = ("weight_method", "mixed", "hidden_kept")


def prepare(inputs: Inputs, name: str, seed: int) -> Prepared:
    """What is in the file, and where it comes from."""
    config, path = inputs.config, _path(inputs.config)
    if (metadata := _network(path)) is not None:
        check_digest(path, metadata, inputs.model.digest)
        with inputs.stages.stage(f"{name}: reading the network", seconds=ROUND * inputs.millions):
            network = jax.tree.map(jnp.asarray, load_network(path)[0])
        known = _known(metadata, *_LEARNED, *_WEIGHTS)
        facts = {"network": str(path), "weights": metadata["weight_bits"], **known}
        return Prepared(network=network, facts=facts)
    bits = config.fitting_weight_bits
    transform, metadata = load_rotations(path, digest=inputs.model.digest, weight_bits=bits)
    return Prepared(transform, {"rotations": str(path), **_known(metadata, *_LEARNED)})


def _known(metadata: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    known = {key: metadata[key] for key in keys if key in metadata}
    if metadata.get("seed") is not None:
        known["rotation_seed"] = metadata["seed"]
    return known


def expect(config: RunConfig, model: Model) -> Transform:
    """What is in a file of rotations; nothing is put on a whole network."""
    path = _path(config)
    if (metadata := _network(path)) is not None:
        check_digest(path, metadata, model.digest)
        return Transform()
    return load_rotations(path, digest=model.digest)[0]


def recall(inputs: Inputs, row: Mapping[str, Any]) -> Transform | None:
    """What is in a file of rotations; None for a whole network, or where it was moved since."""
    path = _path(inputs.config)
    if not path.exists() or _network(path) is not None:
        return None
    return load_rotations(path, digest=inputs.model.digest)[0]


def _network(path: Path) -> dict[str, Any] | None:
    """What a kept network says of itself; None where the file is no such network."""
    with suppress(InputError):
        return read_about(path)
    return None


def _path(config: RunConfig) -> Path:
    return Path(config.saved or "")


RECORD = Method("saved", prepare, file="saved", expect=expect, recall=recall)
