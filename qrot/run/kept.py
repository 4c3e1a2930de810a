"""The networks that stay in a run folder: what was judged is what is exported."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from qrot.errors import InputError
from qrot.files.plain import readable
from qrot.model.params import Network
from qrot.progress import ROUND
from qrot.quantize.keep import read_about, save_network
from qrot.run.about import about, row_name
from qrot.run.inputs import Inputs
from qrot.run.methods import METHODS
from qrot.run.results import GATE, GATE_XML, RESULTS

FILE = "network.safetensors"  # of the best row
FOLDER = "networks"  # a file for each row


def keep_network(
    inputs: Inputs, row: dict[str, Any], network: Network, earlier: Sequence[dict[str, Any]]
) -> None:
    """Keep the network of a row, if its weights are rounded or a gate is to judge it, and the run
    keeps it. What a gate has found of another one is taken away.

    Args:
        inputs: of the run.
        row: of results.
        network: that was judged.
        earlier: the rows of results before it.

    Raises:
        OSError: where it cannot be written.
    """
    config, name = inputs.config, row_name(row["method"], row["seed"])
    keep, exact = config.keep, METHODS[row["method"]].scheme is not None
    wanted = network.scheme.rounds_weights or config.gate is not None
    if keep == "none" or exact or not wanted:
        return
    if keep == "all":
        file = inputs.folder / FOLDER / f"{re.sub(r'[^a-z0-9]+', '-', name)}.safetensors"
        file.parent.mkdir(exist_ok=True)
    elif row["nll"] < _best(inputs.folder / FILE, earlier):
        file = inputs.folder / FILE
    else:
        return
    for verdict in (GATE, GATE_XML):
        (inputs.folder / verdict).unlink(missing_ok=True)
    metadata = about(inputs, row["method"], row["seed"], network.scheme)
    facts = {key: value for key, value in row.items() if key not in metadata}
    with inputs.stages.stage(f"{name}: keeping the network", seconds=ROUND * inputs.millions):
        save_network(file, network, {**metadata, **facts, "weight_bits": row["weights"]})


def best_kept(folder: Path, rows: Sequence[dict[str, Any]]) -> tuple[Path, dict[str, Any]]:
    """The kept network that stands for a run, and the row that it is of: the one that `qrot export`
    takes, or where all were kept the best.

    Args:
        folder: of the run.
        rows: of its results.json.

    Raises:
        InputError: where none was kept, or one that is of no row.
    """
    with readable(folder):
        files = [folder / FILE] if (folder / FILE).is_file() else []
        files = files or sorted((folder / FOLDER).glob("*.safetensors"))
    found = [pair for file in files for pair in _row_of(file, rows)]
    if not files:
        raise InputError(
            f"{folder}: kept no network; run it with a gate, or with weights that are rounded, and "
            "keep=best, in another folder"
        )
    if not found:
        raise InputError(f"{files[0]}: is of no row in {RESULTS}; finish the run first")
    return min(found, key=lambda pair: pair[1]["nll"])


def _row_of(file: Path, rows: Sequence[dict[str, Any]]) -> Iterator[tuple[Path, dict[str, Any]]]:
    about = read_about(file)
    for row in rows:
        if all(about.get(key) == row[key] for key in ("method", "seed", "nll")):
            yield file, row


def _best(file: Path, earlier: Sequence[dict[str, Any]]) -> float:
    """Nats a token of the network that is in the file, if it is that of an earlier row.

    A run that was killed may have left that of a row which results.json has not.
    """
    if not file.exists():
        return float("inf")
    kept = read_about(file)
    known = {(row["method"], row["seed"], row["nll"]) for row in earlier}
    there = (kept.get("method"), kept.get("seed"), kept.get("nll"))
    return kept["nll"] if there in known else float("inf")
