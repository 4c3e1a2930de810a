"""How the weights of a row are rounded.

A new way is a function (inputs, name of the row, fused network, scheme) -> parameters, a line in
WEIGHT_METHODS, and its name in `qrot.run.config`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax

from qrot.run.mixed import mixed_bits
from qrot.run.prepare import Fused, Inputs
from qrot.run.qat import trained_row
from qrot.progress import ROUND, forward_seconds, millions
from qrot.model.params import Params
from qrot.quantize.awq import awq
from qrot.quantize.gptq import gptq
from qrot.quantize.quip import quip, quip_sharp
from qrot.quantize.rtn import rtn
from qrot.scheme import Scheme


def rounded(
    inputs: Inputs, name: str, fused: Fused, scheme: Scheme
) -> tuple[Params, dict[str, Any]]:
    """Weights on their grids by the run's method, and what a row tells of it."""
    if not scheme.rounds_weights:
        return fused.params, {}
    facts = {}
    if (mixed := inputs.config.mixed) is not None:
        scheme, facts = mixed_bits(inputs, mixed, name, fused, scheme)
    method, began = inputs.config.weight_method, time.perf_counter()
    params = WEIGHT_METHODS[method](inputs, name, fused, scheme)
    jax.block_until_ready(params)
    if method != "rtn":
        facts |= {"weight_method": method, "weight_seconds": time.perf_counter() - began}
    if method.startswith("quip"):
        facts["sign_seed"] = inputs.config.quip.seed
    return params, facts


def _rtn(inputs: Inputs, name: str, fused: Fused, scheme: Scheme) -> Params:
    with inputs.stages.stage(f"{name}: rounding weights", seconds=ROUND * millions(inputs.model)):
        return jax.block_until_ready(rtn(fused.params, scheme))


def _gptq(inputs: Inputs, name: str, fused: Fused, scheme: Scheme) -> Params:
    return _by_layer(inputs, f"{name}: GPTQ", gptq, fused, scheme, inputs.config.gptq)


def _awq(inputs: Inputs, name: str, fused: Fused, scheme: Scheme) -> Params:
    return _by_layer(inputs, f"{name}: AWQ", awq, fused, scheme, inputs.config.awq)


def _quip(inputs: Inputs, name: str, fused: Fused, scheme: Scheme) -> Params:
    return _by_layer(inputs, f"{name}: QuIP", quip, fused, scheme, inputs.config.quip)


def _quip_sharp(inputs: Inputs, name: str, fused: Fused, scheme: Scheme) -> Params:
    settings = inputs.config.quip
    return _by_layer(inputs, f"{name}: QuIP#", quip_sharp, fused, scheme, settings)


def _by_layer(
    inputs: Inputs, stage: str, method: Callable, fused: Fused, scheme: Scheme, settings
) -> Params:
    """A method that goes through the layers with the calibration windows."""
    rows, config = inputs.calibration_rows, inputs.model.config
    seconds = 3 * forward_seconds(inputs.model, rows.size)
    with inputs.stages.stage(stage, config.num_hidden_layers, seconds=seconds) as advance:
        return jax.block_until_ready(
            method(
                fused.params,
                scheme,
                config,
                rows,
                rotations=fused.online,
                settings=settings,
                batch=inputs.config.batch,
                advance=advance,
            )
        )


WEIGHT_METHODS: dict[str, Callable[[Inputs, str, Fused, Scheme], Params]] = {
    "rtn": _rtn,
    "gptq": _gptq,
    "awq": _awq,
    "quip": _quip,
    "quip_sharp": _quip_sharp,
    "qat": trained_row,
}
