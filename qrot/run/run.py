"""One run: a model through every method of a configuration, each row kept as soon as it is known.

A run folder holds config.yaml, results.json, anatomy.json, report.html, and for what was learned
metrics.jsonl, checkpoint/, rotations.safetensors and learning.png (in a folder for each seed where
there are several).
"""

from __future__ import annotations

import os
import platform
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
from qrot.run.anatomy import keep_anatomy
from qrot.run.config import RunConfig, first_difference, resolved, to_yaml
from qrot.run.folder import check_folder, writing
from qrot.run.judge import judge
from qrot.run.methods import METHODS
from qrot.run.prepare import Inputs, prepare
from qrot.report.run import write_report
from qrot.run.results import read_results, write_results, write_text
from qrot.progress import Stages
from qrot.run.track import check_trackers, tracking
from qrot.run.zeroshot import FILE, zeroshot_protocol
from qrot.scheme import Scheme


def run(config: RunConfig, console: Console) -> dict[str, Any]:
    """Measure what the configuration asks for and return results.json as an object.

    A run folder that was begun with the same configuration goes on where it stopped. Progress goes
    to `console`. Raises InputError where the configuration does not fit the model or the text,
    the folder belongs to another configuration, or a file cannot be written; what is in the folder
    by then is whole.
    """
    folder = Path(config.out)
    check_folder(folder, config)
    check_trackers(config.track)
    with Stages(console) as stages:
        inputs = prepare(config, folder, stages)
        told = tracking(config.track, folder, resolved(config))
        with writing(folder), told as track:
            inputs = replace(inputs, track=track)
            results = _begin(inputs)
            done = {(row["method"], row["seed"]) for row in results["rows"]}
            for method, seed in planned(config):
                if (method, seed) not in done:
                    name = method.replace("_", " ") + ("" if seed is None else f", seed {seed}")
                    results["rows"].append(_row(inputs, method, seed, name))
                    write_results(folder / "results.json", results)
                    track(name, None, results["rows"][-1])
                    (folder / FILE).unlink(missing_ok=True)  # is in the row now
            keep_anatomy(inputs, results["rows"])
            write_report(folder)
    return results


def planned(config: RunConfig) -> list[tuple[str, int | None]]:
    """The rows of a run, each a method and a seed, in their order."""
    return [(method, seed) for method in config.methods for seed in _seeds(config, method)]


def _seeds(config: RunConfig, method: str) -> tuple[int | None, ...]:
    if method == "learned":
        return config.learn_seeds
    return config.seeds if method.startswith("random") else (None,)


def _begin(inputs: Inputs) -> dict[str, Any]:
    """The results so far; none yet for a new folder, which gets its config.yaml."""
    folder, protocol, tasks = inputs.folder, _protocol(inputs), zeroshot_protocol(inputs)
    results = read_results(folder / "results.json")
    if results is not None and (key := first_difference(results["protocol"], protocol)):
        raise InputError(
            f"{folder}: was measured with another {key} ({results['protocol'].get(key)}, now "
            f"{protocol.get(key)}); choose another folder with out="
        )
    if results is not None and (key := first_difference(results.get("zeroshot", {}), tasks)):
        raise InputError(
            f"{folder}: was measured with another zeroshot.{key}; choose another folder with out="
        )
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "config.yaml").exists():
        write_text(folder / "config.yaml", to_yaml(inputs.config))
    rows = results["rows"] if results else []
    about = {"protocol": protocol, "environment": _environment()}
    return {**about, **({"zeroshot": tasks} if tasks else {}), "rows": rows}


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


def _row(inputs: Inputs, method: str, seed: int | None, name: str) -> dict[str, Any]:
    """One method at one seed: prepare the model, judge it, forget it."""
    began = time.perf_counter()
    config = inputs.config
    scheme = Scheme() if method == "full_precision" else config.scheme
    learned, facts = METHODS[method](inputs, name, seed or 0)
    judged = judge(inputs, name, learned, scheme, kept=facts.get("hidden_kept"))
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
