"""Models in a Hugging Face folder: config.json and one or many safetensors files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from qrot.errors import InputError, located
from qrot.files.plain import parse_json, read_bytes, short, shown
from qrot.files.tensors import Tensor, open_tensor_file
from qrot.model.config import ModelConfig
from qrot.model.io.assemble import BLOCK, EMBED, HEAD, Stored
from qrot.model.io.config_json import HEADS, parse_config
from qrot.model.io.settings import take_tokens

_MOST_CONFIG, _MOST_INDEX = 1 << 22, 1 << 26  # bytes
# Files that say that a folder holds more or other than a model, whatever else is there.
_QUANTISED = "quantised: take the model that they were made of, or dequantise them first"
_REFUSED = {
    "adapter_config.json": (
        "an adapter (LoRA) for another model: merge the two with qrot merge, or give a config"
        " model: {base: MODEL, adapters: [FOLDER]}"
    ),
    "hf_quant_config.json": f"weights that ModelOpt {_QUANTISED}",
    "quantize_config.json": f"weights that AutoGPTQ {_QUANTISED}",
    "quant_config.json": f"weights that AutoAWQ {_QUANTISED}",
}
# What may be there in place of config.json or of the weights, and what to do then.
_ELSEWHERE = (
    ("*.gguf", "give that file itself"),
    ("consolidated*", "convert it to Hugging Face's layout first"),
)
_NO_CONFIG = (
    *_ELSEWHERE,
    ("snapshots/*/config.json", "give the folder of that file"),
    ("*/config.json", "give the folder of that file"),
)
_NO_WEIGHTS = (
    *_ELSEWHERE,
    ("pytorch_model*.bin", "save the model as safetensors first"),
    ("model*.safetensors", "rename it to model.safetensors, or its index to that of its shards"),
    ("*.safetensors", "rename it to model.safetensors if it is the whole model"),
)


def open_folder(folder: Path) -> Stored:
    """Open a folder.

    Args:
        folder: with config.json and safetensors files. A generation_config.json may name further
            tokens that end a text.

    Raises:
        InputError: for a file that is missing or damaged and a model that qrot does not support.
    """
    for name, meaning in _REFUSED.items():
        if os.path.lexists(folder / name):
            raise InputError(f"{folder / name} says that the folder holds {meaning}.")
    path, generation = folder / "config.json", folder / "generation_config.json"
    if not os.path.isfile(path):
        raise InputError(f"{folder} has no {path.name}{_instead(folder, _NO_CONFIG)}.")
    raw = _read(path, _MOST_CONFIG)
    with located(path):
        config, biased, head = parse_config(raw)
        raw.pop("qrot_head", None)  # is followed here, and means nothing to others
    if os.path.lexists(generation):
        said = _read(generation, _MOST_CONFIG)
        with located(generation):
            ends = take_tokens(said, "eos_token_id", config.vocab_size)
        config = replace(config, eos_token_ids=tuple(dict.fromkeys(config.eos_token_ids + ends)))
    files, stored = _open_weights(folder)
    with located(folder):
        config, tensors = _choose_head(config, _rename(_parameters(stored)), head)
    return Stored(config, tensors, biased, raw, [path, *files])


def _read(path: Path, most: int) -> dict[str, Any]:
    with located(path):
        result = parse_json(read_bytes(path, most))
        if not isinstance(result, dict):
            raise InputError("must hold a JSON object.")
    return result


def _instead(folder: Path, places: Iterable[tuple[str, str]]) -> str:
    """A clause on what a folder holds in place of what is needed; "" if nothing is known."""
    for pattern, advice in places:
        for found in sorted(folder.glob(pattern)):
            return f"; it holds {shown(str(found.relative_to(folder)))}: {advice}"
    return ""


def _open_weights(folder: Path) -> tuple[list[Path], dict[str, Tensor]]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if not os.path.isfile(index):
        if not os.path.isfile(single):
            raise InputError(
                f"{folder} has neither {single.name} nor {index.name}"
                f"{_instead(folder, _NO_WEIGHTS)}."
            )
        return [single], open_tensor_file(single)[0]
    places = _read(index, _MOST_INDEX).get("weight_map")
    with located(index):
        shards = _shards(places)
        if os.path.isfile(single) and single.name not in shards:
            raise InputError(
                f"names other files than {single.name}, which is there, too: remove what is not"
                " meant."
            )
        for shard in shards:
            if not os.path.isfile(folder / shard):
                raise InputError(f"names the shard {shown(shard)}, which is not there.")
    tensors: dict[str, Tensor] = {}
    owner: dict[str, str] = {}
    for shard, names in shards.items():
        stored = open_tensor_file(folder / shard)[0]
        with located(index):
            for name in names:
                if name not in stored:
                    raise InputError(f"places {shown(name)} in {shown(shard)}, which lacks it.")
            for name in stored:
                if name in owner:
                    raise InputError(
                        f"names {shown(owner[name])} and {shown(shard)}, which both hold"
                        f" {shown(name)}."
                    )
        tensors |= stored
        owner |= dict.fromkeys(stored, shard)
    return [folder / shard for shard in shards], tensors


def _shards(places: Any) -> dict[str, list[str]]:
    """The tensors of each shard, by its path within the folder."""
    if not isinstance(places, dict) or not all(isinstance(p, str) for p in places.values()):
        raise InputError("has no weight_map from tensors to files.")
    shards: dict[str, list[str]] = {}
    for name, place in places.items():
        path = PurePosixPath(place)
        if path.is_absolute() or ".." in path.parts or "\\" in place or not path.name:
            raise InputError(f"names the shard {short(place)}, which is no file of the folder.")
        shards.setdefault(str(path), []).append(name)
    if not shards:
        raise InputError("has a weight_map without tensors.")
    return dict(sorted(shards.items()))


def _parameters(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the rotary frequencies that old checkpoints store, which the configuration says."""
    return {name: x for name, x in tensors.items() if not name.endswith("rotary_emb.inv_freq")}


