"""Linear layers on values and on integers."""

from __future__ import annotations

from typing import Any

import jax
from jaxtyping import Array, Float

from qrot.grid import Grid
from qrot.integers import Quantised, dequantise
from qrot.kernels.matmul import int4_matmul, int8_matmul
from qrot.model.params import Linear, PackedLinear


def in_integers(grid: Grid) -> bool:
    """Whether activations on this grid go into a product as integers."""
    return grid.in_bytes and grid.granularity in ("token", "tensor")


def packed_product(
    x: Quantised | Float[Array, "*batch in"], layer: PackedLinear, dtype: Any
) -> Float[Array, "*batch out"]:
    """x W + b: in integers where x is, otherwise with the weight widened.

    Args:
        x: activations.
        layer: the weights.
        dtype: of the result.
    """
    product = int4_matmul if layer.bits <= 4 else int8_matmul
    shifted = None
    if isinstance(x, Quantised):
        batch, shifted = x.codes.shape[:-1], None if x.shift is None else layer.shifted
        codes = x.codes.reshape(-1, x.codes.shape[-1])
        scale, zero = jax.tree.map(lambda s: s.reshape(-1, 1), (x.scale, x.zero))
        if zero is not None and layer.sums is None:
            codes, zero = codes - zero, None  # below 8 bits the difference fits
        flat = Quantised(codes, scale, zero)
    else:
        batch, flat = x.shape[:-1], x.reshape(-1, x.shape[-1])
    y = product(flat, layer.codes, layer.scale, layer.sums, dtype=dtype)
    y = y.reshape(*batch, y.shape[-1])
    for part in (shifted, layer.bias):
        y = y if part is None else y + part.astype(y.dtype)
    return y


def linear(
    x: Quantised | Float[Array, "*batch in"], layer: Linear | PackedLinear, dtype: Any
) -> Float[Array, "*batch out"]:
    """x W + b in this dtype."""
    if isinstance(layer, PackedLinear):
        return packed_product(x, layer, dtype)
    if isinstance(x, Quantised):
        x = dequantise(x)
    y = x.astype(dtype) @ layer.weight.astype(dtype)
    return y if layer.bias is None else y + layer.bias.astype(dtype)
