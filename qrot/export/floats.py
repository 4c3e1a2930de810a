"""Weights in FP4 and FP8 as compressed-tensors stores them, and what config.json says of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from jaxtyping import Float, UInt8

from qrot.calibrate.moments import gather, outputs
from qrot.calibrate.walk import Hidden, Place, forwards
from qrot.codebook import CODEBOOKS
from qrot.errors import InputError
from qrot.export.content import as_numpy
from qrot.grid import GRIDS, Grid
from qrot.model.params import Layers, Network
from qrot.quantize.method import Rows
from qrot.sites import INPUTS, SITE_OF

Codes = Float[np.ndarray, "out in"]
Scales = Float[np.ndarray, "out groups"]
_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
# Powers of two between the largest input of the calibration and the largest that the tensor scale
# allows for, and as many fewer below the smallest: E4M3 has 15 octaves, without subnormals.
_HEADROOM = 4.0


class Stored(NamedTuple):
    """How a grid of floating-point codes is stored.

    Attributes:
        format: in config.json.
        tensors: (codes, their scales, the tensor scale, the dtype of plain scales) to tensors, by
            the end of their names.
        strategy: of the scales, by their granularity.
        scale_dtype: of the scales, in config.json; None for plain ones.
        local: whether inputs have a tensor scale of their own, `input_global_scale`.
    """

    format: str
    tensors: Callable[[Codes, Scales, float, Any], dict[str, np.ndarray]]
    strategy: str | None = None
    scale_dtype: str | None = None
    local: bool = False


def pack_fp4(codes: Codes) -> UInt8[np.ndarray, "out half"]:
    """E2M1 numbers two to a byte, the first one in the lower half."""
    bits = codes.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    return bits[:, ::2] | (bits[:, 1::2] << 4)


def _nvfp4(codes: Codes, scale: Scales, tensor: float, dtype: Any) -> dict[str, np.ndarray]:
    del dtype
    with np.errstate(over="ignore"):
        stored = (scale / tensor).astype(_E4M3)
    used = np.abs(codes).reshape(*scale.shape, -1).any(-1)
    if (stored.astype(np.float32) * tensor != scale)[used].any():
        raise InputError("a group of weights is too small for E4M3 beside the others of its site")
    return {
        "weight_packed": pack_fp4(codes),
        "weight_scale": stored,
        "weight_global_scale": np.array([1 / tensor], np.float32),
    }


def _exponents(scale: Scales) -> UInt8[np.ndarray, "out groups"]:
    return (np.frexp(scale)[1] + 126).astype(np.uint8)  # of powers of two, 2^e stored as e + 127


def _mxfp4(codes: Codes, scale: Scales, tensor: float, dtype: Any) -> dict[str, np.ndarray]:
    del tensor, dtype
    return {"weight_packed": pack_fp4(codes), "weight_scale": _exponents(scale)}


def _mxfp8(codes: Codes, scale: Scales, tensor: float, dtype: Any) -> dict[str, np.ndarray]:
    del tensor, dtype
    return {"weight": codes.astype(_E4M3), "weight_scale": _exponents(scale)}


def _fp8(codes: Codes, scale: Scales, tensor: float, dtype: Any) -> dict[str, np.ndarray]:
    del tensor
    return {"weight": codes.astype(_E4M3), "weight_scale": as_numpy(scale, dtype)}


# By the name of a grid in `GRIDS`.
STORED: dict[str, Stored] = {
    "NVFP4": Stored("nvfp4-pack-quantized", _nvfp4, "tensor_group", "torch.float8_e4m3fn", True),
    "MXFP4": Stored("mxfp4-pack-quantized", _mxfp4, "group", "torch.uint8"),
    "MXFP8": Stored("mxfp8-quantized", _mxfp8, "group", "torch.uint8"),
    "FP8": Stored("float-quantized", _fp8),
}


def fault_of(weights: Grid, inputs: Grid) -> str | None:
    """Why compressed-tensors cannot say a pair of grids, one of them no integer; None: it can."""
    label = weights.label
    if label not in STORED:
        return f"weights in {label} have no format; those that have are {', '.join(STORED)}"
    usual = replace(GRIDS[label], granularity=weights.granularity, clip=weights.clip)
    if weights != usual or weights.granularity == "tensor":
        return f"weights in {label} are by {'group' if usual.group else 'channel'}"
    usual = replace(GRIDS[label], granularity="group" if usual.group else "token")
    if inputs.on and inputs != usual:
        return f"activations beside weights in {label} must be in {label}, with clip 1, or at 16"
    return None


def site_tensor_scales(layer: Layers, grids: Mapping[str, Grid]) -> dict[str, float]:
    """By projection one tensor scale for all that read its site, since engines fuse them.

    Args:
        layer: a stack of one, rounded.
        grids: of its weights.
    """
    largest: dict[str, float] = {}
    for name, grid in grids.items():
        if grid.label in STORED:
            scale = np.asarray(layer.linear(name).scale, np.float64) / grid.unit
            largest[SITE_OF[name]] = max(largest.get(SITE_OF[name], 0.0), float(scale.max()))
    found = {site: _above(x / CODEBOOKS["e4m3"].largest) for site, x in largest.items()}
    return {name: found[site] for name, site in SITE_OF.items() if site in found}


def input_scale(largest: float) -> np.ndarray:
    """`input_global_scale` of inputs up to so much: a power of two, so that no number changes."""
    tensor = _above(largest / CODEBOOKS["e2m1"].largest / CODEBOOKS["e4m3"].largest)
    return np.array([1 / (_HEADROOM * tensor)], np.float32)


def largest_inputs(network: Network, rows: Rows, *, batch: int = 2) -> list[dict[str, float]]:
    """The largest |x| that the projections read, by layer and site.

    Args:
        network: fused.
        rows: tokens to look at.
        batch: windows that run at once.
    """
    found: list[dict[str, float]] = []

    def look(place: Place) -> Hidden:
        moments = gather(place, INPUTS, hessians=False)
        found.append({site: float(x.largest.max()) for site, x in moments.items()})
        return outputs(place)

    forwards(network, rows, look, batch=batch)
    return found


def _above(x: float) -> float:
    return 2.0 ** np.ceil(np.log2(x)) if x > 0 else 1.0


def arguments(grid: Grid, *, inputs: bool) -> dict[str, Any]:
    """What config.json says of the numbers of weights or of inputs."""
    stored = STORED[grid.label]
    plain = "token" if inputs else "channel"
    dynamic = ("local" if stored.local else True) if inputs else False
    about: dict[str, Any] = {
        "num_bits": grid.bits,
        "type": "float",
        "symmetric": True,
        "strategy": stored.strategy or plain,
        "dynamic": dynamic,
    }
    if grid.group is not None:
        about["group_size"] = grid.group
    if stored.scale_dtype is not None:
        about["scale_dtype"] = stored.scale_dtype
    return about
