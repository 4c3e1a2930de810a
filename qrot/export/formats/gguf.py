"""GGUF, llama.cpp's file: integers in its blocks of 32, and R4 in blocks by its own contract.

llama.cpp rounds activations and the cache in its own way or not at all, so that what is exported
are weights alone; shifts, clip ratios and R3 have no place in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import itemgetter
from pathlib import Path

import jax
import jax.numpy as jnp

from qrot.errors import InputError
from qrot.export import content
from qrot.export.content import Change, Content, acting
from qrot.export.format import Format, Options, Plan, fitted, fixed_r4, left_out, offline
from qrot.export.gguf_file import write_file
from qrot.export.gguf_metadata import check_model, metadata, model_name
from qrot.export.gguf_types import (
    BLOCK,
    Q8_0,
    TYPES,
    TensorType,
    holds,
    in_blocks,
    on_float16_scales,
    through,
    to_nearest,
    type_of,
)
from qrot.export.source import Source, weight_method
from qrot.export.verify import READ_AGAIN
from qrot.model.config import ModelConfig
from qrot.model.io.assemble import assemble
from qrot.model.io.gguf import open_gguf
from qrot.model.io.gguf_hadamard import contract, is_rotated, read_contract
from qrot.model.params import Network, layer_shapes
from qrot.quantize.method import WeightMethod
from qrot.records import check_name
from qrot.rotation.forms import Hadamard, Rotation
from qrot.rotation.transform import Online, Transform
from qrot.scheme import Scheme, layer_schemes
from qrot.sites import PROJECTIONS


def check(source: Source, options: Options) -> Plan:
    """The judged network's weights where a type holds them; otherwise weights rounded anew, on the
    run's own grid where a type holds that."""
    if options.dtype is not None:
        raise InputError("--dtype: a GGUF file has --type in its place")
    if options.type is not None:
        check_name(options.type, TYPES, "--type")
    asked = None if options.type is None else TYPES[options.type]
    check_model(source.opened, online=options.online)
    network = source.network if options.weights is None else None
    if network is not None:
        network = network.replace(scheme=weights_only(network.scheme))
        kind = _kind_held(network, asked, options.online)
        if kind is not None:
            return _judged(source, network, kind, options.online)
    return _anew(source, asked, options)


def _judged(source: Source, network: Network, kind: TensorType, online: bool) -> Plan:
    _check_sizes(network.config, network.scheme, kind)
    said = "Weights have the values that the run judged."
    if kind.grid is not None:
        said = (
            "Integers are those that the run judged. Their scales are rounded to float16, by 2^-11 "
            "of themselves at most. The run had embedding and head in full precision."
        )
    whole = source.transform
    lost = "" if whole is None else left_out(whole, _held(whole, online))
    return Plan(
        (*_lines(kind, online), said),
        network.scheme,
        kind.dtype,
        judged=network,
        after=_after(kind),
        lost=lost,
        type=kind.name,
    )


def _anew(source: Source, asked: TensorType | None, options: Options) -> Plan:
    whole = fitted(source)
    held = _held(whole, options.online)
    kind, scheme, nearest = _grids(weights_only(source.scheme), asked)
    _check_sizes(source.opened.config, scheme, kind)
    _check_method(weight_method(source, options.weights)[0], kind, options)
    return Plan(
        _lines(kind, options.online),
        scheme,
        kind.dtype,
        transform=held,
        nearest=nearest,
        after=_after(kind),
        lost=left_out(whole, held),
        type=kind.name,
    )


def _grids(run: Scheme, asked: TensorType | None) -> tuple[TensorType, Scheme, Change]:
    """The type, the grids and what rounds to nearest on them.

    They are the run's where no type is asked for and one holds them, or where the type that is
    asked for does and the run has scales of the size of its blocks. Otherwise llama.cpp's own
    quantiser rounds.
    """
    grids = (run.weights, *(replace(run.weights, bits=o.weights) for o in run.overrides))
    own = type_of(run.weights)
    meant = asked is None or (asked is own and run.weights.group == BLOCK)
    if meant and run.weights.on and all(map(in_blocks, grids)):
        return own, run, content.to_nearest
    kind = asked or Q8_0
    scheme = Scheme() if kind.grid is None else Scheme(weights=kind.grid)
    return kind, scheme, to_nearest


def _after(kind: TensorType) -> Callable[[Content], Content]:
    """What the file's scales, and the types of embedding and head, do to a network."""

    def stored(whole: Content) -> Content:
        return whole.changed(on_float16_scales)._replace(
            embed=lambda: through(whole.embed(), kind.ends),
            head=lambda: through(whole.head(), kind.ends),
        )

    return (lambda whole: whole) if kind.grid is None else stored


