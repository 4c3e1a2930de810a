"""What a file of a run says of itself, so that it can be used far from the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

import qrot
from qrot.identity import Identity
from qrot.model.adapter.source import Merge
from qrot.rotation.store import load_rotations, save_rotations
from qrot.rotation.transform import Transform
from qrot.run.config import resolved
from qrot.run.inputs import Inputs
from qrot.run.results import row_name
from qrot.scheme import Scheme, grids_by_layer


def about(
    inputs: Inputs, method: str, seed: int | None, scheme: Scheme | None = None
) -> dict[str, Any]:
    """The metadata of what a row has fitted or built, in plain values.

    Args:
        inputs: of the run.
        method: of the row.
        seed: of the row.
        scheme: that it was built for; that of the run if None.

    Returns:
        Model (name, adapters, digest, fingerprint, revision of the hub), row, method, seed, scheme
        and grids by layer, settings of what rounds the weights, the texts, and the version of qrot.
    """
    config, model = inputs.config, inputs.model
    scheme = config.scheme if scheme is None else scheme
    return {
        **model_metadata(config.model, model.identity, model.revision),
        "row": row_name(method, seed),
        "method": method,
        "seed": seed,
        "scheme": TypeAdapter(Scheme).dump_python(scheme, mode="json"),
        "grids": grids_by_layer(scheme, inputs.network.config.num_hidden_layers),
        "weights": resolved(config)["weights"],
        "data": asdict(config.data),
        "calibration": asdict(config.calibration),
        "text": inputs.text,
        "qrot": qrot.__version__,
    }


def model_metadata(model: str | Merge, identity: Identity, revision: str) -> dict[str, Any]:
    """What a file says of its model, and by which it can be opened again, in plain values.

    Args:
        model: as a configuration has it.
        identity: of it.
        revision: of the hub; "" for a model from elsewhere.
    """
    return {
        "model": str(model),
        **({"merge": asdict(model)} if isinstance(model, Merge) else {}),
        "digest": identity.of_files,
        "fingerprint": asdict(identity.fingerprint),
        **({"revision": revision} if revision else {}),
    }


def keep_transform(inputs: Inputs, method: str, transform: Transform) -> None:
    """Keep what a method without seeds has fitted in a file of the run, which `qrot export` and the
    method `saved` read."""
    save_rotations(_file(inputs, method), transform, about(inputs, method, None))


def kept_transform(inputs: Inputs, row: Mapping[str, Any]) -> Transform | None:
    """What `keep_transform` kept for a row of results; None where the file was moved since."""
    file = _file(inputs, row["method"])
    if not file.exists():
        return None
    sizes, identity = inputs.network.config, inputs.model.identity
    return load_rotations(file, sizes=sizes, identity=identity)[0]


def _file(inputs: Inputs, method: str) -> Path:
    return inputs.folder / f"{row_name(method, None)}.safetensors"
