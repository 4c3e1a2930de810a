"""One run: a model through every method of a configuration, each row kept as soon as it is known.

A run folder holds config.yaml, results.json, and for what was learned metrics.jsonl, checkpoint/,
rotations.safetensors and learning.png (in a folder for each seed where there are several).
"""

from __future__ import annotations

import os
import platform
import resource
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

import qrot
from qrot.errors import InputError
from qrot.experiment.config import RunConfig, first_difference, resolved, to_yaml
from qrot.experiment.folder import check_folder, writing
from qrot.experiment.judge import forward_seconds, judge
from qrot.experiment.plot import plot_learning
from qrot.experiment.prepare import Inputs, prepare
from qrot.experiment.results import BESIDE, read_results, write_results, write_text
from qrot.experiment.stages import Stages
from qrot.learn.loop import learn, load_history, total_steps
from qrot.rotation.random import random_rotations
from qrot.rotation.rotations import Learned
from qrot.rotation.store import load_rotations, save_rotations, warn_of_weights
from qrot.scheme import Scheme, grids_by_layer


def run(config: RunConfig, console: Console) -> dict[str, Any]:
    """Measure what the configuration asks for and return results.json as an object.

    A run folder that was begun with the same configuration goes on where it stopped. Progress goes
    to `console`. Raises InputError where the configuration does not fit the model or the text,
    the folder belongs to another configuration, or a file cannot be written; what is in the folder
    by then is whole.
    """
    folder = Path(config.out)
    check_folder(folder, config)
    with Stages(console) as stages:
        inputs = prepare(config, folder, stages)
        with writing(folder):
            results = _begin(inputs)
            done = {(row["method"], row["seed"]) for row in results["rows"]}
            for method in config.methods:
                for seed in _seeds(config, method):
                    if (method, seed) not in done:
                        results["rows"].append(_row(inputs, method, seed))
                        write_results(folder / "results.json", results)
    return results


def _seeds(config: RunConfig, method: str) -> tuple[int | None, ...]:
    if method == "learned":
        return config.learn_seeds
    return config.seeds if method.startswith("random") else (None,)


def _begin(inputs: Inputs) -> dict[str, Any]:
    """The results so far; none yet for a new folder, which gets its config.yaml."""
    folder, protocol = inputs.folder, _protocol(inputs)
    results = read_results(folder / "results.json")
    if results is not None and (key := first_difference(results["protocol"], protocol)):
        raise InputError(
            f"{folder}: was measured with another {key} ({results['protocol'].get(key)}, now "
            f"{protocol.get(key)}); choose another folder with out="
        )
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "config.yaml").exists():
        write_text(folder / "config.yaml", to_yaml(inputs.config))
    rows = results["rows"] if results else []
    return {"protocol": protocol, "environment": _environment(), "rows": rows}


def _protocol(inputs: Inputs) -> dict[str, Any]:
    """What a perplexity depends on beside the method; equal protocols compare."""
    windows, rows, model = inputs.config.evaluate, inputs.rows, inputs.model
    other = {}
    if inputs.other_rows is not None:
        other = {"other_text": inputs.other_text, "other_count": len(inputs.other_rows)}
    stride = windows.stride or windows.length - windows.bos
    later = min(stride, windows.length - 1) if windows.stride else windows.length - 1
    return {
        "text": inputs.text,
        "window": windows.length,
        "count": len(rows),
        "stride": stride,
        "bos": windows.bos,
        "scored_tokens": windows.length - 1 + (len(rows) - 1) * later,
        "logits": "float32",
        "compute": inputs.config.compute_dtype,
        "parameters": inputs.config.dtype,
        "model": model.name,
        "digest": model.digest,
        "note": model.note,
        "norms": "folded into the weights for every method",
        **other,
    }


def _peak_gib() -> float:
    """The most memory that the device, or on a CPU this process, has held so far."""
    stats = jax.local_devices()[0].memory_stats() or {}
    in_use = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return stats.get("peak_bytes_in_use", in_use) / 2**30


