"""The gate: the network that a run keeps against the model in full precision, and limits on it.

What is judged is the file that is exported, read again. gate.json has the verdict and all that was
measured, so that other limits need no new measurement; gate.xml has it for CI systems.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from rich.console import Console

from qrot.errors import InputError
from qrot.files.whole import write_text
from qrot.identity import digest
from qrot.progress import Stages
from qrot.quantize.keep import read_about
from qrot.run.config import RunConfig
from qrot.run.environment import environment
from qrot.run.fidelity import kept_network, on_texts, site_costs
from qrot.run.folder import writing
from qrot.run.inputs import Inputs
from qrot.run.kept import best_kept
from qrot.run.limits import OF_TEXT, Gate, gate_texts
from qrot.run.lock import entered
from qrot.run.methods import METHODS
from qrot.run.prepare import prepare
from qrot.run.read import read_run
from qrot.run.results import GATE, GATE_XML, RESULTS, read_gate, read_results
from qrot.run.verdict import junit, lines, zeroshot_drop


def gate_run(
    folder: Path,
    overrides: Sequence[str],
    console: Console,
    *,
    report: Callable[[Path], None] = lambda folder: None,
) -> dict[str, Any]:
    """Judge a run that is done by its gate, or by limits that it did not have.

    What was measured of the same network before is not measured again.

    Args:
        folder: of the run.
        overrides: settings of the gate on top of those in its config.yaml, such as `kl=0.1`.
        console: that progress goes to.
        report: called with the folder once gate.json is written, while no run can enter it.

    Returns:
        The contents of gate.json.

    Raises:
        InputError: where there is no such run, it kept no network, no limit is set, or what is
            asked for cannot be measured.
    """
    config = read_run(folder, [f"gate.{override}" for override in overrides])
    if config.gate is None:
        raise InputError(f"{folder / 'config.yaml'}: has no gate; give limits, such as kl=0.1")
    config = replace(config, out=str(folder))
    with Stages(console) as stages, writing(folder), entered(folder):
        rows = _rows(folder)

        def inputs() -> Inputs:
            return prepare(_needed(config, best_kept(folder, rows)[1]), folder, stages)

        found = judge_gate(config, rows, inputs)
        report(folder)
        return found


def _rows(folder: Path) -> list[dict[str, Any]]:
    results = read_results(folder / RESULTS)
    if results is None:
        raise InputError(f"{folder}: has no {RESULTS} yet; `qrot run` comes first")
    return results["rows"]


def _needed(config: RunConfig, row: Mapping[str, Any]) -> RunConfig:
    """The part of a configuration that the gate of a row needs: files of other methods may be gone,
    and where no site is looked at also those of its own."""
    methods = tuple(name for name, record in METHODS.items() if not record.fuses)
    if config.gate is not None and config.gate.site_cost is not None:
        methods = (row["method"],)
    return replace(config, methods=methods, other=None, zeroshot=None)


def judge_gate(
    config: RunConfig, rows: Sequence[dict[str, Any]], inputs: Callable[[], Inputs]
) -> dict[str, Any]:
    """Compare the network that a run has kept with full precision, in gate.json and gate.xml.

    Args:
        config: of the run, with a gate.
        rows: of its results.json.
        inputs: makes what is measured with; not called where all of it is known.

    Returns:
        The contents of gate.json.

    Raises:
        InputError: where no network was kept, it is one of another model, or what is asked for
            cannot be measured.
        OSError: where a file cannot be written.
    """
    folder, gate = Path(config.out), config.gate
    if gate is None:
        raise InputError(f"{folder}: has no gate")
    file, row = best_kept(folder, rows)
    of, old, began = _of(config, gate, file), read_gate(folder / GATE), time.perf_counter()
    known = old if old is not None and old["of"] == of else None
    measured = _measured(gate, {} if known is None else known["measured"], file, row, inputs)
    limits = lines(gate, measured, _drop(gate, rows, row))
    told = {"environment": environment(), "seconds": time.perf_counter() - began}
    if known is not None and known["measured"] == measured:
        told = {key: known[key] for key in told}
    found = {
        "passed": all(line["passed"] for line in limits),
        "of": of,
        "settings": TypeAdapter(Gate).dump_python(gate, mode="json"),
        "limits": limits,
        "measured": measured,
        **told,
    }
    if found != old or not (folder / GATE_XML).exists():
        write_text(folder / GATE_XML, junit(found))
        write_text(folder / GATE, json.dumps(found, indent=2) + "\n")
    return found


def _of(config: RunConfig, gate: Gate, file: Path) -> dict[str, Any]:
    """All that the values depend on."""
    about = read_about(file)
    return {
        "row": about.get("row"),
        "network": str(file.relative_to(config.out)),
        "digest": digest([file]),
        "model": about.get("model"),
        "fingerprint": (about.get("fingerprint") or {}).get("total", about.get("digest")),
        "texts": [name for name, _ in gate_texts(gate, config.data)],
        "windows": asdict(config.evaluate),
        "batch": config.batch,
        "compute": config.compute_dtype,
        "calibration": asdict(config.data),
        "captured": [config.learn.windows, config.learn.length, config.learn.vectors],
        "held_out": config.learn.held_out,
    }


def _measured(
    gate: Gate,
    known: Mapping[str, Any],
    file: Path,
    row: Mapping[str, Any],
    inputs: Callable[[], Inputs],
) -> dict[str, Any]:
    """What is known already, and what the limits need beside it."""
    texts = "texts" not in known and any(name in gate.limits for name in OF_TEXT)
    sites = "site_costs" not in known and gate.site_cost is not None
    if not (texts or sites):
        return dict(known)
    with_it = inputs()
    network, found = kept_network(with_it, file), dict(known)
    if sites:  # first, since it may be that it cannot be measured
        found["site_costs"] = site_costs(with_it, row, network.scheme)
    if texts:
        found["texts"] = on_texts(with_it, network)
    return found


def _drop(gate: Gate, rows: Sequence[Mapping[str, Any]], row: Mapping[str, Any]) -> dict[str, Any]:
    """The drop of the scores, where there is a limit on it."""
    if gate.zeroshot_drop is None:
        return {}
    exact = next((one for one in rows if METHODS[one["method"]].scheme is not None), None)
    if exact is None:
        raise InputError("gate.zeroshot_drop: results.json has no row of full precision")
    return zeroshot_drop(exact, row)
