"""A folder that transformers loads: weights, config.json, tokenizer and generation config."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from qrot.export.content import Content, as_numpy
from qrot.files import SHARD, write_tensors
from qrot.model.config import ModelConfig
from qrot.model.io.assemble import EMBED, HEAD, MODULES, NORM
from qrot.model.io.huggingface import ARCHITECTURES
from qrot.model.io.load import Opened
from qrot.model.params import Layers, Linear

# What comes along from the model's own folder.
_BESIDE = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "generation_config.json",
    "chat_template*",
)
# What in config.json changes where directions of the residual stream were cut off.
_CUT = ("hidden_size", "head_dim", "rms_norm_eps")
# From a layer (a stack of one), by its number, to tensors by name.
LayerTensors = Callable[[int, Layers], dict[str, np.ndarray]]


def write_checkpoint(
    folder: Path,
    opened: Opened,
    content: Content,
    *,
    dtype: str,
    write_layer: LayerTensors | None = None,
    config: dict[str, Any] | None = None,
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
        config: more for config.json.
        shard: bytes of a file at most.
        advance: told of each layer.
    """
    kind = jnp.dtype(dtype)
    each = write_layer or (lambda i, layer: layer_tensors(i, layer, kind))

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        yield EMBED, as_numpy(content.embed(), kind)
        for i, layer in enumerate(content.layers()):
            yield from each(i, layer).items()
            advance(1)
        yield NORM, as_numpy(content.norm, kind)
        yield HEAD, as_numpy(content.head(), kind)

    write_tensors(folder, tensors(), shard=shard)
    text = {**config_json(opened), "tie_word_embeddings": False, "dtype": dtype}
    text.pop("torch_dtype", None)
    if content.config.hidden_size != opened.config.hidden_size:  # directions were cut off
        text |= {key: getattr(content.config, key) for key in _CUT}
    (folder / "config.json").write_text(json.dumps({**text, **(config or {})}, indent=2) + "\n")
    _write_beside(folder, opened)


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


def config_json(opened: Opened) -> dict[str, Any]:
    """config.json of the folder that the model came from, or one made for a GGUF file."""
    if opened.path.is_dir():
        return dict(opened.metadata)
    config = opened.config
    raw = asdict(config)
    kind = raw.pop("architecture")
    raw |= {"model_type": kind, "architectures": [ARCHITECTURES[kind]], "hidden_act": "silu"}
    raw["sliding_window"] = None  # no GGUF file that qrot reads has one
    raw["rope_scaling"] = _rope(config)
    raw.pop("eos_token_ids")
    return raw | _special(config)


def _rope(config: ModelConfig) -> dict[str, Any] | None:
    if config.rope_scaling is None:
        return None
    rope = asdict(config.rope_scaling)
    kind = rope.pop("kind")
    if kind == "linear":
        rope = {"factor": rope["factor"]}
    return {"rope_type": kind, **rope}


def _special(config: ModelConfig) -> dict[str, Any]:
    """The special ids, under Hugging Face's names: one number, or a list of several."""
    ends = list(config.eos_token_ids)
    return {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": ends if len(ends) > 1 else next(iter(ends), None),
    }


def _write_beside(folder: Path, opened: Opened) -> None:
    """Tokenizer and generation config: copied, or made from what a GGUF file says."""
    if opened.path.is_dir():
        for pattern in _BESIDE:
            for file in opened.path.glob(pattern):
                shutil.copyfile(file, folder / file.name)
        return
    config = opened.config
    (folder / "generation_config.json").write_text(json.dumps(_special(config), indent=2) + "\n")
    if opened.tokenizer is None:
        return
    opened.tokenizer.save(str(folder / "tokenizer.json"))
    about: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    first = {"bos_token": config.bos_token_id, "eos_token": next(iter(config.eos_token_ids), None)}
    for key, token in first.items():
        if token is not None:
            about[key] = opened.tokenizer.id_to_token(token)
    if template := opened.metadata.get("tokenizer.chat_template"):
        about["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n")