def _check_sizes(config: ModelConfig, scheme: Scheme, kind: TensorType) -> None:
    """Raise InputError where blocks do not divide the rows of a tensor that has them."""
    widths = {"embedding": config.hidden_size} if kind.grid is not None else {}
    for grids in layer_schemes(scheme, config.num_hidden_layers) if widths else ():
        shapes = layer_shapes(config)
        widths |= {name: shapes[name][0] for name, grid in grids.weights.items() if grid.on}
    for name, width in widths.items():
        if width % BLOCK:
            raise InputError(
                f"{kind.name} has blocks of {BLOCK}, which do not divide {width}, the row of "
                f"{name}: choose --type f16, bf16 or f32"
            )


def _check_method(method: WeightMethod, kind: TensorType, options: Options) -> None:
    """Raise InputError where a type cannot have weights that this method rounds anew."""
    if kind.grid is None and options.weights is not None:
        raise InputError(f"--weights rounds weights, and --type {kind.name} holds them unrounded")
    if kind.grid is not None and kind.grid.kind == "asymmetric" and method.text != "none":
        raise InputError(
            f"{method.label} finds integers for --type q4_0 and q8_0; {kind.name} takes "
            "--weights rtn only"
        )


def _lines(kind: TensorType, online: bool) -> tuple[str, ...]:
    first = (
        f"Weights {kind.kind.name}, embedding and head {kind.ends.name}, norms F32, for llama.cpp. "
        "It computes activations and cache in its own way."
    )
    if not online:
        return (first,)
    return (
        first,
        "**Its ffn_down reads inputs that R4 turns at run time**, as `prism.hadamard.*` in the "
        "file says. llama.cpp b11739 follows it. b11549 does not know these keys, and computes "
        "something else without a word.",
    )


def write(
    folder: Path, source: Source, plan: Plan, network: Content, advance: Callable[[int], None]
) -> None:
    """Write the folder; see `Format`."""
    config, down = network.config, network.online.rotations.get("down")
    kind = TYPES[plan.type]
    said = metadata(source, plan, config, kind)
    if isinstance(down, Hadamard):
        said |= contract(down, config.num_hidden_layers)
    path = folder / f"{model_name(source)}-{kind.name}.gguf"
    write_file(path, said, network, kind, advance=advance)


def load(folder: Path, source: Source) -> Network:
    """What qrot's own reader makes of the file, with R4 where it says so."""
    (path,) = folder.glob("*.gguf")
    return read_network(path)


def read_network(path: Path) -> Network:
    """The network of a GGUF file, with R4 online where the file says so.

    Raises:
        InputError: as `qrot.model.io.gguf.open_gguf` does, and where more than R4 is online.
    """
    stored = open_gguf(path, rotated=True)
    online = Online()
    if is_rotated(stored.metadata):
        online = Online({"down": read_contract(stored.metadata, stored.config)})
    return Network(assemble(stored, jnp.float32)(), online, stored.config)


GGUF = Format("gguf", check, write, load, takes=("type", "online"), proves=(), program=READ_AGAIN)


def weights_only(scheme: Scheme) -> Scheme:
    """The grids of a scheme's weights alone."""
    own = (replace(o, activations=None, keys=None, values=None) for o in scheme.overrides)
    return Scheme(scheme.weights, overrides=tuple(o for o in own if o.changes))


def _kind_held(network: Network, asked: TensorType | None, online: bool) -> TensorType | None:
    """The type in which GGUF holds the judged network, its activations and cache unrounded; None
    where it does not."""
    beside = acting(network).rotations
    if beside.keys() - ({"down"} if online else set()):
        return None
    if online:
        llama_rotation(beside.get("down"))
    if asked is not None and asked.grid is None:
        return asked
    own = type_of(network.scheme.weights)
    if own.grid is None or asked not in (None, own) or not _all_held(network):
        return None
    return own


def _all_held(network: Network) -> bool:
    schemes = layer_schemes(network.scheme, network.config.num_hidden_layers)
    layers = (jax.tree.map(itemgetter(i), network.params.layers) for i in range(len(schemes)))
    return all(
        holds(layer.linear(name), grids.weights[name])
        for layer, grids in zip(layers, schemes, strict=True)
        for name in PROJECTIONS
    )


def _held(whole: Transform, online: bool) -> Transform:
    """What of a transform the file holds: R1, R2 and scales, and with --online R4."""
    held = offline(whole)
    if not online:
        return held
    down = llama_rotation(whole.rotations.get("down"))
    return Transform({**held.rotations, "down": down}, held.scales)


def llama_rotation(rotation: Rotation | None) -> Hadamard:
    """R4; raises InputError where llama.cpp's contract cannot say it."""
    if isinstance(rotation, Hadamard) and rotation.stack:
        raise InputError("llama.cpp has one R4 for all layers, and this one has its own for each")
    return fixed_r4(rotation, "llama.cpp")
