"""SliceGPT: the principal directions of the residual stream, those cut off that are not kept."""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp

from qrot.progress import forward_seconds
from qrot.quantize.slicegpt import cut, principal_directions
from qrot.rotation.forms import Dense
from qrot.rotation.transform import Transform
from qrot.run.config import RunConfig
from qrot.run.inputs import Inputs
from qrot.run.method import Method, Prepared


def prepare(inputs: Inputs, name: str, seed: int) -> Prepared:
    """The directions, fused as a rotation, and then the cut."""
    network, rows = inputs.network, inputs.calibration_rows
    config = network.config
    stage = inputs.stages.stage(
        f"{name}: directions",
        config.num_hidden_layers,
        seconds=seconds(inputs.config, inputs.millions),
    )
    with stage as advance:
        found = principal_directions(network, rows, batch=inputs.config.batch, advance=advance)
    kept = inputs.config.slicegpt.kept(config.hidden_size)
    residual = Dense(jnp.asarray(found, jnp.float32))
    return Prepared(
        Transform({"residual": residual}), {"hidden_kept": kept}, finish=partial(cut, kept=kept)
    )


def seconds(config: RunConfig, millions: float) -> float:
    """What going through the layers takes, roughly."""
    return 2 * forward_seconds(millions, config.calibration.windows * config.calibration.length)


RECORD = Method("slicegpt", prepare, text="calibration", section="slicegpt", seconds=seconds)
