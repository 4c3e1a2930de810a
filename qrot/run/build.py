"""From what a method has prepared to the network that is judged, kept and exported."""

from __future__ import annotations

import time
from typing import Any

import jax

from qrot.model.params import Network
from qrot.network import fuse
from qrot.progress import FUSE, ROUND, forward_seconds
from qrot.quantize.method import Rows, WeightMethod
from qrot.quantize.rtn import RTN
from qrot.run.config import RunConfig
from qrot.run.inputs import Inputs
from qrot.run.method import Prepared
from qrot.run.mixed import mixed_bits
from qrot.run.own_text import own_text, trained
from qrot.scheme import Scheme


def build(
    inputs: Inputs, name: str, prepared: Prepared, scheme: Scheme
) -> tuple[Network, dict[str, Any]]:
    """Fuse, finish, choose bits where the run has a budget of them, and round the weights.

    Args:
        inputs: of the run.
        name: of the row.
        prepared: what its method makes of it.
        scheme: that it is to have.

    Returns:
        The network, and what the row tells of its weights.
    """
    if prepared.network is not None:
        return prepared.network, {}
    network = inputs.network
    if prepared.transform is not None:
        with inputs.stages.stage(f"{name}: fusing", seconds=FUSE * inputs.millions):
            network = jax.block_until_ready(fuse(network, prepared.transform))
    network = network.replace(scheme=scheme)
    if prepared.finish is not None:
        network = prepared.finish(network)
    return _rounded(inputs, name, network) if scheme.rounds_weights else (network, {})


def _rounded(inputs: Inputs, name: str, network: Network) -> tuple[Network, dict[str, Any]]:
    """The weights on their grids by the run's method."""
    config, facts = inputs.config, {}
    if config.mixed is not None:
        network, facts = mixed_bits(inputs, config.mixed, name, network)
    record, began = config.weight_method, time.perf_counter()
    rows = _rows(inputs, record)
    title, parts = _stage(inputs, record)
    seconds = weight_seconds(config, inputs.millions)
    with inputs.stages.stage(f"{name}: {title}", parts, seconds=seconds) as advance:
        network = record.round(network, rows, config.weights, batch=config.batch, advance=advance)
        jax.block_until_ready(network)
    if record is not RTN:
        facts |= {"weight_method": record.name, "weight_seconds": time.perf_counter() - began}
    return network, facts | record.facts(config.weights)


def _rows(inputs: Inputs, record: WeightMethod) -> Rows | None:
    """The text that the method reads."""
    if record.text == "none":
        return None
    return inputs.calibration_rows if record.text == "calibration" else own_text(inputs)


def _stage(inputs: Inputs, record: WeightMethod) -> tuple[str, int | None]:
    """Title and parts of the stage that rounds."""
    if record.text == "none":
        return "rounding weights", None
    if record.text == "calibration":
        return record.label, inputs.network.config.num_hidden_layers
    return "training", trained(inputs.config).steps


def weight_seconds(config: RunConfig, millions: float) -> float:
    """What rounding the weights of one row takes, roughly.

    Args:
        config: of the run.
        millions: of parameters.
    """
    if config.weight_method.text == "none":
        return ROUND * millions
    if config.weight_method.text == "calibration":
        windows = config.calibration
        return 3 * forward_seconds(millions, windows.windows * windows.length)
    training = trained(config)
    return 2 * forward_seconds(millions, training.steps * training.batch * training.length)
