"""How far the kept network of a run is from full precision: in what it predicts, site by site."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from qrot.calibrate.capture import capture
from qrot.errors import InputError
from qrot.evaluate.divergence import compare
from qrot.learn.batches import split_text
from qrot.model.params import Network
from qrot.progress import ROUND, forward_seconds
from qrot.quantize.keep import load_network
from qrot.rotation.about import check_model
from qrot.rotation.transform import Transform
from qrot.run import inspect
from qrot.run.inputs import GateText, Inputs
from qrot.run.judge import check_finite, logits_of
from qrot.run.methods import METHODS
from qrot.run.results import row_name
from qrot.run.verdict import short_name
from qrot.scheme import Scheme


def kept_network(inputs: Inputs, file: Path) -> Network:
    """A network out of the file that it was kept in.

    Raises:
        InputError: where it is damaged, or one of another model.
    """
    with inputs.stages.stage("gate: reading the network", seconds=ROUND * inputs.millions):
        network, about = load_network(file, inputs.network.config)
        check_model(file, about, inputs.model.identity, allow=inputs.config.allow_mismatch)
        return jax.block_until_ready(jax.tree.map(jnp.asarray, network))


def on_texts(inputs: Inputs, network: Network) -> list[dict[str, Any]]:
    """A network against full precision on each text of the gate, as gate.json has it.

    Args:
        inputs: of the run.
        network: as it is deployed.

    Raises:
        InputError: where a loss is not finite.
    """
    return [_on_text(inputs, network, text) for text in inputs.gated]


def _on_text(inputs: Inputs, network: Network, text: GateText) -> dict[str, Any]:
    config, name = inputs.config, f"gate: {short_name(text.name)}"
    exact = logits_of(inputs.network.replace(scheme=Scheme()), config.compute_dtype)
    ours = logits_of(network, config.compute_dtype)
    seconds = 2 * forward_seconds(inputs.millions, text.rows.size)
    with inputs.stages.stage(name, len(text.rows), seconds=seconds) as advance:
        found = compare(
            exact, ours, text.rows, config.evaluate, batch=config.batch, advance=advance
        )
    for nats in (found.exact_nll, found.nll, found.kl):
        check_finite(nats, name, config.compute_dtype)
    above = found.nll - found.exact_nll
    ratio = math.exp(min(above, 700))
    return {"text": text.name, **found._asdict(), "nats": above, "perplexity_ratio": ratio}


def site_costs(inputs: Inputs, row: Mapping[str, Any], scheme: Scheme) -> dict[str, float]:
    """What rounding is expected to cost at each site, summed over the layers, in nats a token.

    On the windows of the calibration text that learning captures first.

    Args:
        inputs: of the run.
        row: of results, whose transform makes the basis of each site.
        scheme: with the grids.

    Raises:
        InputError: where the transform of the row is not known.
    """
    settings, transform = inputs.config.learn, _transform(inputs, row)
    rows = split_text(inputs.calibration, settings).rows[: settings.windows]
    network = inputs.network.replace(scheme=scheme)
    seconds = 4 * forward_seconds(inputs.millions, rows.size)
    stage = inputs.stages.stage("gate: costs of the sites", 2, seconds=seconds)
    with stage as advance:
        captured, _ = capture(network, rows, vectors=settings.vectors, seed=0, gradients=True)
        advance()
        return inspect.site_costs(network, transform, captured)


def _transform(inputs: Inputs, row: Mapping[str, Any]) -> Transform:
    record = METHODS[row["method"]]
    transform = record.recall(inputs, row)
    if transform is None and record.fuses:
        name = row_name(row["method"], row["seed"])
        raise InputError(
            f"gate.site_cost: cannot be measured, since what {name} put on the network is not kept "
            "apart from its weights"
        )
    return transform or Transform()
