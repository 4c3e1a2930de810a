"""The weights of a row by LLM-QAT: text that the model writes once a run, and training on it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Int

from qrot.errors import InputError
from qrot.run.prepare import Fused, Inputs
from qrot.run.results import whole_file
from qrot.progress import forward_seconds
from qrot.quantize.qat import LIKELIEST, generate_text, qat
from qrot.model.params import Params
from qrot.scheme import Scheme


def trained_row(inputs: Inputs, name: str, fused: Fused, scheme: Scheme) -> Params:
    """Weights trained for the network of this row, and rounded.

    A row that was killed begins its training again, on the text that was kept.
    """
    rows, settings, model = own_text(inputs), inputs.config.qat, inputs.model
    seconds = 2 * forward_seconds(model, settings.steps * settings.batch * settings.length)
    with inputs.stages.stage(f"{name}: training", settings.steps, seconds=seconds) as advance:
        return jax.block_until_ready(
            qat(
                fused.params,
                scheme,
                model.config,
                rows,
                rotations=fused.online,
                shifts=fused.shifts,
                clips=fused.clips,
                settings=settings,
                advance=lambda loss: advance(note=f"loss {loss:.4g}"),
            )
        )


def own_text(inputs: Inputs) -> Int[np.ndarray, "count length"]:
    """What the model writes at full precision: the same for every row, and kept in the folder.

    Rotated rows train on it, too: rotations leave its function as it is, but not the last bits,
    which would make another text.
    """
    settings, model = inputs.config.qat, inputs.model
    count = settings.steps * settings.batch
    made = {
        "model": model.digest,
        "dtype": inputs.config.dtype,
        "count": count,
        "likeliest": LIKELIEST,
        **{key: asdict(settings)[key] for key in ("length", "seed")},
    }
    digest = hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()[:16]
    file = inputs.folder / f"qat-text-{digest}.npy"
    if file.exists():
        return _read(file)
    seconds = forward_seconds(model, count * settings.length)
    with inputs.stages.stage("writing text to train on", count, seconds=seconds) as advance:
        rows = generate_text(
            model.params,
            model.config,
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
