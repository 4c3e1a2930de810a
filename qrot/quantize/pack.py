"""Weights on a grid as the integers that they are, and what they take."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int8

from qrot.errors import InputError
from qrot.grid import Grid
from qrot.kernels.pack import pack_int4
from qrot.model.linear import in_integers
from qrot.model.params import Layers, Linear, Network, PackedLinear
from qrot.quantize.method import network_grids
from qrot.rotation.transform import Transform
from qrot.sites import PROJECTIONS, SITE_OF

_OFF_GRID = {4: 1e-3, 8: 1e-3, 2: 0.3}  # of a step, by bytes: what a number's rounding may do


def pack(network: Network) -> Network:
    """The same network with `PackedLinear` where `network.scheme.weights` rounds.

    At most 4 bits take half a byte, up to 8 bits a byte; layers are stacked, so one with more bits
    has those of the others take as much, and a projection that one layer leaves at 16 bits is left
    alone in all.

    Args:
        network: with weights that rtn, gptq, awq or qat rounded.

    Raises:
        InputError: where weights are asymmetric or wider than 8 bits.
        ValueError: where weights are not on the grid of the scheme, or a transform is not fused.
    """
    if isinstance(network.online, Transform) and jax.tree.leaves(network.online):
        raise ValueError("integers are of the weights that the network has: fuse first")
    layers, grids, packed = network.params.layers, network_grids(network), {}
    for name in PROJECTIONS:
        each = [own.weights[name] for own in grids]
        if not all(grid.on for grid in each):
            continue
        linear = layers.linear(name)
        _check(linear, each, name)
        codes, near = _codes(linear.weight, linear.scale)
        if not bool(near):
            raise ValueError(f"{name}: the weights are not on the grid of the scheme")
        packed[name] = _packed(
            linear,
            codes,
            linear.scale,
            network.online.shifts.get(SITE_OF[name]),
            bits=max(grid.integer_bits or 0 for grid in each),
            sums=any(_keeps_zero(own.sites[SITE_OF[name]]) for own in grids),
        )
    return network.replace(params=network.params.replace(layers=layers.replace(**packed)))


def _keeps_zero(grid: Grid) -> bool:
    """Whether codes less their zero point would not fit into 8 bits."""
    return in_integers(grid) and grid.kind == "asymmetric" and grid.bits == 8


def _check(linear: Linear, grids: list[Grid], name: str) -> None:
    if any(grid.integer_bits is None for grid in grids):
        raise InputError(f"{name}: weights in {grids[0].label} are no integers, so not packed")
    if any(grid.bits > 8 for grid in grids):
        raise InputError(f"{name}: weights of more than 8 bits are not packed")
    if any(grid.kind == "asymmetric" for grid in grids):
        raise InputError(
            f"{name}: weights on an asymmetric grid are not packed; choose a symmetric"
        )
    if linear.scale is None:
        raise ValueError(f"{name}: only weights that rtn, gptq, awq and qat rounded are packed")


@jax.jit
def _codes(
    weight: Float[Any, "layers in out"], scale: Float[Any, "layers groups out"]
) -> tuple[Int8[Array, "layers groups rows out"], Bool[Array, ""]]:
    """(Integers of the weights, by group; whether they are on their grid at all)."""
    steps = weight.reshape(*scale.shape[:2], -1, weight.shape[-1]) / jnp.asarray(scale)[:, :, None]
    codes = jnp.round(steps)
    near = (jnp.abs(steps - codes) < _OFF_GRID[weight.dtype.itemsize]).all()
    return codes.astype(jnp.int8), near


@partial(jax.jit, static_argnames=("bits", "sums"))
def _packed(linear: Linear, codes, scale, shift: Any, *, bits: int, sums: bool) -> PackedLinear:
    shifted = None
    if shift is not None:
        each = (shift.astype(linear.weight.dtype), linear.weight)
        shifted = jax.lax.map(lambda pair: pair[0] @ pair[1], each)
    return PackedLinear(
        codes=pack_int4(codes, axis=2) if bits <= 4 else codes,
        scale=scale,
        sums=codes.sum(2, dtype=jnp.int32) if sums else None,
        shifted=shifted,
        bias=linear.bias,
        bits=bits,
    )


def linear_bytes(layers: Layers) -> tuple[int, int]:
    """(bytes that the linear layers take with their scales and biases, weights in them)."""
    total = weights = 0
    for name in PROJECTIONS:
        linear = layers.linear(name)
        if isinstance(linear, PackedLinear):
            weights += linear.codes.size * (2 if linear.bits <= 4 else 1)
        else:
            weights += linear.weight.size
            linear = linear.replace(scale=None)  # which a product does not read
        total += sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(linear))
    return total, weights
