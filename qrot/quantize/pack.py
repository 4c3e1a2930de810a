"""Weights on a grid as the integers that they are, and what they take."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from qrot.errors import InputError
from qrot.grid import Grid
from qrot.kernels.pack import pack_int4
from qrot.model.linear import in_integers
from qrot.model.params import Layers, Linear, PackedLinear, Params
from qrot.sites import PROJECTIONS
from qrot.calibrate.moments import weight_grids
from qrot.quantize.rtn import weight_scale_and_zero
from qrot.rotation.forms import Shifts
from qrot.scheme import READERS, Scheme, layer_schemes

_scale_and_zero = jax.jit(weight_scale_and_zero, static_argnums=1)
_OFF_GRID = {4: 1e-3, 8: 1e-3, 2: 0.3}  # of a step, by bytes: what a number's rounding may do


def pack(
    rounded: Params, before: Params, scheme: Scheme, *, shifts: Shifts | None = None
) -> Params:
    """The same network with `PackedLinear` where `scheme.weights` rounds.

    rounded: on the grids whose scales follow from `before`, the weights as they were: what `rtn`
      and `gptq` return for it. shifts: as in the forward pass; their share of the output is kept.
    At most 4 bits take half a byte, up to 8 bits a byte; layers are stacked, so one with more bits
    has those of the others take as much, and a projection that one layer leaves at 16 bits is left
    alone in all.
    Raises InputError where weights are asymmetric or wider than 8 bits, and where `rounded` is not
    on such a grid.
    """
    count = rounded.layers.attention_norm.shape[0]
    weights, inputs = weight_grids(scheme, count), layer_schemes(scheme, count)
    sites = {name: site for site, names in READERS.items() for name in names}
    packed = {}
    for name in PROJECTIONS:
        grids = [grid[name] for grid in weights]
        if any(not grid.on for grid in grids):
            continue
        _check(grids, name)
        layers, linear = [], getattr(rounded.layers, name)
        shift = getattr(shifts, sites[name], None)
        sums = any(_keeps_zero(getattr(own, sites[name])) for own in inputs)
        bits = max(grid.bits for grid in grids)
        for i, grid in enumerate(grids):
            part = jax.tree.map(lambda x, i=i: x[i], linear)
            layers.append(
                _packed(
                    part,
                    getattr(before.layers, name).weight[i],
                    grid,
                    f"{name} of layer {i}",
                    bits=bits,
                    sums=sums,
                    shift=None if shift is None else shift[i],
                )
            )
        packed[name] = jax.tree.map(lambda *x: jnp.stack(x), *layers)
    return rounded.replace(layers=rounded.layers.replace(**packed))


def _keeps_zero(grid: Grid) -> bool:
    """Whether codes less their zero point would not fit into 8 bits."""
    return in_integers(grid) and grid.kind == "asymmetric" and grid.bits == 8


def _check(grids: list[Grid], name: str) -> None:
    if any(grid.bits > 8 for grid in grids):
        raise InputError(f"{name}: weights of more than 8 bits are not packed")
    if any(grid.kind == "asymmetric" for grid in grids):
        raise InputError(
            f"{name}: weights on an asymmetric grid are not packed; choose a symmetric"
        )


def _packed(
    linear: Linear,
    before: Float[Array, "in out"],
    grid: Grid,
    where: str,
    *,
    bits: int,
    sums: bool,
    shift: Any,
) -> PackedLinear:
    weight = linear.weight
    scale, _ = _scale_and_zero(before, grid)
    steps = weight / scale
    codes = jnp.round(steps)
    if not bool((jnp.abs(steps - codes) < _OFF_GRID[weight.dtype.itemsize]).all()):
        raise InputError(
            f"{where}: the weights are not on the grid of the scheme; only those that rtn and gptq "
            "rounded are packed"
        )
    groups = 1 if grid.group is None else weight.shape[0] // grid.group
    codes = codes.astype(jnp.int8).reshape(groups, -1, weight.shape[1])
    shifted = None if shift is None else shift.astype(weight.dtype) @ weight
    return PackedLinear(
        codes=pack_int4(codes, axis=1) if bits <= 4 else codes,
        scale=scale.reshape(codes.shape)[:, 0],
        sums=codes.sum(1, dtype=jnp.int32) if sums else None,
        shifted=shifted,
        bias=linear.bias,
        bits=bits,
    )


def linear_bytes(layers: Layers) -> tuple[int, int]:
    """(bytes that the linear layers take with their scales and biases, weights in them)."""
    total = weights = 0
    for name in PROJECTIONS:
        linear = getattr(layers, name)
        total += sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(linear))
        if isinstance(linear, PackedLinear):
            weights += linear.codes.size * (2 if linear.bits <= 4 else 1)
        else:
            weights += linear.weight.size
    return total, weights
