"""One run: a model through every method of a configuration, each row kept as soon as it is known.

A run folder holds config.yaml, results.json, anatomy.json, the network of the best row
(network.safetensors), what its gate has found (gate.json, gate.xml), and for what was learned
metrics.jsonl, checkpoint/ and rotations.safetensors (in a folder for each seed where there are
several). `qrot.report` adds to it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from qrot.errors import InputError
from qrot.files.plain import dump_yaml, first_difference, read_yaml, short, shown
from qrot.files.whole import write_text
from qrot.progress import Stages
from qrot.run.about import row_name
from qrot.run.anatomy import keep_anatomy
from qrot.run.build import build
from qrot.run.check import check_names
from qrot.run.config import RunConfig, resolved, to_yaml
from qrot.run.environment import environment
from qrot.run.folder import check_folder, check_out, remove_halves, writing
from qrot.run.gate import judge_gate
from qrot.run.inputs import Inputs
from qrot.run.judge import judge
from qrot.run.kept import keep_network
from qrot.run.lock import entered
from qrot.run.methods import METHODS
from qrot.run.prepare import prepare
from qrot.run.results import RESULTS, read_results, write_results
from qrot.run.track import check_trackers, tracking
from qrot.run.zeroshot import FILE, zeroshot_protocol

_STREAMS = (0, 2)  # the version since which each site draws from a stream of its own


def run(
    config: RunConfig, console: Console, *, report: Callable[[Path], None] = lambda folder: None
) -> dict[str, Any]:
    """Measure what the configuration asks for.

    A run folder that was begun with the same configuration goes on where it stopped. Where there
    is a gate, `qrot.run.results.read_gate` has what it found.

    Args:
        config: of the run.
        console: that progress goes to.
        report: called with the folder once all is measured, while no other run can enter it.

    Returns:
        The contents of results.json.

    Raises:
        InputError: where the configuration does not fit the model or the text, the folder belongs
            to another configuration or another run is in it, or a file cannot be written; what is
            in the folder by then is whole.
    """
    folder = Path(config.out)
    check_names(config)
    check_out(folder, config)
    check_trackers(config.track)
    with Stages(console) as stages:
        inputs = prepare(config, folder, stages)
        trackers = tracking(config.track, folder, resolved(config))
        with writing(folder), entered(folder), trackers as track:
            check_folder(folder, config)  # who was in it meanwhile?
            remove_halves(folder)
            inputs = replace(inputs, track=track)
            results = _measure(inputs)
            if config.gate is not None:
                judge_gate(config, results["rows"], lambda: inputs)
            report(folder)
            return results


def _measure(inputs: Inputs) -> dict[str, Any]:
    results = _begin(inputs)
    rows, folder = results["rows"], inputs.folder
    done = {(row["method"], row["seed"]) for row in rows}
    left = [row for row in planned(inputs.config) if row not in done]
    _check_streams(folder, results, left)
    for method, seed in left:
        row = _row(inputs, method, seed, rows)
        rows.append({**row, **_elsewhere(results.get("environment", {}))})
        write_results(folder / RESULTS, results)
        inputs.track(row_name(method, seed), None, row)
        (folder / FILE).unlink(missing_ok=True)  # is in the row now
    keep_anatomy(inputs, rows)
    return results


def _check_streams(
    folder: Path, results: dict[str, Any], left: list[tuple[str, int | None]]
) -> None:
    """Raise InputError where rows would join others in which a seed is other random numbers."""
    if not any(METHODS[method].seeds for method, _ in left):
        return
    begun = str(results.get("environment", {}).get("qrot"))
    version = re.match(r"(\d{1,9})\.(\d{1,9})", begun)
    if version is None:
        raise InputError(f"{folder / RESULTS}: environment.qrot: {short(begun)} is no version")
    if tuple(map(int, version.groups())) < _STREAMS:
        raise InputError(
            f"{folder}: was begun by qrot {begun}, in which a seed stood for other random numbers; "
            "choose another folder with out="
        )


def planned(config: RunConfig) -> list[tuple[str, int | None]]:
    """The rows of a run, each a method and a seed, in their order."""
    return [(method, seed) for method in config.methods for seed in _seeds(config, method)]


def results_so_far(config: RunConfig) -> dict[str, Any] | None:
    """What is in the results.json of a run; None where there is none yet.

    Raises:
        InputError: where it is damaged, or has a row that is none of the run, or one twice.
    """
    file = Path(config.out) / RESULTS
    results = read_results(file)
    left = planned(config)
    for row in results["rows"] if results else ():
        if (row["method"], row["seed"]) not in left:
            name = row_name(row["method"], row["seed"])
            raise InputError(f"{file}: {shown(name)}: is no row of this run, or is there twice")
        left.remove((row["method"], row["seed"]))
    return results


def _seeds(config: RunConfig, method: str) -> tuple[int | None, ...]:
    key = METHODS[method].seeds
    return (None,) if key is None else getattr(config, key)


def _begin(inputs: Inputs) -> dict[str, Any]:
    """The results so far; none yet for a new folder, which gets its config.yaml."""
    folder, protocol, tasks = inputs.folder, _protocol(inputs), zeroshot_protocol(inputs)
    results = results_so_far(inputs.config)
    if results is not None and (key := first_difference(results["protocol"], protocol)):
        raise InputError(
            f"{folder}: was measured with another {key} ({results['protocol'].get(key)}, now "
            f"{protocol.get(key)}); choose another folder with out="
        )
    if results is not None and (key := first_difference(results.get("zeroshot", {}), tasks)):
        raise InputError(
            f"{folder}: was measured with another zeroshot.{key}; choose another folder with out="
        )
    _write_config(folder / "config.yaml", inputs.config)
    if results is not None:
        return results
    about = {"protocol": protocol, "environment": environment()}
    return {**about, **({"zeroshot": tasks} if tasks else {}), "rows": []}


def _write_config(file: Path, config: RunConfig) -> None:
    """Write config.yaml into a new folder; in another one the gate alone may have changed."""
    if not file.exists():
        write_text(file, to_yaml(config))
        return
    old, gate = read_yaml(file), resolved(config)["gate"]
    if old.get("gate") != gate:
        write_text(file, dump_yaml({**old, "gate": gate}))


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


def _elsewhere(first: dict[str, Any]) -> dict[str, Any]:
    """For a row that is not measured where the first ones were: where it is."""
    here = environment()
    return {} if {**here, "date": first.get("date")} == first else {"environment": here}


def _row(
    inputs: Inputs, method: str, seed: int | None, earlier: list[dict[str, Any]]
) -> dict[str, Any]:
    """One method at one seed: build the network, judge it, keep it if that is asked for."""
    began, name = time.perf_counter(), row_name(method, seed)
    record = METHODS[method]
    prepared = record.prepare(inputs, name, seed or 0)
    network, rounding = build(inputs, name, prepared, record.scheme_of(inputs.config))
    scheme = network.scheme
    row = {
        "method": method,
        "seed": seed,
        "weights": scheme.weights.bits,
        "activations": scheme.activations.bits,
        "keys": scheme.keys.bits,
        "values": scheme.values.bits,
        **({} if scheme.in_integers else {"scheme": scheme.name}),
        **rounding,
        **judge(inputs, name, network),
        # Time that an interrupted run spent learning before is in learn_seconds.
        "seconds": time.perf_counter() - began + prepared.earlier_seconds,
        **prepared.facts,
    }
    # What was read from where it is kept stays there, but a gate judges what is in the folder.
    if prepared.network is None or inputs.config.gate is not None:
        keep_network(inputs, row, network, earlier)
    return row
