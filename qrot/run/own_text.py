"""Text that the model writes itself, for methods that round weights by it: once a run."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Protocol, cast, runtime_checkable

import numpy as np
from jaxtyping import Int

from qrot.errors import InputError
from qrot.files import whole_file
from qrot.progress import forward_seconds
from qrot.quantize.qat import LIKELIEST, generate_text
from qrot.run.config import RunConfig
from qrot.run.inputs import Inputs


@runtime_checkable
class Training(Protocol):
    """The settings of a method that trains weights on such text."""

    steps: int
    batch: int  # windows of a step
    length: int  # tokens of a window
    seed: int  # of the text


def trained(config: RunConfig) -> Training:
    """The settings of the weights, where they are trained on such text."""
    return cast(Training, config.weights)


def own_text(inputs: Inputs) -> Int[np.ndarray, "count length"]:
    """What the model writes at full precision: the same for every row, and kept in the folder.

    Rotated rows train on it, too: rotations leave its function as it is, but not the last bits,
    which would make another text.

    Args:
        inputs: of a run whose weights are trained on it.
    """
    settings = trained(inputs.config)
    count = settings.steps * settings.batch
    made = {
        "model": inputs.model.digest,
        "dtype": inputs.config.dtype,
        "count": count,
        "likeliest": LIKELIEST,
        "length": settings.length,
        "seed": settings.seed,
    }
    digest = hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()[:16]
    file = inputs.folder / f"qat-text-{digest}.npy"
    if file.exists():
        return _read(file)
    seconds = forward_seconds(inputs.millions, count * settings.length)
    with inputs.stages.stage("writing text to train on", count, seconds=seconds) as advance:
        rows = generate_text(
            inputs.network,
            count=count,
            length=settings.length,
            seed=settings.seed,
            advance=advance,
        )
    with whole_file(file) as partial, partial.open("wb") as open_file:
        np.save(open_file, rows)
    return rows


def _read(file: Path) -> Int[np.ndarray, "count length"]:
    try:
        return np.load(file)
    except (ValueError, EOFError) as error:
        raise InputError(f"{file}: damaged ({error}); delete it to write it again") from error
