"""A folder that transformers loads: weights, config.json, tokenizer and generation config."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from qrot.errors import InputError
from qrot.export.beside import write_beside
from qrot.export.config import config_json
from qrot.export.content import Content, as_numpy
from qrot.files.tensors import SHARD, write_tensors
from qrot.model.io.assemble import EMBED, HEAD, MODULES, NORM
from qrot.model.io.config_json import BIASES
from qrot.model.io.load import Opened
from qrot.model.params import Layers, Linear

# From a layer (a stack of one), by its number, to tensors by name.
LayerTensors = Callable[[int, Layers], dict[str, np.ndarray]]


def write_checkpoint(
    folder: Path,
    opened: Opened,
    content: Content,
    *,
    dtype: str,
    write_layer: LayerTensors | None = None,
    config: Callable[[dict[str, Any]], dict[str, Any]] = lambda text: text,
    shard: int = SHARD,
    advance: Callable[[int], None] = lambda layers: None,
) -> None:
    """Write a folder; layers go to disk one at a time, as they are read.

    Args:
        folder: that is there, and empty.
        opened: the model that the rest comes from.
        content: the weights.
        dtype: of the tensors.
        write_layer: where layers are not plain weights.
        config: from the contents of config.json to what is written.
        shard: bytes of a file at most.
        advance: told of each layer.

    Raises:
        InputError: where a number does not fit the dtype.
    """
    kind, biases = jnp.dtype(dtype), {}
    each = write_layer or (lambda i, layer: layer_tensors(i, layer, kind))

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        yield EMBED, as_numpy(content.embed(), kind)
        for i, layer in enumerate(content.layers()):
            layer, own = _with_whole_biases(layer, content.config.architecture)
            biases.update(own)
            yield from each(i, layer).items()
            advance(1)
        yield NORM, as_numpy(content.norm, kind)
        yield HEAD, as_numpy(content.head(), kind)

    write_tensors(folder, finite(tensors()), shard=shard)
    text = {**config_json(opened, content.config), **biases, "dtype": dtype, "torch_dtype": dtype}
    text = json.dumps(config(text), indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    write_beside(folder, opened)


def finite(tensors: Iterator[tuple[str, np.ndarray]]) -> Iterator[tuple[str, np.ndarray]]:
    """The same tensors; raises InputError at one that its dtype could not hold."""
    for name, tensor in tensors:
        if not np.isfinite(tensor).all():
            dtype = tensor.dtype.name
            raise InputError(f"{name} has numbers that {dtype} cannot hold; choose another --dtype")
        yield name, tensor


def _with_whole_biases(layer: Layers, architecture: str) -> tuple[Layers, dict[str, bool]]:
    """A layer (a stack of one) whose projections have a bias all together or not at all, as
    transformers' classes have them, and the settings that say which; a GGUF file may mix them."""
    flags = {}
    for key, names in BIASES[architecture].items():
        linears = {name: layer.linear(name) for name in names}
        flags[key] = any(linear.bias is not None for linear in linears.values())
        if flags[key]:
            layer = layer.replace(**{name: _with_bias(x) for name, x in linears.items()})
    return layer, flags


def _with_bias(linear: Linear) -> Linear:
    if linear.bias is not None:
        return linear
    zeros = np.zeros((len(linear.weight), linear.weight.shape[-1]), np.float32)
    return linear.replace(bias=jnp.asarray(zeros))


def layer_tensors(i: int, layer: Layers, dtype: Any) -> dict[str, np.ndarray]:
    """One layer (a stack of one) under Hugging Face's names, weights [out, in]."""
    tensors = {}
    for field, module in MODULES.items():
        prefix, value = f"model.layers.{i}.{module}", getattr(layer, field)
        if isinstance(value, Linear):
            tensors[f"{prefix}.weight"] = as_numpy(value.weight[0].T, dtype)
            if value.bias is not None:
                tensors[f"{prefix}.bias"] = as_numpy(value.bias[0], dtype)
        elif value is not None:
            tensors[f"{prefix}.weight"] = as_numpy(value[0], dtype)
    return tensors


def stored_dtype(opened: Opened) -> str:
    """The dtype that a folder says its weights have; float32 for a GGUF file."""
    raw = opened.metadata if opened.path.is_dir() else {}
    name = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    return name if name in ("bfloat16", "float16") else "float32"
