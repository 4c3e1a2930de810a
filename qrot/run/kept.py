"""The networks that stay in a run folder: what was judged is what is exported."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qrot.model.params import Network
from qrot.progress import ROUND
from qrot.quantize.keep import read_about, save_network
from qrot.run.about import about, row_name
from qrot.run.inputs import Inputs

FILE = "network.safetensors"  # of the best row
FOLDER = "networks"  # a file for each row


def keep_network(
    inputs: Inputs, row: dict[str, Any], network: Network, earlier: Sequence[dict[str, Any]]
) -> None:
    """Keep the network of a row, if its weights are rounded and the run keeps it.

    Args:
        inputs: of the run.
        row: of results.
        network: that was judged.
        earlier: the rows of results before it.

    Raises:
        OSError: where it cannot be written.
    """
    keep, name = inputs.config.keep, row_name(row["method"], row["seed"])
    if keep == "none" or not network.scheme.rounds_weights:
        return
    if keep == "all":
        file = inputs.folder / FOLDER / f"{re.sub(r'[^a-z0-9]+', '-', name)}.safetensors"
        file.parent.mkdir(exist_ok=True)
    elif row["nll"] < _best(inputs.folder / FILE, earlier):
        file = inputs.folder / FILE
    else:
        return
    metadata = about(inputs, row["method"], row["seed"], network.scheme)
    facts = {key: value for key, value in row.items() if key not in metadata}
    with inputs.stages.stage(f"{name}: keeping the network", seconds=ROUND * inputs.millions):
        save_network(file, network, {**metadata, **facts, "weight_bits": row["weights"]})


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
