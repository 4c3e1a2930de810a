"""What each method puts on the network before its weights are rounded.

A new one is a function (inputs, name of the row, seed) -> (what it puts on, what a row tells of
it), a line in METHODS, and its name in `qrot.run.config`.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

import qrot
from qrot.run.config import resolved
from qrot.run.estimate import learning_seconds
from qrot.report.plot import plot_learning
from qrot.run.prepare import Inputs
from qrot.run.results import BESIDE
from qrot.progress import forward_seconds, millions
from qrot.learn.loop import learn, load_history, total_steps
from qrot.quantize.equalise import equalise
from qrot.quantize.slicegpt import principal_directions
from qrot.quantize.smoothquant import smoothquant
from qrot.rotation.random import random_rotations
from qrot.rotation.forms import Learned, Rotations, Scales
from qrot.rotation.store import load_rotations, save_rotations, warn_of_weights
from qrot.scheme import grids_by_layer

Prepared = tuple[Learned | None, dict[str, Any]]


def _nothing(inputs: Inputs, name: str, seed: int) -> Prepared:
    return None, {}


def _random(kind: Literal["orthogonal", "hadamard"], shift: bool = False):
    def method(inputs: Inputs, name: str, seed: int) -> Prepared:
        config, sites = inputs.model.config, inputs.config.rotations
        rotations = random_rotations(config, seed, kind=kind, sites=sites)
        return Learned(rotations, inputs.shifts if shift else None), {}

    return method


def _slicegpt(inputs: Inputs, name: str, seed: int) -> Prepared:
    """The principal directions; `judge` cuts those off that are not kept."""
    model, rows = inputs.model, inputs.calibration_rows
    config = model.config
    seconds = 2 * forward_seconds(model, rows.size)
    stage = inputs.stages.stage(f"{name}: directions", config.num_hidden_layers, seconds=seconds)
    with stage as advance:
        turn = principal_directions(
            model.params, config, rows, batch=inputs.config.batch, advance=advance
        )
    kept = inputs.config.slicegpt.kept(config.hidden_size)
    return Learned(Rotations(residual=jnp.asarray(turn, jnp.float32))), {"hidden_kept": kept}


def _learned(inputs: Inputs, name: str, seed: int) -> Prepared:
    """Learn rotations, keep them with the plot of how, and say what a row tells of it."""
    config, model = inputs.config, inputs.model
    settings = config.learn
    if config.calibrates:
        settings = replace(settings, weight_bits=config.trained_weight_bits)
    folder = inputs.folder
    if len(config.learn_seeds) > 1:
        folder = folder / f"seed{seed}"
        folder.mkdir(exist_ok=True)
    history = folder / "metrics.jsonl"
    earlier = _seconds(history) + _seconds(folder / "start" / history.name)
    began = time.perf_counter()
    steps = total_steps(settings)
    seconds = learning_seconds(settings, millions(model))
    with inputs.stages.stage(f"{name}: learning", steps, seconds=seconds) as advance:

        def progress(step: int, steps: int, metrics: dict[str, Any]) -> None:
            advance(done=step, note=f"loss {metrics['loss']:.4g}")
            inputs.track(name, step, metrics)

        learned = learn(
            model,
            inputs.calibration,
            settings,
            config.scheme,
            sites=config.rotations,
            seed=seed,
            folder=folder,
            progress=progress,
        )
        jax.block_until_ready(learned.rotations)
    facts = {
        "objective": settings.objective,
        "optimiser": settings.optimiser,
        "steps": settings.steps,
        "trained_weight_bits": config.trained_weight_bits,
        "start": settings.start,
        **{name: getattr(settings, name) for name in BESIDE},
    }
    metadata = {
        "model": model.name,
        "digest": model.digest,
        "scheme": resolved(config)["scheme"],
        "weight_method": config.weight_method,
        "grids": grids_by_layer(config.scheme, model.config.num_hidden_layers),
        "seed": seed,
        "text": inputs.text,
        "qrot": qrot.__version__,
        **facts,
    }
    file = folder / "rotations.safetensors"
    save_rotations(file, learned, metadata)
    if config.calibrates:
        warn_of_weights(file, config.trained_weight_bits, weight_method=config.weight_method)
    title = f"{Path(model.name).name}, {config.scheme.name}, seed {seed}"
    plot_learning(load_history(history), settings.objective, title, folder / "learning.png")
    return learned, {
        **facts,
        "learn_seconds": time.perf_counter() - began + earlier,
        "peak_gib": _peak_gib(),
        "rotations": str(file.relative_to(inputs.folder)),
        "earlier_seconds": earlier,
    }


def _saved(inputs: Inputs, name: str, seed: int) -> Prepared:
    """Rotations of another run, and where they come from."""
    config, model = inputs.config, inputs.model
    path = Path(config.saved or "")
    learned, metadata = load_rotations(
        path,
        digest=model.digest,
        weight_bits=config.scheme.weights.bits,
        weight_method=config.weight_method if config.calibrates else "rtn",
    )
    known = {key: metadata[key] for key in ("objective", "trained_weight_bits") if key in metadata}
    if "seed" in metadata:
        known["rotation_seed"] = metadata["seed"]
    return learned, {"rotations": str(path), **known}


def _smoothquant(inputs: Inputs, name: str, seed: int) -> Prepared:
    """The scales of SmoothQuant, kept in a file, and the alpha that they were made with."""
    config, model, rows = inputs.config, inputs.model, inputs.calibration_rows
    layers, seconds = model.config.num_hidden_layers, 2 * forward_seconds(model, rows.size)
    with inputs.stages.stage(f"{name}: calibrating", layers, seconds=seconds) as advance:
        scales, alpha = smoothquant(
            model.params,
            config.scheme,
            model.config,
            rows,
            settings=config.smoothquant,
            batch=config.batch,
            advance=advance,
        )
    return _kept(inputs, name, scales), {"alpha": alpha}


def _equalised(inputs: Inputs, name: str, seed: int) -> Prepared:
    return _kept(inputs, name, equalise(inputs.model.params, inputs.model.config)), {}


def _kept(inputs: Inputs, name: str, scales: Scales) -> Learned:
    """Scales without rotations, in a file that `qrot export` and the method `saved` read."""
    config, model, learned = inputs.config, inputs.model, Learned(Rotations(), scales=scales)
    metadata = {
        "model": model.name,
        "digest": model.digest,
        "scheme": resolved(config)["scheme"],
        "weight_method": config.weight_method,
        "grids": grids_by_layer(config.scheme, model.config.num_hidden_layers),
        "text": inputs.text,
        "qrot": qrot.__version__,
    }
    save_rotations(inputs.folder / f"{name}.safetensors", learned, metadata)
    return learned


def _seconds(history: Path) -> float:
    """What the steps so far took; a line that a kill cut off does not count."""
    if not history.exists() or not history.read_text().endswith("\n"):
        return 0.0
    return sum(line.get("seconds", 0.0) for line in load_history(history))


def _peak_gib() -> float:
    """The most memory that the device, or on a CPU this process, has held so far."""
    stats = jax.local_devices()[0].memory_stats() or {}
    in_use = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return stats.get("peak_bytes_in_use", in_use) / 2**30


METHODS: dict[str, Callable[[Inputs, str, int], Prepared]] = {
    "full_precision": _nothing,
    "no_rotation": _nothing,
    "random_orthogonal": _random("orthogonal"),
    "random_hadamard": _random("hadamard"),
    "random_hadamard_shift": _random("hadamard", shift=True),
    "slicegpt": _slicegpt,
    "learned": _learned,
    "saved": _saved,
    "smoothquant": _smoothquant,
    "equalised": _equalised,
}
