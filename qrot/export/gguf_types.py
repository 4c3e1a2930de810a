"""GGUF's tensor types: which integers they hold, and the bytes of these.

In all of them 32 neighbours of a row share a float16 scale. Q4_0 holds integers of -8 to 7 times
it, Q8_0 of -128 to 127, Q4_1 of 0 to 15 times it plus a float16 minimum (llama.cpp, `block_q4_0`
and so on in ggml-common.h).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import gguf
import jax.numpy as jnp
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import LlamaFileType as FileType
from jaxtyping import Float, Float32, Int8, UInt8

from qrot.errors import InputError
from qrot.export.content import change_rounded
from qrot.grid import Grid
from qrot.model.params import Layers, Linear
from qrot.rotation.forms import Values
from qrot.rotation.transform import Online
from qrot.scheme import LayerScheme

BLOCK = 32  # neighbours that share a scale


class TensorType(NamedTuple):
    """What --type names.

    Attributes:
        name: on the command line.
        kind: of the projections.
        ends: of embedding and head.
        file_type: of a file that has it.
        grid: that weights are rounded to for it; None where it holds any value.
        dtype: of the values, where there is no grid.
    """

    name: str
    kind: Kind
    ends: Kind
    file_type: FileType
    grid: Grid | None = None
    dtype: str = "float32"


def _grid(bits: int, kind: str) -> Grid:
    return Grid(bits, kind, "group", BLOCK)  # pyright: ignore[reportArgumentType]


Q8_0 = TensorType("q8_0", Kind.Q8_0, Kind.Q8_0, FileType.MOSTLY_Q8_0, _grid(8, "symmetric"))
Q4_0 = TensorType("q4_0", Kind.Q4_0, Kind.Q8_0, FileType.MOSTLY_Q4_0, _grid(4, "symmetric"))
Q4_1 = TensorType("q4_1", Kind.Q4_1, Kind.Q8_0, FileType.MOSTLY_Q4_1, _grid(4, "asymmetric"))
F16 = TensorType("f16", Kind.F16, Kind.F16, FileType.MOSTLY_F16, dtype="float16")
BF16 = TensorType("bf16", Kind.BF16, Kind.BF16, FileType.MOSTLY_BF16, dtype="bfloat16")
F32 = TensorType("f32", Kind.F32, Kind.F32, FileType.ALL_F32)
TYPES = {each.name: each for each in (Q8_0, Q4_0, Q4_1, F16, BF16, F32)}
# The lowest and the highest integer that a type holds.
HELD = {Kind.Q4_0: (-8, 7), Kind.Q8_0: (-128, 127)}


def type_of(weights: Grid) -> TensorType:
    """The type for weights on a grid; that of values where it is off."""
    if not weights.on:
        return F32
    if weights.kind == "asymmetric":
        return Q4_1
    return Q4_0 if weights.bits <= 4 else Q8_0


def in_blocks(grid: Grid) -> bool:
    """Whether a type holds what is rounded to a grid: symmetric integers of at most 8 bits, and a
    scale that whole blocks share; also where it does not round."""
    integers = grid.integers and grid.bits <= 8
    blocks = (grid.group or BLOCK) % BLOCK == 0
    return not grid.on or (grid.kind != "asymmetric" and integers and blocks)


def holds(linear: Linear, grid: Grid) -> bool:
    """Whether the type for a grid holds the weights of a layer that are on it, each an integer in
    its range times a scale; also those that are not rounded."""
    if not grid.on or not in_blocks(grid):
        return not grid.on
    if linear.scale is None or len(linear.weight) // len(linear.scale) % BLOCK:
        return False
    low, high = HELD[type_of(grid).kind]
    codes, _ = levels(linear.weight, linear.scale)
    return bool(low <= codes.min() and codes.max() <= high)


def levels(
    weight: Float[Values, "in out"], scale: Float[Values, "groups out"]
) -> tuple[Float32[np.ndarray, "in out"], Float32[np.ndarray, "groups out"]]:
    """The integers of a weight, as floats, and its scales on the host; 0 where a scale is 0."""
    steps = np.asarray(scale, np.float32)
    split = np.asarray(weight, np.float32).reshape(len(steps), -1, steps.shape[1])
    codes = np.divide(split, steps[:, None], out=np.zeros_like(split), where=steps[:, None] != 0)
    return np.rint(codes).reshape(weight.shape), steps


def to_nearest(layer: Layers, online: Online, grids: LayerScheme) -> Layers:
    """A layer (a stack of one) with the values that llama.cpp's quantiser gives its weights.

    For Q4_0 that is not the grid of `Grid`: the largest magnitude of a block becomes -8, with the
    sign in the scale.
    """

    def rounded(linear: Linear, grid: Grid) -> Linear:
        kind = type_of(grid).kind
        raw = _quantised(np.asarray(linear.weight[0], np.float32).T, kind)
        weight = np.ascontiguousarray(gguf.dequantize(raw, kind).T)[None]
        scale = None if grid.kind == "asymmetric" else jnp.asarray(_scales(raw, kind).T[None])
        return linear.replace(weight=jnp.asarray(weight), scale=scale)

    return change_rounded(layer, grids, rounded)


def _scales(raw: UInt8[np.ndarray, "rows bytes"], kind: Kind) -> Float32[np.ndarray, "rows blocks"]:
    """The scales of blocks that begin with them."""
    blocks = raw.reshape(len(raw), -1, gguf.GGML_QUANT_SIZES[kind][1])
    return np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0].astype(np.float32)


def on_float16_scales(layer: Layers, online: Online, grids: LayerScheme) -> Layers:
    """A rounded layer (a stack of one) with the integers that it has, its scales rounded to
    float16: by 2^-11 of themselves at most.

    Raises:
        InputError: where a scale is too large for it, or so small that it would lose more.
    """

    def stored(linear: Linear, grid: Grid) -> Linear:
        if grid.kind == "asymmetric":
            return linear
        if linear.scale is None:
            raise InputError(
                "weights of this method are values, not integers times one scale a channel or "
                "group: choose another --weights, or --type f16"
            )
        codes, scale = levels(linear.weight[0], linear.scale[0])
        with np.errstate(over="ignore"):
            written = scale.astype(np.float16).astype(np.float32)
        used = np.abs(codes).reshape(len(scale), -1, scale.shape[1]).max(1) > 0
        if not (np.abs(written - scale) <= 2**-11 * np.abs(scale))[used].all():
            raise InputError("the scale of a weight is no float16; choose --type f32 or bf16")
        weight = codes.reshape(len(scale), -1, scale.shape[1]) * written[:, None]
        return linear.replace(
            weight=jnp.asarray(weight.reshape(1, *codes.shape)), scale=jnp.asarray(written[None])
        )

    return change_rounded(layer, grids, stored)


def through(table: Float[Values, "rows n"], kind: Kind) -> Float32[np.ndarray, "rows n"]:
    """The values that a tensor has once it is written."""
    return gguf.dequantize(_quantised(np.asarray(table, np.float32), kind), kind)


def encoded(rows: Float[np.ndarray, "*rows n"], kind: Kind) -> np.ndarray:
    """Values as a type stores them, rounded to nearest; [*rows, bytes] or in its own dtype.

    Raises:
        InputError: where one does not fit it.
    """
    wide = np.asarray(rows, np.float32)
    raw = _quantised(wide, kind)
    if not np.isfinite(wide).all() or (kind == Kind.F16 and not np.isfinite(raw).all()):
        raise InputError(
            f"a weight has numbers that {kind.name} cannot hold; choose another --type"
        )
    return raw


def _quantised(rows: np.ndarray, kind: Kind) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.ascontiguousarray(gguf.quantize(np.ascontiguousarray(rows), kind))


def blocks(
    codes: Float32[np.ndarray, "out in"], scale: Float32[np.ndarray, "out groups"], kind: Kind
) -> UInt8[np.ndarray, "out bytes"]:
    """Integers and their scales as Q4_0 or Q8_0 stores them.

    Args:
        codes: that the type holds.
        scale: which float16 holds; a group is a multiple of 32.
        kind: Q4_0, whose bytes have an integer + 8 of the first half of a block in their low bits
            and one of the second half above it; or Q8_0.
    """
    shape = len(codes), codes.shape[1] // BLOCK
    each = np.repeat(scale, shape[1] // scale.shape[1], axis=1)
    head = each.astype(np.float16)[..., None].view(np.uint8)
    body = _BODIES[kind](codes.astype(np.int8).reshape(*shape, BLOCK))
    return np.concatenate([head, body], axis=-1).reshape(len(codes), -1)


def _in_halves(codes: Int8[np.ndarray, "out blocks 32"]) -> UInt8[np.ndarray, "out blocks 16"]:
    low, high = np.split((codes + 8).astype(np.uint8), 2, axis=-1)
    return low | high << 4


_BODIES = {Kind.Q4_0: _in_halves, Kind.Q8_0: partial(np.ndarray.view, dtype=np.uint8)}
