"""compressed-tensors: integers that transformers and vLLM load, and block R4 as vLLM reads it.

The format knows symmetric grids only, absmax / (2^(b-1) - 1/2), which is `symmetric_half` here. It
has no place for shifts, clip ratios and a 4-bit cache.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int8, Int32

from qrot.errors import InputError
from qrot.export.fitted import as_numpy
from qrot.export.huggingface import layer_tensors
from qrot.grid import Grid
from qrot.hadamard.factors import hadamard_dense
from qrot.model.io.assemble import MODULES
from qrot.model.params import Layers, Linear
from qrot.sites import PROJECTIONS
from qrot.quantize.rtn import weight_scale_and_zero
from qrot.rotation.forms import Hadamard, Rotations
from qrot.scheme import Scheme, layer_scheme

PRESETS = {"W4A16": (4, 16), "W8A8": (8, 8), "W4A8": (4, 8), "W4A4": (4, 4)}
_R4 = "mlp.down_proj.R4_input.weight"


def preset(name: str, *, group: int | None = None) -> Scheme:
    """One of `PRESETS`: weights by output channel or group with the best clip, activations by
    token."""
    if name not in PRESETS:
        raise InputError(f"--scheme: {name!r} is not one of {', '.join(PRESETS)}")
    weights, activations = PRESETS[name]
    granularity = "channel" if group is None else "group"
    return Scheme(
        weights=Grid(weights, "symmetric_half", granularity, group, clip="mse"),
        activations=Grid(activations, "symmetric_half"),
    )


def check_scheme(scheme: Scheme) -> None:
    """Raise InputError where compressed-tensors, as vLLM reads it, cannot say a scheme."""
    weights, activations = scheme.weights, scheme.activations
    if activations.on and activations.kind == "asymmetric":
        fault = "vLLM has no kernel for activations on an asymmetric grid"
    elif activations.on and activations != Grid(activations.bits, "symmetric_half", "token"):
        fault = "activations must be on a symmetric_half grid by token with clip 1"
    elif weights.kind == "asymmetric" or weights.granularity == "tensor":
        fault = "weights must be symmetric, by channel or group"
    elif scheme.keys.on or scheme.values.on:
        fault = f"it has no integer cache of {min(scheme.keys.bits, scheme.values.bits)} bits"
    elif scheme.overrides:
        fault = "overrides are not written yet"
    elif (weights.bits, activations.bits) not in PRESETS.values():
        fault = f"W{weights.bits}A{activations.bits} is none of {', '.join(PRESETS)}"
    else:
        return
    raise InputError(
        f"compressed-tensors cannot say {scheme.name}: {fault}; choose a scheme that it can with "
        f"--scheme {'|'.join(PRESETS)}"
    )


def pack(q: Int8[np.ndarray, "out in"]) -> Int32[np.ndarray, "out words"]:
    """Eight 4-bit integers a word, q + 8 in bits 4 i to 4 i + 3, rows filled up with zeros."""
    out, inputs = q.shape
    nibbles = np.zeros((out, -(-inputs // 8) * 8), np.uint32)
    nibbles[:, :inputs] = (q.astype(np.int32) + 8).astype(np.uint32)
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    words = np.bitwise_or.reduce(nibbles.reshape(out, -1, 8) << shifts, axis=-1)
    return words.view(np.int32)


def integer_tensors(
    i: int,
    layer: Layers,
    scheme: Scheme,
    dtype: Any,
    rotations: Rotations,
    values: Layers | None = None,
) -> dict[str, np.ndarray]:
    """One fused layer (a stack of one) as compressed-tensors has it, beside its norms and biases.

    Integers are of the scales that are written, rounded to `dtype`. rotations: what is online; the
    signs of R4 go into up_proj, which costs nothing, as its kernel knows no signs. values: the same
    layer on its grid already, signs folded, where weights are not rounded to nearest.
    """
    layer = fold_signs(layer, rotations)
    tensors = layer_tensors(i, layer, dtype)
    grids = dict(layer_scheme(scheme, i).weights)
    for name in PROJECTIONS:
        prefix = f"model.layers.{i}.{MODULES[name]}"
        weight = jnp.asarray(getattr(layer, name).weight[0], jnp.float32)
        value = None if values is None else np.asarray(getattr(values, name).weight[0])
        q, scale = _integers(weight, grids[name], dtype, value)
        del tensors[f"{prefix}.weight"]
        tensors[f"{prefix}.weight_scale"] = scale
        if _packed(scheme):
            tensors[f"{prefix}.weight_packed"] = pack(q)
            tensors[f"{prefix}.weight_shape"] = np.array(q.shape, np.int64)
        else:
            tensors[f"{prefix}.weight"] = q
    if rotations.down is not None:
        order = block_order(rotations.down)
        matrix = np.sign(hadamard_dense(order))
        tensors[f"model.layers.{i}.{_R4}"] = as_numpy(matrix, dtype)
    return tensors


def _integers(
    weight: Float[Array, "in out"],
    grid: Grid,
    dtype: Any,
    value: Float[np.ndarray, "in out"] | None = None,
) -> tuple[Int8[np.ndarray, "out in"], np.ndarray]:
    """Integers [out, in] and scales [out, groups]; of `value` on the scales of weight, if given."""
    inputs, outputs = weight.shape
    groups = inputs // (grid.group or inputs)
    each = np.asarray(_scales(weight, grid)).reshape(groups, -1, outputs)
    scale = each[:, :1].astype(dtype)  # the same for all of a group
    split = np.asarray(weight if value is None else value).reshape(groups, -1, outputs)
    low, high = grid.levels
    q = np.clip(np.rint(split / scale.astype(np.float32)), low, high).astype(np.int8)
    q = np.ascontiguousarray(q.reshape(inputs, outputs).T)
    return q, np.ascontiguousarray(scale.reshape(groups, outputs).T)


@partial(jax.jit, static_argnums=1)
def _scales(weight: Float[Array, "in out"], grid: Grid) -> Float[Array, "in out"]:
    return weight_scale_and_zero(weight, grid)[0]


def fold_signs(layers: Layers, rotations: Rotations) -> Layers:
    """Move the signs of R4 from the front of its transform into up_proj: what R4 turns is
    silu(gate) * up. Before rounding, whose grid has one level more on the negative side."""
    if rotations.down is None:
        return layers
    signs, up = rotations.down.signs, layers.up
    bias = None if up.bias is None else up.bias * signs
    return layers.replace(up=Linear(up.weight * signs, bias))


def block_order(rotation: Any) -> int:
    """The size of R4's blocks. Raises InputError where vLLM has no transform for it."""
    if not isinstance(rotation, Hadamard):
        raise InputError(
            "vLLM runs a fixed Hadamard R4 only, not a learned one; learn with learn.online=[]"
        )
    order = rotation.block or rotation.signs.shape[-1]
    if order & (order - 1):
        raise InputError(
            f"vLLM's Hadamard transform needs a power of two, and R4 has {order}; learn with "
            "rotations.down=128 or another power of two that divides"
        )
    return order


