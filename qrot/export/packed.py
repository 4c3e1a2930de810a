"""Codes and scales as compressed-tensors stores them, and what config.json says of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int8, Int32

from qrot.errors import InputError
from qrot.export.checkpoint import layer_tensors
from qrot.export.content import as_numpy, change_rounded
from qrot.export.floats import STORED, arguments, input_scale, site_tensor_scales
from qrot.grid import Grid, nearest
from qrot.hadamard.factors import hadamard_dense
from qrot.model.io.assemble import MODULES
from qrot.model.params import Layers, Linear
from qrot.quantize.rtn import weight_scale_and_zero
from qrot.rotation.transform import Online
from qrot.scheme import LayerScheme
from qrot.sites import PROJECTIONS, SITE_OF

_R4 = "mlp.down_proj.R4_input.weight"
_PACKED, _WHOLE, _MIXED = "pack-quantized", "int-quantized", "mixed-precision"
_HEAD = "lm_head"


def pack(q: Int8[np.ndarray, "out in"], bits: int) -> Int32[np.ndarray, "out words"]:
    """Integers q + 2^(bits-1) one after the other in the bits of words, lowest bits first.

    Rows are filled up with zeros.

    Args:
        q: of so many bits.
        bits: 2 to 8.
    """
    out, inputs = q.shape
    unsigned = (q.astype(np.int16) + 2 ** (bits - 1)).astype(np.uint8)
    each = np.unpackbits(unsigned[..., None], axis=-1, count=bits, bitorder="little")
    whole = np.zeros((out, -(-inputs * bits // 32) * 32), np.uint8)
    whole[:, : inputs * bits] = each.reshape(out, -1)
    return np.packbits(whole, axis=-1, bitorder="little").view("<i4").astype(np.int32)


def to_nearest(layer: Layers, online: Online, grids: LayerScheme, *, dtype: Any) -> Layers:
    """A layer (a stack of one) with its weights on the nearest levels of the scales that are
    written, which are rounded to dtype. Raises InputError where one does not fit it."""

    def rounded(linear: Linear, grid: Grid) -> Linear:
        weight = jnp.asarray(linear.weight[0], jnp.float32)
        scale = np.asarray(_scales(weight, grid))[:: grid.group or len(weight)]
        scale = _written(scale, grid, dtype)
        return _of_codes(linear, _codes(weight, scale, grid), scale, grid)

    return change_rounded(layer, grids, rounded)


@partial(jax.jit, static_argnums=1)
def _scales(weight: Float[Array, "in out"], grid: Grid) -> Float[Array, "in out"]:
    return weight_scale_and_zero(weight, grid)[0]


def on_written_scales(layer: Layers, online: Online, grids: LayerScheme, *, dtype: Any) -> Layers:
    """A rounded layer (a stack of one) with the integers that it has, and its scales as they are
    written, rounded to dtype.

    A scale changes by 2^-9 of itself at most (bfloat16), an integer of 8 bits by a quarter: the
    integers are those that are nearest to the weights on the new scales, too.

    Raises:
        InputError: where weights are no integers times scales, or a scale does not fit the dtype.
    """

    def stored(linear: Linear, grid: Grid) -> Linear:
        if linear.scale is None:
            raise InputError(
                "weights of this method are values, not integers times one scale a channel or "
                "group: choose another --weights, or --format torch"
            )
        scale = np.asarray(linear.scale[0], np.float32) / np.float32(grid.unit)
        codes = _codes(linear.weight[0], scale, grid)
        return _of_codes(linear, codes, _written(scale, grid, dtype), grid)

    return change_rounded(layer, grids, stored)


def _written(
    scale: Float[np.ndarray, "groups out"], grid: Grid, dtype: Any
) -> Float[np.ndarray, "groups out"]:
    """Scales with the values that they have once they are written."""
    if grid.scale != "float32":  # which are stored as what they are
        return scale
    with np.errstate(over="ignore"):
        written = scale.astype(dtype).astype(np.float32)
    if not (np.isfinite(written) & (written != 0)).all():
        kind = np.dtype(dtype).name
        raise InputError(f"the scale of a weight is no {kind}; choose another --dtype")
    return written


def _split(weight: Any, scale: np.ndarray) -> Float[np.ndarray, "groups rows out"]:
    return np.asarray(weight, np.float32).reshape(len(scale), -1, scale.shape[1])


def _codes(weight: Any, scale: np.ndarray, grid: Grid) -> Float[np.ndarray, "groups rows out"]:
    """The codes next to a weight [in, out] on these scales."""
    split = _split(weight, scale)
    if grid.integers:  # on scales that are negative, too
        return np.clip(np.rint(split / scale[:, None]), grid.qmin, grid.qmax)
    return np.asarray(nearest(jnp.asarray(split), jnp.asarray(scale[:, None]), None, grid))


def _of_codes(
    linear: Linear,
    codes: Float[np.ndarray, "groups rows out"],
    scale: Float[np.ndarray, "groups out"],
    grid: Grid,
) -> Linear:
    weight = (codes * scale[:, None]).reshape(1, *linear.weight.shape[1:])
    own = scale[None] * np.float32(grid.unit)
    return linear.replace(weight=jnp.asarray(weight), scale=jnp.asarray(own))


def quantised_tensors(
    i: int,
    layer: Layers,
    grids: LayerScheme,
    dtype: Any,
    block: int | None,
    largest: dict[str, float] | None = None,
) -> dict[str, np.ndarray]:
    """One layer (a stack of one) as compressed-tensors has it, beside its norms and biases.

    Args:
        i: its number.
        layer: with its weights on the scales that are written.
        grids: of its weights.
        dtype: of what is no code.
        block: of the Hadamard matrix R4, as its transform has it; None for none.
        largest: input of each site, where inputs have a tensor scale.
    """
    tensors = layer_tensors(i, layer, dtype)
    whole = site_tensor_scales(layer, grids.weights)
    for name, grid in grids.weights.items():
        if not grid.on:
            continue
        prefix, linear = f"model.layers.{i}.{MODULES[name]}", layer.linear(name)
        scale = np.asarray(linear.scale[0]) / np.float32(grid.unit)
        codes = _codes(linear.weight[0], scale, grid).reshape(linear.weight.shape[1:]).T
        del tensors[f"{prefix}.weight"]
        if not grid.integers:
            stored = STORED[grid.label]
            found = stored.tensors(np.ascontiguousarray(codes), scale.T, whole[name], dtype)
            tensors |= {f"{prefix}.{end}": np.ascontiguousarray(x) for end, x in found.items()}
            if stored.local and largest is not None:
                scale = input_scale(largest[SITE_OF[name]])
                tensors[f"{prefix}.input_global_scale"] = scale
            continue
        q = np.ascontiguousarray(codes.astype(np.int8))
        tensors[f"{prefix}.weight_scale"] = as_numpy(scale.T, dtype)
        if _form(grid, grids.sites[SITE_OF[name]]) == _PACKED:
            tensors[f"{prefix}.weight_packed"] = pack(q, grid.bits)
            tensors[f"{prefix}.weight_shape"] = np.array(q.shape, np.int64)
        else:
            tensors[f"{prefix}.weight"] = q
    if block is not None:
        tensors[f"model.layers.{i}.{_R4}"] = as_numpy(np.sign(hadamard_dense(block)), dtype)
    return tensors


def quantization_config(schemes: list[LayerScheme], block: int | None) -> dict[str, Any]:
    """What goes into config.json beside the weights: a group for each pair of grids that there is.

    Args:
        schemes: of the layers.
        block: as for `quantised_tensors`.
    """
    modules: dict[tuple[Grid, Grid], list[str]] = {}
    for i, grids in enumerate(schemes):
        for name in PROJECTIONS:
            pair = grids.weights[name], grids.sites[SITE_OF[name]]
            modules.setdefault(pair, []).append(f"model.layers.{i}.{MODULES[name]}")
    alone = [m for pair, names in modules.items() if not pair[0].on for m in names]
    on = {pair: names for pair, names in modules.items() if pair[0].on}
    if len(modules) == 1:
        on = {pair: ["Linear"] for pair in on}
    forms = {_form(*pair) for pair in on}
    groups = {f"group_{i}": _group(*pair, names) for i, (pair, names) in enumerate(on.items())}
    config: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "format": forms.pop() if len(forms) == 1 else _MIXED,
        "quantization_status": "compressed",
        "ignore": [_HEAD, *alone],
        "config_groups": groups,
    }
    if block is not None:
        targets = ["re:.*down_proj$"]
        apply = [
            {"targets": targets, "location": "input"},
            {"targets": targets, "location": "weight_input", "inverse": True},
        ]
        r4 = {"type": "hadamard", "head_dim": block, "apply": apply}
        config["transform_config"] = {"config_groups": {"R4": r4}}
    return config


def _form(weights: Grid, inputs: Grid) -> str:
    if not weights.integers:
        return STORED[weights.label].format
    return _WHOLE if weights.bits == inputs.bits == 8 else _PACKED


def _group(weights: Grid, inputs: Grid, targets: list[str]) -> dict[str, Any]:
    say = _integer_arguments if weights.integers else arguments
    return {
        "targets": targets,
        "weights": say(weights, inputs=False),
        "input_activations": say(inputs, inputs=True) if inputs.on else None,
        "output_activations": None,
        "format": _form(weights, inputs),
    }


def _integer_arguments(grid: Grid, *, inputs: bool) -> dict[str, Any]:
    about: dict[str, Any] = {
        "num_bits": grid.bits,
        "type": "int",
        "symmetric": True,
        "strategy": grid.granularity,
        "dynamic": inputs,
    }
    return about if grid.group is None else {**about, "group_size": grid.group}