def _environment() -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "qrot": qrot.__version__,
        "jax": jax.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "device": f"{device.device_kind} ({device.platform}, {platform.machine()})",
        "cores": os.cpu_count(),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def _row(inputs: Inputs, method: str, seed: int | None) -> dict[str, Any]:
    """One method at one seed: prepare the model, judge it, forget it."""
    began = time.perf_counter()
    config, model = inputs.config, inputs.model
    name = method.replace("_", " ") + ("" if seed is None else f", seed {seed}")
    scheme = Scheme() if method == "full_precision" else config.scheme
    learned, facts = None, {}
    if method.startswith("random"):
        kind = "orthogonal" if method == "random_orthogonal" else "hadamard"
        rotations = random_rotations(model.config, seed or 0, kind=kind, sites=config.rotations)
        shifts = inputs.shifts if method == "random_hadamard_shift" else None
        learned = Learned(rotations, shifts)
    elif method == "learned":
        learned, facts = _learned(inputs, name, seed or 0)
    elif method == "saved":
        learned, facts = _saved(inputs)
    judged = judge(inputs, name, learned, scheme)
    return {
        "method": method,
        "seed": seed,
        "weights": scheme.weights.bits,
        "activations": scheme.activations.bits,
        "keys": scheme.keys.bits,
        "values": scheme.values.bits,
        **judged,
        # Time that an interrupted run spent learning before is in learn_seconds.
        "seconds": time.perf_counter() - began + facts.pop("earlier_seconds", 0.0),
        **facts,
    }


def _learned(inputs: Inputs, name: str, seed: int) -> tuple[Learned, dict[str, Any]]:
    """Learn rotations, keep them with the plot of how, and say what a row tells of it."""
    config, model = inputs.config, inputs.model
    settings = config.learn
    if config.by_gptq:
        settings = replace(settings, weight_bits=config.trained_weight_bits)
    folder = inputs.folder
    if len(config.learn_seeds) > 1:
        folder = folder / f"seed{seed}"
        folder.mkdir(exist_ok=True)
    history = folder / "metrics.jsonl"
    earlier = _seconds(history) + _seconds(folder / "start" / history.name)
    began = time.perf_counter()
    steps = total_steps(settings)
    tokens = settings.steps * settings.batch * settings.length
    seconds = 60 + 4 * forward_seconds(model, tokens)
    with inputs.stages.stage(f"{name}: learning", steps, seconds=seconds) as advance:

        def progress(step: int, steps: int, metrics: dict[str, Any]) -> None:
            advance(done=step, note=f"loss {metrics['loss']:.4g}")

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
    if config.by_gptq:
        warn_of_weights(file, config.trained_weight_bits, gptq=True)
    title = f"{Path(model.name).name}, {config.scheme.name}, seed {seed}"
    plot_learning(load_history(history), settings.objective, title, folder / "learning.png")
    return learned, {
        **facts,
        "learn_seconds": time.perf_counter() - began + earlier,
        "peak_gib": _peak_gib(),
        "rotations": str(file.relative_to(inputs.folder)),
        "earlier_seconds": earlier,
    }


def _saved(inputs: Inputs) -> tuple[Learned, dict[str, Any]]:
    """Rotations of another run, and where they come from."""
    config, model = inputs.config, inputs.model
    path = Path(config.saved or "")
    learned, metadata = load_rotations(
        path, digest=model.digest, weight_bits=config.scheme.weights.bits, gptq=config.by_gptq
    )
    known = {key: metadata[key] for key in ("objective", "trained_weight_bits") if key in metadata}
    return learned, {"rotations": str(path), **known}


def _seconds(history: Path) -> float:
    """What the steps so far took; a line that a kill cut off does not count."""
    if not history.exists() or not history.read_text().endswith("\n"):
        return 0.0
    return sum(line.get("seconds", 0.0) for line in load_history(history))
