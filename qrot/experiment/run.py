"""One run: a model through every method of a configuration, each row kept as soon as it is known.

A run folder holds config.yaml, results.json, and for what was learned metrics.jsonl, checkpoint/,
rotations.safetensors and learning.png (in a folder for each seed where there are several).
"""

from __future__ import annotations

import math
import os
import platform
import resource
import time
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int
from rich.console import Console

import qrot
from qrot.errors import InputError
from qrot.evaluate.perplexity import Windows, cut_windows, mean_nll
from qrot.experiment.config import RunConfig, first_difference, resolved, to_yaml
from qrot.experiment.data import Texts, read_texts
from qrot.experiment.folder import check_folder, writing
from qrot.experiment.plot import plot_learning
from qrot.experiment.results import BESIDE, read_results, write_results, write_text
from qrot.experiment.stages import Stages
from qrot.grid import Scheme, grids_by_layer
from qrot.learn.capture import mean_shifts
from qrot.learn.loop import learn, load_history, total_steps
from qrot.learn.start import check_start
from qrot.model.forward import forward
from qrot.model.fuse import fold_norms, fuse
from qrot.model.load import load
from qrot.model.params import Model, Params
from qrot.model.tokenizer import encode
from qrot.quantize.rtn import rtn
from qrot.rotation.random import random_rotations
from qrot.rotation.rotations import Learned, Rotations, Shifts
from qrot.rotation.store import load_rotations, save_rotations

# What stages take on 2 cores, roughly, for their remaining time until they can tell it themselves:
# seconds per million parameters, for a forward pass also per thousand tokens.
_FUSE, _ROUND, _FORWARD = 0.08, 0.03, 0.03


@dataclass(frozen=True)
class _Inputs:
    """What every row of a run starts from."""

    config: RunConfig
    model: Model  # norms folded, untied
    calibration: Int[np.ndarray, " tokens"]
    rows: Int[np.ndarray, "count length"]  # to judge by
    other_rows: Int[np.ndarray, "other_count length"] | None
    text: str
    other_text: str | None
    folder: Path
    stages: Stages

    @cached_property
    def shifts(self) -> Shifts:
        """The mean input of each site, measured once for all seeds."""
        rows = cut_windows(self.calibration, Windows(self.config.learn.length, None))
        with self.stages.stage("means of the sites", seconds=8.0):
            return jax.block_until_ready(mean_shifts(self.model, rows))


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
        inputs = _prepare(config, folder, stages)
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


def _prepare(config: RunConfig, folder: Path, stages: Stages) -> _Inputs:
    """Load, cut, and find out what does not fit, before anything is written."""
    texts = read_texts(config.data)
    other = None if config.other is None else read_texts(config.other)
    with stages.stage(f"loading {config.model}", seconds=7.0):
        model = fold_norms(load(config.model, dtype=jnp.dtype(config.dtype)))
        jax.block_until_ready(model.params)
    with stages.stage("reading the text", seconds=2.0):
        windows, bos = config.evaluate, model.config.bos_token_id
        rows = cut_windows(encode(model.tokenizer, texts.evaluation), windows, bos_token_id=bos)
        other_rows = None
        if other is not None:
            windows = replace(windows, count=config.other_count)
            other_tokens = encode(model.tokenizer, other.evaluation)
            other_rows = cut_windows(other_tokens, windows, bos_token_id=bos)
        calibration = _calibration(model, texts, config)
        _check_fit(config, model, rows)
        if config.saved is not None:
            load_rotations(Path(config.saved), digest=model.digest)
    other_text = None if other is None else other.name
    return _Inputs(
        config, model, calibration, rows, other_rows, texts.name, other_text, folder, stages
    )


def _calibration(model: Model, texts: Texts, config: RunConfig) -> Int[np.ndarray, " tokens"]:
    """The tokens to calibrate on; none where no method does."""
    if not {"learned", "random_hadamard_shift"} & set(config.methods):
        return np.zeros(0, np.int32)
    tokens = encode(model.tokenizer, texts.calibration)
    cut_windows(tokens, Windows(config.learn.length, config.learn.held_out + 1))
    return tokens


def _check_fit(config: RunConfig, model: Model, rows) -> None:
    """Trace everything without computing it: groups, blocks and overrides that do not fit raise."""
    if "learned" in config.methods:
        check_start(config.learn, config.rotations)
    kinds: dict[str, Any] = {
        "random_orthogonal": "orthogonal",
        "random_hadamard": "hadamard",
        "random_hadamard_shift": "hadamard",
        "learned": config.learn.start if config.learn.start == "orthogonal" else "hadamard",
    }
    rotations = Rotations()
    for kind in {kinds[method] for method in config.methods if method in kinds}:
        rotations = random_rotations(model.config, 0, kind=kind, sites=config.rotations)
    scheme = config.scheme
    tokens = jnp.asarray(rows[:1, :2])
    jax.eval_shape(lambda params: rtn(params, scheme), model.params)
    jax.eval_shape(
        lambda params: forward(params, tokens, model.config, rotations=rotations, scheme=scheme),
        model.params,
    )


def _begin(inputs: _Inputs) -> dict[str, Any]:
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


def _protocol(inputs: _Inputs) -> dict[str, Any]:
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


