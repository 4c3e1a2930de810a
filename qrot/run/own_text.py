"""Text that the model writes itself, for methods that round weights by it: once a run."""

from __future__ import annotations

import hashlib
import io
import json
import math
from pathlib import Path
from typing import Protocol, cast, runtime_checkable

import numpy as np
from jaxtyping import Int

from qrot.errors import InputError
from qrot.files.plain import read_bytes
from qrot.files.whole import whole_file
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
    shape = count, settings.length
    if file.exists():
        return _read(file, shape, inputs.network.config.vocab_size)
    seconds = forward_seconds(inputs.millions, count * settings.length)
    with inputs.stages.stage("writing text to train on", count, seconds=seconds) as advance:
        rows = generate_text(
            inputs.network,
            count=count,
            length=settings.length,
            seed=settings.seed,
            advance=advance,
        )
    with whole_file(file) as partial:
        partial.write_bytes(_header(shape) + rows.astype("<i4").tobytes())
    return rows


def _header(shape: tuple[int, int]) -> bytes:
    """What a .npy file of tokens begins with."""
    about = {"descr": "<i4", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(memory := io.BytesIO(), about)
    return memory.getvalue()


def _read(file: Path, shape: tuple[int, int], vocabulary: int) -> Int[np.ndarray, "count length"]:
    """The tokens in a file; raises InputError where it holds anything else."""
    header = _header(shape)
    size = len(header) + 4 * math.prod(shape)
    content = read_bytes(file, size)
    if len(content) == size and content.startswith(header):
        rows = np.frombuffer(content, "<i4", offset=len(header)).reshape(shape)
        if rows.min() >= 0 and rows.max() < vocabulary:
            return rows
    raise InputError(f"{file}: damaged (not tokens of this model); delete it to write it again")
