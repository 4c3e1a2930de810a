"""Bits of the weights by what rounding them costs: chosen for each row, and recorded."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Int

from qrot.errors import InputError
from qrot.evaluate.perplexity import spread_windows
from qrot.model.params import Network
from qrot.progress import forward_seconds
from qrot.quantize.mixed import Mixed, allocate, bits_per_weight, projection_sizes, with_bits
from qrot.quantize.sensitivity import sensitivity
from qrot.run.inputs import Inputs
from qrot.sites import PROJECTIONS


def mixed_bits(
    inputs: Inputs, settings: Mixed, name: str, network: Network
) -> tuple[Network, dict[str, Any]]:
    """Give each projection of each layer the bits that the budget allows.

    Args:
        inputs: of the run.
        settings: the budget.
        name: of the row.
        network: as it will be rounded.

    Returns:
        The network with a scheme of those bits, and what a row tells of it.

    Raises:
        InputError: where what is measured is not finite.
    """
    config, scheme = inputs.config, network.scheme
    began = time.perf_counter()
    rows = spread_windows(inputs.calibration, config.calibration.length, settings.windows)
    grids = tuple(replace(scheme.weights, bits=bits) for bits in settings.choices)
    seconds = (3 + len(grids)) * forward_seconds(inputs.millions, rows.size)
    parts = 2 * network.config.num_hidden_layers
    with inputs.stages.stage(f"{name}: sensitivity", parts, seconds=seconds) as advance:
        costs = sensitivity(network, rows, grids, batch=config.batch, advance=advance)
    if not np.isfinite(costs).all():
        raise InputError("mixed: what rounding costs is not finite on the calibration text")
    sizes = projection_sizes(network.params)
    bits = allocate(costs, sizes, settings.choices, float(settings.bits))
    alone, with_scales = bits_per_weight(network.params, scheme.weights, bits)
    expected = np.take_along_axis(costs, np.searchsorted(settings.choices, bits)[..., None], 2)
    return network.replace(scheme=with_bits(scheme, bits)), {
        "weights": float(settings.bits),
        "mixed": {
            "bits_per_weight": alone,
            "with_scales": with_scales,
            "expected_nats": float(expected.sum()),
            "seconds": time.perf_counter() - began,
            "bits": as_text(bits),
        },
    }


def as_text(bits: Int[np.ndarray, "layers projections"]) -> dict[str, str]:
    """By projection the bits of all layers, the first layer first."""
    return {
        name: " ".join(str(b) for b in column)
        for name, column in zip(PROJECTIONS, bits.T, strict=True)
    }