def _row(inputs: _Inputs, method: str, seed: int | None) -> dict[str, Any]:
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
    nll, other_nll = _judge(inputs, name, learned, scheme)
    other = {}
    if other_nll is not None:
        other = {"other_nll": other_nll, "other_perplexity": math.exp(min(other_nll, 700))}
    return {
        "method": method,
        "seed": seed,
        "weights": scheme.weights.bits,
        "activations": scheme.activations.bits,
        "keys": scheme.keys.bits,
        "values": scheme.values.bits,
        "nll": nll,
        "perplexity": math.exp(min(nll, 700)),
        **other,
        # Time that an interrupted run spent learning before is in learn_seconds.
        "seconds": time.perf_counter() - began + facts.pop("earlier_seconds", 0.0),
        **facts,
    }


def _judge(
    inputs: _Inputs, name: str, learned: Learned | None, scheme: Scheme
) -> tuple[float, float | None]:
    """Fuse, round and evaluate: nats per token, and on the other text if there is one."""
    config, model, stages = inputs.config, inputs.model, inputs.stages
    millions = _millions(model)
    params, online, shifts, clips = model.params, None, None, None
    if learned is not None:
        clips = learned.clips
        with stages.stage(f"{name}: fusing", seconds=_FUSE * millions):
            params, online, shifts = fuse(
                params, learned.rotations, model.config, learned.shifts, learned.scales
            )
            jax.block_until_ready(params)
    if scheme.rounds_weights:
        with stages.stage(f"{name}: rounding weights", seconds=_ROUND * millions):
            params = jax.block_until_ready(rtn(params, scheme))
    logits = partial(
        _logits,
        params,
        online,
        shifts,
        clips,
        config=model.config,
        scheme=scheme,
        dtype=config.compute_dtype,
    )

    def evaluate(rows, what: str) -> float:
        seconds = _FORWARD * millions * rows.size / 1000
        with stages.stage(f"{name}: {what}", len(rows), seconds=seconds) as advance:
            nll = mean_nll(logits, rows, config.evaluate, batch=config.batch, advance=advance)
        if not math.isfinite(nll):
            raise InputError(
                f"{name}: the loss is not finite; {config.compute_dtype} is too narrow for this "
                "model, try compute_dtype=float32"
            )
        return nll

    nll = evaluate(inputs.rows, "evaluating")
    if inputs.other_rows is None:
        return nll, None
    return nll, evaluate(inputs.other_rows, "evaluating on the other text")


@partial(jax.jit, static_argnames=("config", "scheme", "dtype"))
def _logits(params: Params, online, shifts, clips, tokens, *, config, scheme: Scheme, dtype: str):
    return forward(
        params,
        tokens,
        config,
        rotations=online,
        scheme=scheme,
        shifts=shifts,
        clips=clips,
        dtype=jnp.dtype(dtype),
    )


def _learned(inputs: _Inputs, name: str, seed: int) -> tuple[Learned, dict[str, Any]]:
    """Learn rotations, keep them with the plot of how, and say what a row tells of it."""
    config, model = inputs.config, inputs.model
    settings = config.learn
    folder = inputs.folder
    if len(config.learn_seeds) > 1:
        folder = folder / f"seed{seed}"
        folder.mkdir(exist_ok=True)
    history = folder / "metrics.jsonl"
    earlier = _seconds(history) + _seconds(folder / "start" / history.name)
    began = time.perf_counter()
    steps = total_steps(settings)
    tokens = settings.steps * settings.batch * settings.length
    seconds = 60 + 4 * _FORWARD * _millions(model) * tokens / 1000
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
    bits = config.scheme.weights.bits if settings.weight_bits is None else settings.weight_bits
    facts = {
        "objective": settings.objective,
        "optimiser": settings.optimiser,
        "steps": settings.steps,
        "trained_weight_bits": bits,
        "start": settings.start,
        **{name: getattr(settings, name) for name in BESIDE},
    }
    metadata = {
        "model": model.name,
        "digest": model.digest,
        "scheme": resolved(config)["scheme"],
        "grids": grids_by_layer(config.scheme, model.config.num_hidden_layers),
        "seed": seed,
        "text": inputs.text,
        "qrot": qrot.__version__,
        **facts,
    }
    file = folder / "rotations.safetensors"
    save_rotations(file, learned, metadata)
    title = f"{Path(model.name).name}, {config.scheme.name}, seed {seed}"
    plot_learning(load_history(history), settings.objective, title, folder / "learning.png")
    return learned, {
        **facts,
        "learn_seconds": time.perf_counter() - began + earlier,
        "peak_gib": _peak_gib(),
        "rotations": str(file.relative_to(inputs.folder)),
        "earlier_seconds": earlier,
    }


def _saved(inputs: _Inputs) -> tuple[Learned, dict[str, Any]]:
    """Rotations of another run, and where they come from."""
    config, model = inputs.config, inputs.model
    path = Path(config.saved or "")
    learned, metadata = load_rotations(
        path, digest=model.digest, weight_bits=config.scheme.weights.bits
    )
    known = {key: metadata[key] for key in ("objective", "trained_weight_bits") if key in metadata}
    return learned, {"rotations": str(path), **known}


def _millions(model: Model) -> float:
    return sum(x.size for x in jax.tree.leaves(model.params)) / 1e6


def _seconds(history: Path) -> float:
    """What the steps so far took; a line that a kill cut off does not count."""
    if not history.exists() or not history.read_text().endswith("\n"):
        return 0.0
    return sum(line.get("seconds", 0.0) for line in load_history(history))