def _rename(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Put tensors under their usual names: without a prefix of all of them, and with "model.".

    Wrappers of modules leave prefixes (_orig_mod., module., base_model.model.); a model that was
    saved without its head lacks "model.".
    """
    tail = EMBED.removeprefix("model.")
    found = [name for name in tensors if f".{name}".endswith(f".{tail}")]
    if len(found) != 1 or found == [EMBED]:
        return tensors
    prefix = found[0].removesuffix(tail)
    flat = not f".{prefix}".endswith(".model.")
    prefix = prefix if flat else prefix.removesuffix("model.")
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not name.startswith(prefix):
            raise InputError(
                f"the embedding is stored as {shown(found[0])}, but {shown(name)} does not begin"
                f" with {shown(prefix)}, too."
            )
        name = name.removeprefix(prefix)
        result[f"model.{name}" if flat and name != HEAD else name] = tensor
    return result


def _choose_head(
    config: ModelConfig, tensors: Mapping[str, Tensor], choice: str | None
) -> tuple[ModelConfig, Mapping[str, Tensor]]:
    """Where the embedding is tied and a head is stored beside it, take the one that counts.

    Some programs take the embedding then, others the head: they must be the same, or config.json
    must say which.
    """
    stored, embedding = HEADS
    if not config.tie_word_embeddings or HEAD not in tensors:
        only = embedding if config.tie_word_embeddings else stored
        if choice not in (only, None):
            raise InputError(f"qrot_head is {choice}, but there is only the one that is {only}.")
        return config, tensors
    if choice == stored:
        return replace(config, tie_word_embeddings=False), tensors
    if choice != embedding and EMBED in tensors and not _equal(tensors[HEAD], tensors[EMBED]):
        raise InputError(
            f"tie_word_embeddings says that the embedding is the head, but a {HEAD} is stored that"
            f" differs from {EMBED}, and programs disagree on which of them counts: write"
            f' "qrot_head": "{stored}" or "qrot_head": "{embedding}" into config.json.'
        )
    return config, {name: tensor for name, tensor in tensors.items() if name != HEAD}


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or len(a.shape) != 2:
        return False
    rows, step = a.shape[0], max(1, BLOCK // max(1, a.shape[1]))
    blocks = ((start, min(start + step, rows)) for start in range(0, rows, step))
    return all(
        np.array_equal(
            a.rows(*block).astype(np.float64), b.rows(*block).astype(np.float64), equal_nan=True
        )
        for block in blocks
    )
