"""Mixed precision: a budget of bits, spent where rounding costs most.

What rounding one projection of one layer costs is measured in `qrot.quantize.sensitivity`. Here the
bits are chosen, and said as a scheme.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np
from jaxtyping import Float, Int

from qrot.errors import InputError
from qrot.grid import OFF, Grid
from qrot.model.params import Params
from qrot.records import check_count
from qrot.scheme import Override, Scheme
from qrot.sites import PROJECTIONS


@dataclass(frozen=True)
class Mixed:
    """A budget of bits for the weights.

    Attributes:
        bits: what a weight may have on average, scales not counted.
        choices: what a projection may have.
        windows: of the calibration text, to measure by what rounding costs.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    bits: float = 3.5
    choices: tuple[int, ...] = (2, 3, 4, 6, 8)
    windows: int = 8

    def __post_init__(self):
        choices = list(self.choices)
        if (
            not choices
            or choices != sorted(set(choices))
            or not 2 <= choices[0] <= choices[-1] <= OFF
        ):
            raise InputError(f"mixed.choices: {choices} are not rising numbers from 2 to {OFF}")
        if not choices[0] <= self.bits <= choices[-1]:
            raise InputError(
                f"mixed.bits: {self.bits:g} is outside the choices, {choices[0]} to {choices[-1]}"
            )
        check_count(self.windows, "mixed.windows")


def check_scheme(scheme: Scheme) -> None:
    """Raise InputError where the scheme has no weights whose bits could be chosen."""
    if not scheme.weights.on:
        raise InputError(f"mixed: scheme.weights.bits is {OFF}, so that no weight is rounded")
    if not scheme.weights.integers:
        raise InputError(
            f"mixed: chooses bits of integers, and scheme.weights is {scheme.weights.label}"
        )
    if any(override.weights is not None for override in scheme.overrides):
        raise InputError("mixed: chooses the bits of all weights; no override can set any")


def allocate(
    costs: Float[np.ndarray, "layers projections choices"],
    sizes: Int[np.ndarray, " projections"],
    choices: Sequence[int],
    bits: float,
) -> Int[np.ndarray, "layers projections"]:
    """The bits of each projection of each layer, of least total cost within the budget.

    This is the knapsack problem with one of several choices an item, solved exactly: with f(u) the
    least cost of the items so far in u units of bits, f'(u) = min_c f(u - size (b_c - b_0)) + cost.
    All projections have hidden_size as one of their sides, so that units are large and u is small.
    Of equal costs the fewer bits win.

    Args:
        costs: of each choice.
        sizes: weights of a projection in one layer.
        choices: bits, rising.
        bits: what the mean bits of a weight come to at most.

    Raises:
        ValueError: where the budget is below the least choice.
    """
    layers = len(costs)
    total, least = int(sizes.sum()) * layers, choices[0]
    steps = np.asarray(choices) - least
    unit = reduce(math.gcd, [int(s) * int(step) for s in sizes for step in steps[1:]], 0) or 1
    room = math.floor((bits - least) * total / unit + 1e-6)
    if room < 0:
        raise ValueError(f"{bits} bits are below {least}, the least there is to choose")
    items = costs.reshape(-1, len(choices)).astype(np.float64)
    spends = np.outer(np.tile(sizes, layers), steps) // unit
    best = np.zeros(room + 1)
    chosen = np.zeros((len(items), room + 1), np.int8)
    for item, (cost, spend) in enumerate(zip(items, spends, strict=True)):
        each = np.full((len(choices), room + 1), np.inf)
        for c, u in enumerate(spend):
            if u <= room:
                each[c, u:] = best[: room + 1 - u] + cost[c]
        chosen[item] = each.argmin(0)  # the first of equals
        best = np.take_along_axis(each, chosen[item][None].astype(int), 0)[0]
    found = np.zeros(len(items), int)
    for item in reversed(range(len(items))):
        found[item] = chosen[item, room]
        room -= spends[item, found[item]]
    return np.asarray(choices)[found].reshape(layers, len(sizes))


def with_bits(scheme: Scheme, bits: Int[np.ndarray, "layers projections"]) -> Scheme:
    """The scheme with these bits for the weights, all else as it was."""
    overrides = tuple(
        Override(f"layers.{i}.{name}", weights=int(b))
        for i, row in enumerate(bits)
        for name, b in zip(PROJECTIONS, row, strict=True)
    )
    return replace(scheme, overrides=scheme.overrides + overrides)


def projection_sizes(params: Params) -> Int[np.ndarray, " projections"]:
    """The number of weights of each projection in one layer."""
    return np.array([math.prod(_weight(params, name).shape[1:]) for name in PROJECTIONS])


def bits_per_weight(
    params: Params, grid: Grid, bits: Int[np.ndarray, "layers projections"]
) -> tuple[float, float]:
    """Bits per weight of the linear layers: of their integers alone, and with the scales.

    A scale is a number of 16 bits, and a zero point has as many bits as the weights it goes with.

    Args:
        params: whose weights they are.
        grid: of the weights, but for its bits.
        bits: of each projection.
    """
    sizes = projection_sizes(params)
    outputs = np.array([_weight(params, name).shape[2] for name in PROJECTIONS])
    if grid.granularity == "tensor":
        scales = np.ones_like(sizes)
    else:
        scales = outputs if grid.group is None else sizes // grid.group
    each = np.where(bits < OFF, 16 + bits * (grid.kind == "asymmetric"), 0)
    total, alone = sizes.sum() * len(bits), (sizes * bits).sum()
    return float(alone / total), float((alone + (scales * each).sum()) / total)


def _weight(params: Params, name: str):
    return params.layers.linear(name).weight
