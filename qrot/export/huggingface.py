"""A folder that transformers loads: rotations fused, at full precision or with rounded weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from qrot.export.fitted import Fitted, as_numpy, fused_embed, fused_head, fused_layers
from qrot.files import SHARD, write_tensors
from qrot.model.io.assemble import EMBED, HEAD, MODULES, NORM
from qrot.model.config import ModelConfig
from qrot.model.io.huggingface import ARCHITECTURES
from qrot.model.io.load import Opened
from qrot.model.params import Layers, Linear
from qrot.rotation.forms import Learned

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
LayerTensors = Callable[[int, Layers], dict[str, np.ndarray]]


def write_huggingface(
    folder: Path,
    fitted: Fitted,
    learned: Learned,
    *,
    dtype: str,
    write_layer: LayerTensors | None = None,
    config: dict[str, Any] | None = None,
    shard: int = SHARD,
    advance: Callable[[int], None] = lambda layers: None,
) -> None:
    """Write weights, config.json, tokenizer and generation config.

    learned: what is fused. dtype: of the tensors; they are computed in float64. write_layer: from a
    fused layer (a stack of one) to tensors by name, where they are not plain weights. config: more
    for config.json. Layers are read, fused and written one at a time. advance: told of each.
    """
    kind = jnp.dtype(dtype)
    each = write_layer or (lambda i, layer: layer_tensors(i, layer, kind))

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        yield EMBED, as_numpy(fused_embed(fitted, learned.rotations), kind)
        for i, layer in enumerate(fused_layers(fitted, learned)):
            yield from each(i, layer).items()
            advance(1)
        yield NORM, np.ones(fitted.opened.config.hidden_size, kind)
        yield HEAD, as_numpy(fused_head(fitted, learned.rotations), kind)

    write_tensors(folder, tensors(), shard=shard)
    text = {**config_json(fitted.opened), "tie_word_embeddings": False, "dtype": dtype}
    text.pop("torch_dtype", None)
    (folder / "config.json").write_text(json.dumps({**text, **(config or {})}, indent=2) + "\n")
    _write_beside(folder, fitted.opened)


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
    return raw


def _rope(config: ModelConfig) -> dict[str, Any] | None:
    if config.rope_scaling is None:
        return None
    rope = asdict(config.rope_scaling)
    kind = rope.pop("kind")
    if kind == "linear":
        rope = {"factor": rope["factor"]}
    return {"rope_type": kind, **rope}


def _write_beside(folder: Path, opened: Opened) -> None:
    """Tokenizer and generation config: copied, or made from what a GGUF file says."""
    if opened.path.is_dir():
        for pattern in _BESIDE:
            for file in opened.path.glob(pattern):
                shutil.copyfile(file, folder / file.name)
        return
    config = opened.config
    special = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}
    (folder / "generation_config.json").write_text(json.dumps(special, indent=2) + "\n")
    if opened.tokenizer is None:
        return
    opened.tokenizer.save(str(folder / "tokenizer.json"))
    about: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for key, token in special.items():
        if token is not None:
            about[key.removesuffix("_id")] = opened.tokenizer.id_to_token(token)
    if template := opened.metadata.get("tokenizer.chat_template"):
        about["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n")