def quantization_config(scheme: Scheme, rotations: Rotations) -> dict[str, Any]:
    """What goes into config.json beside the weights."""
    form = "pack-quantized" if _packed(scheme) else "int-quantized"
    grid = scheme.weights
    weights: dict[str, Any] = {
        "num_bits": grid.bits,
        "type": "int",
        "symmetric": True,
        "strategy": grid.granularity,
        "dynamic": False,
    }
    if grid.group is not None:
        weights["group_size"] = grid.group
    activations = None
    if scheme.activations.on:
        activations = {
            "num_bits": scheme.activations.bits,
            "type": "int",
            "symmetric": True,
            "strategy": "token",
            "dynamic": True,
        }
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": activations,
        "output_activations": None,
        "format": form,
    }
    config: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    if rotations.down is not None:
        targets = ["re:.*down_proj$"]
        apply = [
            {"targets": targets, "location": "input"},
            {"targets": targets, "location": "weight_input", "inverse": True},
        ]
        r4 = {"type": "hadamard", "head_dim": block_order(rotations.down), "apply": apply}
        config["transform_config"] = {"config_groups": {"R4": r4}}
    return config


def online_of(rotations: Rotations) -> Rotations:
    """What acts at run time in an export with R4: its transform, without the signs."""
    down = rotations.down
    if down is None:
        raise InputError("--online: these rotations have no R4")
    block_order(down)
    return Rotations(down=replace(down, signs=jnp.ones_like(down.signs)), fused=True)


def _packed(scheme: Scheme) -> bool:
    return scheme.weights.bits == 4
