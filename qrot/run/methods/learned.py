"""Rotations that are learned, with what is learned beside them."""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from qrot.learn import history
from qrot.learn.loop import learn
from qrot.learn.objectives import OBJECTIVES
from qrot.learn.settings import total_steps
from qrot.learn.starting_point import check_start, no_shifts
from qrot.learn.starts import STARTS
from qrot.model.params import Model
from qrot.progress import forward_seconds
from qrot.rotation.random import random_rotations
from qrot.rotation.store import load_rotations, save_rotations, warn_of_weights
from qrot.rotation.transform import Transform
from qrot.run.about import about
from qrot.run.config import RunConfig
from qrot.run.inputs import Inputs
from qrot.run.method import Method, Prepared
from qrot.run.methods.saved import saved_rotations
from qrot.run.results import METRICS, learned_file

FILE = "rotations.safetensors"


def prepare(inputs: Inputs, name: str, seed: int) -> Prepared:
    """Learn rotations, keep them, and say what a row tells of it."""
    config = inputs.config
    folder = _folder(inputs, seed)
    folder.mkdir(exist_ok=True)
    earlier = history.seconds(folder / METRICS) + history.seconds(folder / "start" / METRICS)
    began = time.perf_counter()
    transform = _learn(inputs, name, seed, folder)
    facts = _facts(config)
    file = folder / FILE
    save_rotations(file, transform, {**about(inputs, RECORD.name, seed), **facts})
    if config.calibrates:
        warn_of_weights(file, config.trained_weight_bits, config.fitting_weight_bits)
    facts |= {
        "learn_seconds": time.perf_counter() - began + earlier,
        "peak_gib": _peak_gib(),
        "rotations": str(file.relative_to(inputs.folder)),
    }
    return Prepared(transform, facts, earlier_seconds=earlier)


def _learn(inputs: Inputs, name: str, seed: int, folder: Path) -> Transform:
    config = inputs.config
    settings = config.learn
    if config.calibrates:
        settings = replace(settings, weight_bits=config.trained_weight_bits)
    expected = seconds(config, inputs.millions)
    stage = inputs.stages.stage(f"{name}: learning", total_steps(settings), seconds=expected)
    with stage as advance:

        def progress(step: int, steps: int, metrics: dict[str, Any]) -> None:
            advance(done=step, note=f"loss {metrics['loss']:.4g}")
            inputs.track(name, step, metrics)

        found = learn(
            inputs.network.replace(scheme=config.scheme),
            inputs.calibration,
            settings,
            sites=config.rotations,
            seed=seed,
            folder=folder,
            given=saved_rotations(config, inputs.model)[0]
            if STARTS[settings.start].given
            else None,
            progress=progress,
        )
        return jax.block_until_ready(found)


def _folder(inputs: Inputs, seed: int) -> Path:
    """Of what is learned with a seed: the run's, or one for each where there are several."""
    several = len(inputs.config.learn_seeds) > 1
    return inputs.folder / f"seed{seed}" if several else inputs.folder


def _facts(config: RunConfig) -> dict[str, Any]:
    settings = config.learn
    return {
        "objective": settings.objective,
        "unit": OBJECTIVES[settings.objective].unit,
        "optimiser": settings.optimiser,
        "steps": settings.steps,
        "trained_weight_bits": config.trained_weight_bits,
        "start": settings.start,
        "shifts": settings.shifts,
        "scales": settings.scales,
        "clips": settings.clips,
    }


def expect(config: RunConfig, model: Model) -> Transform:
    """Rotations of the kind that learning starts with, and shifts if it has any."""
    check_start(config.learn, config.rotations)
    if STARTS[config.learn.start].given:
        return saved_rotations(config, model)[0]
    sizes, kind = model.network.config, STARTS[config.learn.start].kind
    rotations = random_rotations(sizes, 0, kind=kind, sites=config.rotations)
    return Transform(rotations, shifts=no_shifts(sizes) if config.learn.shifts else {})


def recall(inputs: Inputs, row: Mapping[str, Any]) -> Transform | None:
    """What is in the file of a row; None where it was moved since."""
    file = learned_file(inputs.folder, row)
    if file is None or not file.exists():
        return None
    sizes, identity = inputs.network.config, inputs.model.identity
    return load_rotations(file, sizes=sizes, identity=identity)[0]


def seconds(config: RunConfig, millions: float) -> float:
    """What learning takes at one seed, roughly."""
    settings = config.learn
    if OBJECTIVES[settings.objective].batch == "captured":
        return 60.0  # no step goes through the network
    return 60.0 + 4 * forward_seconds(millions, settings.steps * settings.batch * settings.length)


def _peak_gib() -> float:
    """The most memory that the device, or on a CPU this process, has held so far."""
    stats = jax.local_devices()[0].memory_stats() or {}
    in_use = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return stats.get("peak_bytes_in_use", in_use) / 2**30


RECORD = Method(
    "learned",
    prepare,
    seeds="learn_seeds",
    text="learning",
    section="learn",
    expect=expect,
    recall=recall,
    seconds=seconds,
)
