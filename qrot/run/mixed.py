"""Bits of the weights by what rounding them costs: chosen for each row, recorded, and drawn."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Int
from rich.console import Group
from rich.table import Table
from rich.text import Text

from qrot.errors import InputError
from qrot.evaluate.perplexity import spread_windows
from qrot.run.prepare import Fused, Inputs
from qrot.progress import forward_seconds
from qrot.quantize.sensitivity import sensitivity
from qrot.sites import PROJECTIONS
from qrot.quantize.mixed import Mixed, allocate, bits_per_weight, projection_sizes, with_bits
from qrot.scheme import Scheme

_WIDTH = 60  # layers in a line
_COLOURS = ("grey70", "sky_blue1", "green3", "yellow3", "orange1", "red3")  # few bits to many


def mixed_bits(
    inputs: Inputs,
    settings: Mixed,
    name: str,
    fused: Fused,
    scheme: Scheme,
) -> tuple[Scheme, dict[str, Any]]:
    """The scheme with the bits that the budget allows each projection, and what a row tells of it.

    fused: as it will be rounded. Raises InputError where what is measured is not finite.
    """
    config, model, params = inputs.config, inputs.model.config, fused.params
    began = time.perf_counter()
    rows = spread_windows(inputs.calibration, config.calibration.length, settings.windows)
    grids = tuple(replace(scheme.weights, bits=bits) for bits in settings.choices)
    seconds = (3 + len(grids)) * forward_seconds(inputs.model, rows.size)
    parts = 2 * model.num_hidden_layers
    with inputs.stages.stage(f"{name}: sensitivity", parts, seconds=seconds) as advance:
        costs = sensitivity(
            params, model, rows, grids, rotations=fused.online, batch=config.batch, advance=advance
        )
    if not np.isfinite(costs).all():
        raise InputError("mixed: what rounding costs is not finite on the calibration text")
    bits = allocate(costs, projection_sizes(params), settings.choices, float(settings.bits))
    alone, with_scales = bits_per_weight(params, scheme.weights, bits)
    expected = np.take_along_axis(costs, np.searchsorted(settings.choices, bits)[..., None], 2)
    return with_bits(scheme, bits), {
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


def bits_maps(results: dict[str, Any]) -> list[Group]:
    """For a terminal: a picture of the bits of each row that has mixed ones, a layer a column."""
    return [
        drawn for row in results["rows"] if "mixed" in row for drawn in _maps(row, row["mixed"])
    ]


def _maps(row: dict[str, Any], mixed: dict[str, Any]) -> list[Group]:
    bits = {name: text.split() for name, text in mixed["bits"].items()}
    layers = len(bits[PROJECTIONS[0]])
    names = sorted({b for column in bits.values() for b in column}, key=int)
    colours = dict(zip(names, _COLOURS, strict=False))
    width = max(len(b) for b in names)
    seed = "" if row["seed"] is None else f", seed {row['seed']}"
    name = row["method"].replace("_", " ") + seed
    maps = []
    for start in range(0, layers, _WIDTH // width):
        stop = min(start + _WIDTH // width, layers)
        title = f"{name}: bits of the weights in layers {start} to {stop - 1}"
        drawn = Table(box=None, show_header=False, pad_edge=False)
        for projection, column in bits.items():
            cells = [
                (b.rjust(width), f"black on {colours.get(b, _COLOURS[-1])}")
                for b in column[start:stop]
            ]
            drawn.add_row(projection, Text.assemble(*cells))
        maps.append(Group(title, drawn))  # a title of the table's own would wrap at its width
    return maps
