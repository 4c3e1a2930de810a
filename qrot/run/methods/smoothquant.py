"""SmoothQuant: scales that move the outliers of activations into the weights."""

from __future__ import annotations

from qrot.progress import forward_seconds
from qrot.quantize.smoothquant import smoothquant
from qrot.run.about import keep_transform, kept_transform
from qrot.run.config import RunConfig
from qrot.run.inputs import Inputs
from qrot.run.method import Method, Prepared


def prepare(inputs: Inputs, name: str, seed: int) -> Prepared:
    """The scales, kept in a file, and the alpha that they were made with."""
    config = inputs.config
    network = inputs.network.replace(scheme=config.scheme)
    stage = inputs.stages.stage(
        f"{name}: calibrating",
        network.config.num_hidden_layers,
        seconds=seconds(config, inputs.millions),
    )
    with stage as advance:
        transform, alpha = smoothquant(
            network,
            inputs.calibration_rows,
            config.smoothquant,
            batch=config.batch,
            advance=advance,
        )
    keep_transform(inputs, RECORD.name, transform)
    return Prepared(transform, {"alpha": alpha})


def seconds(config: RunConfig, millions: float) -> float:
    """What going through the layers takes, roughly."""
    return 2 * forward_seconds(millions, config.calibration.windows * config.calibration.length)


RECORD = Method(
    "smoothquant",
    prepare,
    text="calibration",
    section="smoothquant",
    recall=kept_transform,
    seconds=seconds,
)
