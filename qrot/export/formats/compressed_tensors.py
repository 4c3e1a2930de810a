"""compressed-tensors: integers, FP4 and FP8 that transformers and vLLM load, and block R4 as vLLM
reads it.

Of integers the format knows symmetric grids only, absmax / (2^(b-1) - 1/2), which is
`symmetric_half` here. It has no place for shifts, clip ratios and a 4-bit cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from qrot.errors import InputError
from qrot.export.checkpoint import stored_dtype, write_checkpoint
from qrot.export.content import Content, acting, in_integers, whole
from qrot.export.floats import STORED, fault_of, largest_inputs
from qrot.export.format import Format, Options, Plan, fitted, fixed_r4, left_out, offline
from qrot.export.online import MODULE, write_online
from qrot.export.packed import (
    on_written_scales,
    quantised_tensors,
    quantization_config,
    to_nearest,
)
from qrot.export.source import Source, calibration_rows
from qrot.export.verify import load_plain, load_with_module
from qrot.grid import GRIDS, Grid
from qrot.model.params import Layers, Network
from qrot.rotation.forms import Hadamard
from qrot.rotation.transform import Online, Transform
from qrot.scheme import LayerScheme, Scheme, layer_schemes, scheme_named
from qrot.sites import PROJECTIONS, SITE_OF

# Bits of weights and activations: those of compressed-tensors' own presets.
PRESETS = {"W4A16": (4, 16), "W8A8": (8, 8), "W4A8": (4, 8), "W4A4": (4, 4)} | {
    f"W{weights}A{activations}": (weights, activations)
    for activations, most in ((16, 8), (8, 8), (4, 4))
    for weights in range(2, most + 1)
}
_WEIGHTS = Grid(4, "symmetric_half", clip="mse")
_INPUTS = Grid(4, "symmetric_half")
_LOOKED_AT = 8  # windows, for the largest inputs


def check(source: Source, options: Options) -> Plan:
    """The judged network with its integers where the format can hold it; otherwise one built at a
    scheme that it can say, with R4 or without."""
    if options.group is not None and options.scheme is None:
        raise InputError("--group goes with --scheme")
    scheme = source.scheme
    if options.scheme is not None:
        scheme = preset(options.scheme, group=options.group)
    check_scheme(scheme, source.opened.config.num_hidden_layers)
    dtype = options.dtype or stored_dtype(source.opened)
    kind = jnp.dtype(dtype)
    plan = partial(
        Plan,
        _lines(scheme, options),
        scheme,
        dtype,
        before=without_signs,
        after=lambda content: content.changed(partial(on_written_scales, dtype=kind)),
        shard=options.shard,
    )
    network = source.network
    if options.weights is None and network is not None and not in_integers(network):
        raise InputError(
            "the run's weights are values, not integers times one scale a channel or group: choose "
            "another --weights, or --format torch"
        )
    if not options.scheme and not options.weights and _holds(network, options.online):
        return plan(judged=network)
    all_fitted = fitted(source)
    held = offline(all_fitted)
    if options.online:
        down = fixed_r4(all_fitted.rotations.get("down"), "vLLM")
        held = Transform({**held.rotations, "down": down}, held.scales)
    nearest = partial(to_nearest, dtype=kind)
    return plan(transform=held, nearest=nearest, lost=left_out(all_fitted, held))


def write(
    folder: Path, source: Source, plan: Plan, content: Content, advance: Callable[[int], None]
) -> None:
    """Write the folder; see `Format`."""
    grids = layer_schemes(content.scheme, content.config.num_hidden_layers)
    down, dtype = content.online.rotations.get("down"), jnp.dtype(plan.dtype)
    block = None if down is None else block_order(fixed_r4(down, "vLLM"))
    more = {"quantization_config": quantization_config(grids, block)}
    largest = None
    if _have_tensor_scales(grids):  # of the largest inputs, on text that the run calibrated on
        network = content.network()
        content = whole(network)
        largest = largest_inputs(network, calibration_rows(source)[:_LOOKED_AT])
    write_checkpoint(
        folder,
        source.opened,
        content,
        dtype=plan.dtype,
        write_layer=lambda i, layer: quantised_tensors(
            i, layer, grids[i], dtype, block, None if largest is None else largest[i]
        ),
        config=lambda text: {**text, **more},
        shard=plan.shard,
        advance=advance,
    )
    if down is not None:  # compressed-tensors rounds what our module rotates
        write_online(folder, source, Online({"down": down}), Scheme())


def _have_tensor_scales(grids: list[LayerScheme]) -> bool:
    """Whether inputs have a tensor scale."""
    pairs = [(g.weights[n], g.sites[SITE_OF[n]]) for g in grids for n in PROJECTIONS]
    return any(w.on and a.on and not a.integers and STORED[a.label].local for w, a in pairs)


def load(folder: Path, source: Source) -> Any:
    """See `Format`; the source adds nothing."""
    return load_unpacked(folder)


def load_unpacked(folder: Path) -> Any:
    """What transformers alone makes of the folder, or with R4 the module in it; in the dtype of the
    folder, where compressed-tensors unpacks FP4 to bfloat16 (which holds it exactly)."""
    import torch

    own = (folder / MODULE).is_file()
    model = load_with_module(folder, MODULE) if own else load_plain(folder)
    kind = model.lm_head.weight.dtype
    model.hf_quantizer.compressor.decompress_model(model)  # else when it first runs
    return torch.nn.Module.to(model, kind)


COMPRESSED_TENSORS = Format(
    "compressed-tensors",
    check,
    write,
    load,
    takes=("scheme", "group", "online"),
    proves=("torch", "transformers", "compressed_tensors"),
)


def _lines(scheme: Scheme, options: Options) -> tuple[str, ...]:
    first = f"{scheme.name} in the format of compressed-tensors; the cache is not quantised."
    engines = _in_vllm(scheme)
    if not options.online:
        return first, "`AutoModelForCausalLM.from_pretrained` loads it.", engines
    return (
        first,
        "**Its down_proj needs R4 at run time**, and transformers does not read "
        "`transform_config`. So the weights have a name by which "
        "`AutoModelForCausalLM.from_pretrained` alone does not find them. In PyTorch use "
        "`qrot_torch.py` of this folder: `from qrot_torch import load; model = load(FOLDER)`. "
        "vLLM takes all *.safetensors, and reads `transform_config` itself.",
        engines,
    )


def _in_vllm(scheme: Scheme) -> str:
    """What vLLM makes of activations, by its source at 0.32."""
    weights, inputs = scheme.weights, scheme.activations
    if not inputs.on:
        return "vLLM 0.32 loads it and multiplies by widened weights."
    if not weights.integers:
        return (
            f"vLLM 0.32 loads it (not run); docs/formats.md says which GPUs have {weights.label}."
        )
    if weights.bits == inputs.bits == 8:
        return "vLLM 0.32 runs it in integers, up to Hopper; Blackwell has no INT8."
    return (
        f"**vLLM 0.32 does not quantise these activations of {inputs.bits} bits by default, "
        "without a word**: its weight-only kernels never read how many bits they are to have. Only "
        "`--linear-backend humming`, or weights in groups of 32 on Hopper, quantises them."
    )


def preset(name: str, *, group: int | None = None) -> Scheme:
    """One of `PRESETS`: weights by output channel or group with the best clip, activations by
    token; or of `STORED`, with activations, or without where A16 is behind it."""
    label = name.removesuffix("A16")
    if label in STORED:
        if group is not None:
            raise InputError(f"--group goes with integers: {label} says itself what shares a scale")
        weights = replace(GRIDS[label], clip="mse")
        return Scheme(weights, Grid() if name.endswith("A16") else GRIDS[label])
    if name not in PRESETS:
        raise InputError(f"--scheme: {name!r} is not one of {', '.join([*PRESETS, *STORED])}")
    granularity = "channel" if group is None else "group"
    return scheme_named(name, replace(_WEIGHTS, granularity=granularity, group=group), _INPUTS)


def check_scheme(scheme: Scheme, layers: int) -> None:
    """Raise InputError where compressed-tensors, as vLLM reads it, cannot say a scheme."""
    for fault in _faults(layer_schemes(scheme, layers)):
        raise InputError(
            f"compressed-tensors cannot say {scheme.name}: {fault}; choose a scheme that it can, "
            "such as --scheme W4A16 or W8A8"
        )


def _faults(schemes: list[LayerScheme]) -> Iterator[str]:
    for i, grids in enumerate(schemes):
        for name in PROJECTIONS:
            weights, inputs = grids.weights[name], grids.sites[SITE_OF[name]]
            if not (weights.integers and inputs.integers) and (weights.on or inputs.on):
                if said := fault_of(weights, inputs):
                    yield said
                continue
            if inputs.on and inputs.kind == "asymmetric":
                yield "vLLM has no kernel for activations on an asymmetric grid"
            if inputs.on and inputs != Grid(inputs.bits, "symmetric_half", "token"):
                yield "activations must be on a symmetric_half grid by token with clip 1"
            if weights.on and (weights.kind == "asymmetric" or weights.granularity == "tensor"):
                yield "weights must be symmetric, by channel or group"
            bits = weights.bits, inputs.bits
            if (weights.on or inputs.on) and bits not in PRESETS.values():
                known = ", ".join(PRESETS)
                yield f"{name} of layer {i} at W{bits[0]}A{bits[1]} is none of {known}"
        if grids.sites["keys"].on or grids.sites["values"].on:
            cache = min(grids.sites["keys"].bits, grids.sites["values"].bits)
            yield f"it has no integer cache of {cache} bits"
    if not any(grid.on for grids in schemes for grid in grids.weights.values()):
        yield "no weight is rounded"


def _holds(network: Network | None, online: bool) -> bool:
    """Whether the format can hold the judged network as it is, its scheme apart."""
    if network is None:
        return False
    beside = acting(network)
    if beside.shifts or beside.clips or beside.rotations.keys() - ({"down"} if online else set()):
        return False
    if online:
        fixed_r4(beside.rotations.get("down"), "vLLM")
    return True


def block_order(rotation: Hadamard) -> int:
    """The size of its blocks."""
    return rotation.block or rotation.signs.shape[-1]


def without_signs(content: Content) -> Content:
    """The same network with R4's signs in up_proj, as vLLM's kernel has none.

    They are at the front of the transform, and what it acts on is silu(gate) * up. Weights that
    are rounded already keep their integers, since those have one level more on the negative side:
    their scales change sign.
    """
    down = content.online.rotations.get("down")
    if not isinstance(down, Hadamard):
        return content

    def fold(layer: Layers, online: Online, grids: LayerScheme) -> Layers:
        own = online.rotations["down"]
        assert isinstance(own, Hadamard)
        signs, up = own.signs.reshape(1, -1), layer.linear("up")
        changed = up.replace(
            weight=up.weight * signs,
            bias=None if up.bias is None else up.bias * signs,
            scale=None if up.scale is None else up.scale * signs,
        )
        return layer.replace(up=changed)

    plain = down.replace(signs=jnp.ones(down.signs.shape[-1], down.signs.dtype))
    rotations = {**content.online.rotations, "down": plain}
    return content.changed(fold)._replace(online=content.online.replace(rotations=rotations))
