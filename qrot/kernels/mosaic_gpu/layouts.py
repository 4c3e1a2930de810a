"""Layouts of values in registers; the interpreter of jax 0.10.2 has none, and no roundings."""

from __future__ import annotations

import inspect
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

WGMMA = plgpu.Layout.WGMMA
# jax 0.10.2 wants an index beside the reference, 0.12 wants none.
_INDEX = ((),) if "idx" in inspect.signature(plgpu.load).parameters else ()


def load(ref: Any, layout: Any, interpret: Any, *, optimized: bool = False) -> Any:
    """The values behind a reference.

    Args:
        ref: the reference.
        layout: of the values in registers.
        interpret: as for `plgpu.kernel`.
        optimized: fail where that is slow, by conflicts of memory banks.
    """
    if interpret:
        return ref[...]
    return plgpu.load(ref, *_INDEX, layout=layout, optimized=optimized)


def cast(values: Any, layout: Any, interpret: Any) -> Any:
    """Values in another layout."""
    return values if interpret else plgpu.layout_cast(values, layout)


def rounded(values: Any, dtype: Any, interpret: Any) -> Any:
    """Values as `dtype`. What interprets is XLA, which may leave a rounding out that is undone."""
    if interpret:
        kind = jnp.finfo(dtype)
        values = lax.reduce_precision(values, exponent_bits=kind.nexp, mantissa_bits=kind.nmant)
    return values.astype(dtype)
