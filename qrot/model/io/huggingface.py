"""Models in a Hugging Face folder: config.json and one or many safetensors files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from qrot.errors import InputError, located
from qrot.model.config import ModelConfig, RopeScaling
from qrot.model.io.assemble import Reader, Tensor, assemble, map_file, release

ARCHITECTURES = {  # model_type -> the class that config.json names
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# What transformers assumes where config.json says nothing.
_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}
_POSITIONS = {"llama": 2048, "mistral": 4096 * 32, "qwen2": 32768, "qwen3": 32768}
_SPECIAL = {"llama": (1, 2), "mistral": (1, 2)}  # bos, eos
# Settings of related models that change the function; fine if absent, null, false, 0 or 1.
_REFUSED = (
    "quantization_config",
    "compression_config",
    "pretraining_tp",
    "partial_rotary_factor",
    "rope_interleaved",
    "no_rope_layers",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "query_pre_attn_scalar",
    "attention_multiplier",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
    "num_experts",
    "num_local_experts",
    "use_qk_norm",
    "qk_layernorm",
)
_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


def open_folder(folder: Path, dtype: Any) -> tuple[ModelConfig, Reader, dict[str, Any], list[Path]]:
    """Open a folder.

    Args:
        folder: with config.json and safetensors files. A generation_config.json may name further
            tokens that end a text.
        dtype: of the parameters.

    Returns:
        The configuration, what reads the parameters, the contents of config.json, and the files
        that define the model.

    Raises:
        InputError: for a file that is missing or damaged and a model that qrot does not support.
    """
    path, generation = folder / "config.json", folder / "generation_config.json"
    raw = _json(path)
    with located(path):
        config, biased = parse_config(raw)
    if generation.is_file():
        ends = (*config.eos_token_ids, *_tokens(_json(generation).get("eos_token_id")))
        config = replace(config, eos_token_ids=tuple(dict.fromkeys(ends)))
    files, tensors = _open_weights(folder)
    with located(folder):
        read = assemble(config, tensors, dtype, biased=biased)
    return config, read, raw, [path, *files]


def parse_config(raw: Mapping[str, Any]) -> tuple[ModelConfig, list[str]]:
    """The configuration, and the projections with a bias, from the contents of config.json.

    Raises:
        InputError: for whatever qrot does not support, by name.
    """
    kind = _architecture(raw)
    for key in _REFUSED:
        if raw.get(key) not in (None, False, 0, 1, [], {}):
            raise InputError(f"{key} is set to {_short(raw[key])}, which is not supported.")
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise InputError(f"hidden_act {raw['hidden_act']!r} is not supported; supported is silu.")

    heads, layers = _integer(raw, "num_attention_heads"), _integer(raw, "num_hidden_layers")
    hidden = _integer(raw, "hidden_size")
    head_dim = 128 if kind == "qwen3" else hidden // heads
    bos, eos = _SPECIAL.get(kind, (None, None))
    positions = _integer(raw, "max_position_embeddings", _POSITIONS[kind])
    theta, scaling = _rope(raw, positions)
    config = ModelConfig(
        architecture=kind,
        hidden_size=hidden,
        intermediate_size=_integer(raw, "intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        # Null means as many as there are heads; absent means the default.
        num_key_value_heads=_integer(
            raw,
            "num_key_value_heads",
            heads if "num_key_value_heads" in raw else _KV_HEADS.get(kind, heads),
        ),
        head_dim=_integer(raw, "head_dim", head_dim),
        vocab_size=_integer(raw, "vocab_size"),
        rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=positions,
        sliding_window=_sliding_window(raw, kind, layers),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        bos_token_id=next(iter(_tokens(raw.get("bos_token_id", bos))), None),
        eos_token_ids=_tokens(raw.get("eos_token_id", eos)),
    )
    biased = ["q", "k", "v"] if kind == "qwen2" else []
    if kind in ("llama", "qwen3") and raw.get("attention_bias"):
        biased += ["q", "k", "v", "o"]
    if kind == "llama" and raw.get("mlp_bias"):
        biased += ["gate", "up", "down"]
    return config, biased


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures") or []
    kind = raw.get("model_type")
    by_class = {name: kind for kind, name in ARCHITECTURES.items()}
    if kind is None and len(names) == 1:
        kind = by_class.get(names[0])
    wrong = [name for name in names if by_class.get(name) != kind]
    if kind not in ARCHITECTURES or wrong:
        name = wrong[0] if wrong else kind
        raise InputError(
            f"the architecture {name!r} is not supported; supported are"
            f" {', '.join(ARCHITECTURES.values())} (SmolLM and SmolLM2 are Llama)."
        )
    return kind


def _rope(raw: Mapping[str, Any], positions: int) -> tuple[float, RopeScaling | None]:
    """theta and the scaling, in the form of transformers 5 (rope_parameters) or before it."""
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise InputError(f"rope_scaling must be an object, not {_short(rope)}.")
    rope = dict(rope)
    theta = _number(rope, "rope_theta", _number(raw, "rope_theta", 10000.0))
    old = rope.pop("type", None)
    kind = rope.pop("rope_type", old or "default")
    if kind not in ("default", "linear", "llama3"):
        raise InputError(
            f"rope scaling {kind!r} is not supported; supported are default, linear and llama3."
        )
    known = {
        "rope_theta": None,
        "factor": None,
        "low_freq_factor": None,
        "high_freq_factor": None,
        "original_max_position_embeddings": None,
        "partial_rotary_factor": 1,
    }
    for key, value in rope.items():
        if value and known.get(key, False) not in (None, value):
            raise InputError(f"rope scaling with {key} = {_short(value)} is not supported.")
    if kind == "default":
        return theta, None
    factor = _number(rope, "factor")
    if kind == "linear":
        return theta, RopeScaling("linear", factor) if factor != 1 else None
    key = "original_max_position_embeddings"
    low, high = _number(rope, "low_freq_factor"), _number(rope, "high_freq_factor")
    original = _integer({**rope, **raw}, key, positions)  # transformers' order of precedence
    return theta, RopeScaling("llama3", factor, low, high, original)


def _sliding_window(raw: Mapping[str, Any], kind: str, layers: int) -> tuple[int, ...] | None:
    types = raw.get("layer_types")
    if types is not None and (
        not isinstance(types, list)
        or len(types) != layers
        or not set(types) <= {"full_attention", "sliding_attention"}
    ):
        raise InputError(
            "layer_types must name full_attention or sliding_attention for each layer, not"
            f" {_short(types)}."
        )
    # Mistral has a window unless it says null.
    window = raw.get("sliding_window", 4096 if kind in ("mistral", "qwen2", "qwen3") else None)
    if kind in ("qwen2", "qwen3"):
        first = raw.get("max_window_layers", 28)
        if types is None:
            types = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
        window = window if raw.get("use_sliding_window", False) else None
    else:
        # transformers' Llama has no window, and its Mistral the same one in every layer.
        window = window if kind == "mistral" else None
        same = "full_attention" if window is None else "sliding_attention"
        if types is not None and set(types) != {same}:
            raise InputError(f"layer_types other than {same} are not supported for {kind}.")
        types = [same] * layers
    if window is None or "sliding_attention" not in types:
        return None
    window = _integer({"sliding_window": window}, "sliding_window")
    return tuple(window if entry == "sliding_attention" else 0 for entry in types)


def _integer(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if value is None:
        raise InputError(f"{key} is missing.")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{key} must be a positive integer, not {_short(value)}.")
    return value


def _number(raw: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = raw.get(key)
    value = default if value is None else value
    if value is None:
        raise InputError(f"{key} is missing.")
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise InputError(f"{key} must be a positive number, not {_short(value)}.")
    return float(value)


def _tokens(value: Any) -> tuple[int, ...]:
    """Ids that come as one number, as a list of them, or as null."""
    return tuple(x for x in (value if isinstance(value, list) else [value]) if type(x) is int)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise InputError(f"{path.parent} has no {path.name}.")
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not JSON, or not UTF-8
        raise InputError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(result, dict):
        raise InputError(f"{path} must hold a JSON object.")
    return result


def _open_weights(folder: Path) -> tuple[list[Path], dict[str, Tensor]]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single], _open_safetensors(single)
    if not index.is_file():
        raise InputError(f"{folder} has neither {single.name} nor {index.name}.")
    places = _json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(p, str) for p in places.values()):
        raise InputError(f"{index} has no weight_map from tensors to files.")
    tensors: dict[str, Tensor] = {}
    files = [folder / name for name in sorted(set(places.values()))]
    for file in files:
        if not file.is_file():
            raise InputError(f"{index} names the shard {file.name}, which is not there.")
        shard = _open_safetensors(file)
        absent = [name for name, place in places.items() if place == file.name if name not in shard]
        if absent:
            raise InputError(f"{index} places {absent[0]} in {file.name}, which lacks it.")
        tensors |= {k: v for k, v in shard.items() if places.get(k, file.name) == file.name}
    return files, tensors


def _open_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of one file, mapped. Read here because safetensors' numpy interface has no
    bfloat16 and gives whole tensors only."""
    memory = map_file(path)
    length = int.from_bytes(memory[:8], "little")
    start = 8 + length
    if len(memory) < start:
        raise InputError(f"{path} is truncated or not a safetensors file.")
    try:
        header = json.loads(memory[8:start])
        header.pop("__metadata__", None)
        entries = [
            (name, entry["dtype"], tuple(map(int, entry["shape"])), *entry["data_offsets"])
            for name, entry in header.items()
        ]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{path} is not a valid safetensors file.") from error
    tensors = {}
    for name, kind, shape, begin, end in entries:
        if kind not in _DTYPES:
            raise InputError(
                f"{path}: {name} has dtype {kind}, which is not supported; supported are"
                f" {', '.join(_DTYPES)}."
            )
        size = math.prod(shape) * _DTYPES[kind].itemsize
        if min(shape, default=1) < 1 or begin < 0 or end - begin != size:
            raise InputError(f"{path} is not a valid safetensors file: {name} has a wrong size.")
        if start + end > len(memory):
            raise InputError(f"{path} is truncated: {name} ends after the file.")
        flat = np.frombuffer(memory, _DTYPES[kind], math.prod(shape), start + begin)
        tensors[name] = _tensor(flat.reshape(shape), memory)
    return tensors


def _tensor(array: np.ndarray, memory: Any) -> Tensor:
    def rows(start: int, stop: int) -> np.ndarray:
        release(memory)
        return array[start:stop]

    return Tensor(array.shape, rows)
