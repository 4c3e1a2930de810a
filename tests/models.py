"""Tiny random models in Hugging Face folders, of every architecture and variant, without torch.

The sizes have Hadamard matrices that are not powers of two: hidden 48 = 12 * 4, head_dim 12 (20 in
qwen3), intermediate 56 = 28 * 2.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from qrot.model.params import Params
from qrot.sites import PROJECTIONS

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}
_OWN = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 20},
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# Every variant that qrot supports: name -> (architecture, changes to its config.json).
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-head-dim": ("llama", {"head_dim": 20}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-rope-linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    "llama-rope-llama3": ("llama", {"rope_theta": 500000.0, "rope_scaling": LLAMA3}),
    "llama-rope-parameters": (
        "llama",
        {"rope_theta": None, "rope_parameters": {**LLAMA3, "rope_theta": 500000.0}},
    ),
    "mistral": ("mistral", {}),
    "mistral-window": ("mistral", {"sliding_window": 4}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-biases": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "qwen3-window": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


def config_json(architecture: str, **changes: Any) -> dict[str, Any]:
    """The contents of config.json; a change to None of a key that has a size removes it."""
    config = {"model_type": architecture, "architectures": [_CLASSES[architecture]]}
    config |= _SIZES | _OWN[architecture] | changes
    return {k: v for k, v in config.items() if not (k in _SIZES and v is None)}


def weights(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 tensors under Hugging Face's names, weights [out, in], logits of order one.

    Norms' scales are away from 1 and embeddings' mean away from 0, so that forgetting to fold a
    norm, or centring an embedding, changes the result.
    """
    random = np.random.default_rng(seed)
    kind, hidden = config["model_type"], config["hidden_size"]
    heads, mlp = config["num_attention_heads"], config["intermediate_size"]
    head_dim = config.get("head_dim", hidden // heads)
    queries, keys = heads * head_dim, config["num_key_value_heads"] * head_dim
    attention = kind in ("llama", "qwen3") and config.get("attention_bias", False)
    tensors = {}

    def linear(name: str, out: int, into: int, bias: bool) -> None:
        tensors[f"{name}.weight"] = random.normal(0, 0.3, (out, into))
        if bias:
            tensors[f"{name}.bias"] = random.normal(0, 0.3, out)

    def norm(name: str, size: int) -> None:
        tensors[f"{name}.weight"] = random.uniform(0.5, 1.5, size)

    tensors["model.embed_tokens.weight"] = random.normal(0.2, 0.3, (config["vocab_size"], hidden))
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        norm(prefix + "input_layernorm", hidden)
        linear(prefix + "self_attn.q_proj", queries, hidden, attention or kind == "qwen2")
        linear(prefix + "self_attn.k_proj", keys, hidden, attention or kind == "qwen2")
        linear(prefix + "self_attn.v_proj", keys, hidden, attention or kind == "qwen2")
        linear(prefix + "self_attn.o_proj", hidden, queries, attention)
        if kind == "qwen3":
            norm(prefix + "self_attn.q_norm", head_dim)
            norm(prefix + "self_attn.k_norm", head_dim)
        norm(prefix + "post_attention_layernorm", hidden)
        biased = kind == "llama" and config.get("mlp_bias", False)
        linear(prefix + "mlp.gate_proj", mlp, hidden, biased)
        linear(prefix + "mlp.up_proj", mlp, hidden, biased)
        linear(prefix + "mlp.down_proj", hidden, mlp, biased)
    norm("model.norm", hidden)
    if not config["tie_word_embeddings"]:
        linear("lm_head", config["vocab_size"], hidden, False)
    return {name: tensor.astype(np.float32) for name, tensor in tensors.items()}


def write_folder(
    path: Path,
    architecture: str = "llama",
    *,
    seed: int = 0,
    shards: int = 1,
    dtype: str = "float32",
    **changes: Any,
) -> None:
    """Write config.json and the weights of a tiny random model; `changes` go into config.json."""
    config = config_json(architecture, **{"dtype": dtype, **changes})
    tensors = weights(config, seed)
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    write_files(path, config, {name: x.astype(kind) for name, x in tensors.items()}, shards)


def write_files(
    path: Path, config: dict[str, Any], tensors: dict[str, np.ndarray], shards: int = 1
) -> None:
    """Write a folder of this config.json and these tensors, in so many safetensors files."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2))
    if shards == 1:
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        return
    places = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        names = list(tensors)[shard::shards]
        save_file({name: tensors[name] for name in names}, path / file, {"format": "pt"})
        places |= dict.fromkeys(names, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def write_variant(path: Path, name: str, **options: Any) -> None:
    """Write the variant of this name (a key of `VARIANTS`)."""
    architecture, changes = VARIANTS[name]
    write_folder(path, architecture, **options, **changes)


def without_weights(params: Params) -> Params:
    """All that rounding weights leaves alone, embedding, norms, biases, head; weights are zeros."""

    def bare(linear):
        return linear.replace(weight=np.zeros(linear.weight.shape, np.float32), scale=None)

    layers = {name: bare(params.layers.linear(name)) for name in PROJECTIONS}
    return params.replace(layers=params.layers.replace(**layers))
