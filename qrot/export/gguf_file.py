"""A GGUF file, written a layer at a time: what it says of itself, then its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import jax
import jax.numpy as jnp
import numpy as np
from gguf import GGMLQuantizationType as Kind
from jaxtyping import Float64

from qrot.export.content import Content
from qrot.export.gguf_types import HELD, TensorType, blocks, encoded, levels, type_of
from qrot.model.config import ModelConfig
from qrot.model.io.assemble import EMBED, HEAD, NORM
from qrot.model.io.gguf import FIELDS, FREQUENCIES, GLOBAL, unpermute
from qrot.model.layer import rope_table
from qrot.model.params import Layers, Linear
from qrot.scheme import LayerScheme, layer_schemes

_NAMES = {full: name for name, full in GLOBAL.items()}


class _Place(NamedTuple):
    """What the header says of a tensor: its name, its shape as NumPy has it, its type."""

    name: str
    shape: tuple[int, ...]
    kind: Kind


def write_file(
    path: Path,
    metadata: dict[str, Any],
    content: Content,
    types: TensorType,
    *,
    advance: Callable[[int], None] = lambda layers: None,
) -> None:
    """Write a file; see `qrot.model.io.gguf_header` for its layout.

    Args:
        path: of the file.
        metadata: beside the architecture, in plain values.
        content: the weights, with the values that the file is to have.
        types: of its tensors; where they have a grid, each weight has the type of its own.
        advance: told of each layer.

    Raises:
        InputError: where a number does not fit its type.
    """
    writer = gguf.GGUFWriter(path, architecture(content.config))
    for key, value in metadata.items():
        _add(writer, key, value)
    layers = content.layers()
    first = next(layers)
    for place in _places(content, first, types):
        block, size = gguf.GGML_QUANT_SIZES[place.kind]
        rows, width = place.shape[:-1], place.shape[-1] // block * size
        count = int(np.prod(rows)) * width
        writer.add_tensor_info(place.name, (*rows, width), np.dtype(np.uint8), count, place.kind)
    writer.open_output_file()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    try:
        for tensor in _tensors(content, chain([first], layers), types, advance):
            writer.write_tensor_data(np.ascontiguousarray(tensor))
    finally:
        writer.close()


def architecture(config: ModelConfig) -> str:
    """The name that GGUF has for it: Mistral is a llama there."""
    return "llama" if config.architecture == "mistral" else config.architecture


def divisors(config: ModelConfig) -> Float64[np.ndarray, " frequencies"] | None:
    """What GGUF divides the frequencies of the rotary embedding by, for Llama 3's scaling; None for
    no such scaling."""
    if config.rope_scaling is None or config.rope_scaling.kind != "llama3":
        return None
    with jax.enable_x64(True):
        cos, sin = (np.asarray(x) for x in rope_table(config, 2, jnp.float64))
    plain = config.rope_theta ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
    return plain / np.arctan2(sin[1], cos[1])


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add a value in the type that llama.cpp's own converter gives it."""
    if isinstance(value, list):
        if value:
            writer.add_array(key, value)
        return
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    add.get(type(value), writer.add_string)(key, value)


def _places(content: Content, first: Layers, types: TensorType) -> Iterator[_Place]:
    """All tensors, in the order of `_tensors`."""
    config = content.config
    table = (config.vocab_size, config.hidden_size)
    yield _Place(_NAMES[EMBED], table, types.ends)
    if (divided := divisors(config)) is not None:
        yield _Place(FREQUENCIES, divided.shape, Kind.F32)
    for i, grids in enumerate(layer_schemes(content.scheme, config.num_hidden_layers)):
        for name, value in _parts(first):
            if isinstance(value, Linear):
                kind = _kind(grids, FIELDS[name], types)
                yield _Place(f"blk.{i}.{name}.weight", value.weight.shape[:0:-1], kind)
                if value.bias is not None:
                    yield _Place(f"blk.{i}.{name}.bias", value.bias.shape[1:], Kind.F32)
            else:
                yield _Place(f"blk.{i}.{name}.weight", value.shape[1:], Kind.F32)
    yield _Place(_NAMES[NORM], (config.hidden_size,), Kind.F32)
    yield _Place(_NAMES[HEAD], table, types.ends)


def _tensors(
    content: Content,
    layers: Iterable[Layers],
    types: TensorType,
    advance: Callable[[int], None],
) -> Iterator[np.ndarray]:
    config = content.config
    yield encoded(np.asarray(content.embed(), np.float32), types.ends)
    if (divided := divisors(config)) is not None:
        yield divided.astype(np.float32)
    grids = layer_schemes(content.scheme, config.num_hidden_layers)
    for layer, own in zip(layers, grids, strict=True):
        yield from _layer_tensors(layer, own, types, config)
        advance(1)
    yield encoded(np.asarray(content.norm, np.float32), Kind.F32)
    yield encoded(np.asarray(content.head(), np.float32), types.ends)


def _parts(layer: Layers) -> Iterator[tuple[str, Any]]:
    """What a layer has, by GGUF's names."""
    named = ((name, getattr(layer, field)) for name, field in FIELDS.items())
    return ((name, value) for name, value in named if value is not None)


def _layer_tensors(
    layer: Layers, grids: LayerScheme, types: TensorType, config: ModelConfig
) -> Iterator[np.ndarray]:
    for name, value in _parts(layer):
        if not isinstance(value, Linear):
            yield encoded(np.asarray(value[0]), Kind.F32)
            continue
        order = _row_order(FIELDS[name], config)
        yield _weight(value, _kind(grids, FIELDS[name], types))[order]
        if value.bias is not None:
            yield encoded(np.asarray(value.bias[0]), Kind.F32)[order]


def _kind(grids: LayerScheme, projection: str, types: TensorType) -> Kind:
    """The type of a projection: that of its own grid, where the file has grids at all."""
    return types.kind if types.grid is None else type_of(grids.weights[projection]).kind


def _weight(linear: Linear, kind: Kind) -> np.ndarray:
    """The rows of a weight (a stack of one), one an output, as its type stores them."""
    if kind not in HELD:
        return encoded(np.asarray(linear.weight[0], np.float32).T, kind)
    assert linear.scale is not None
    codes, scale = levels(linear.weight[0], linear.scale[0])
    return blocks(codes.T, scale.T, kind)


def _row_order(field: str, config: ModelConfig) -> Any:
    """Which row of a projection each stored one is; all in their order where that is the same."""
    if architecture(config) != "llama" or field not in ("q", "k"):
        return slice(None)
    heads = config.num_attention_heads if field == "q" else config.num_key_value_heads
    order = unpermute(heads * config.head_dim, heads)
    assert order is not None
    return np.argsort(order)
