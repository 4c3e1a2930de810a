"""What published checkpoints have in config.json: facts, by the names of the models."""

from __future__ import annotations

from typing import Any

LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "rms_norm_eps": 1e-05,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0",
    "use_cache": True,
    "vocab_size": 32000,
}
_LLAMA2 = _LLAMA | {
    "_name_or_path": "meta-llama/Llama-2-7b-hf",
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rope_scaling": None,
    "tie_word_embeddings": False,
}
_LLAMA3 = _LLAMA2 | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 8,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
_LLAMA31 = _LLAMA3 | {
    "eos_token_id": [128001, 128008, 128009],
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "rope_scaling": LLAMA3_SCALING,
}
_LLAMA32 = _LLAMA31 | {
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "rope_scaling": LLAMA3_SCALING | {"factor": 32.0},
    "tie_word_embeddings": True,
}
_MISTRAL = {
    **{key: value for key, value in _LLAMA.items() if key != "architectures"},
    "architectures": ["MistralForCausalLM"],
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_key_value_heads": 8,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
_QWEN3 = {
    **_QWEN2,
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "rope_scaling": None,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
_BEFORE_5 = ("rope_theta", "rope_scaling", "torch_dtype")
_SMOLLM2 = {
    **_LLAMA31,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    "vocab_size": 49152,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "LLaMA as it was first": _LLAMA
    | {
        "architectures": ["LLaMAForCausalLM"],
        "bos_token_id": 0,
        "eos_token_id": 1,
        "max_sequence_length": 2048,
        "pad_token_id": -1,
        "rms_norm_eps": 1e-06,
        "transformers_version": "4.27.0.dev0",
    },
    "Llama 2": _LLAMA2,
    "Llama 2 70B": _LLAMA2
    | {"hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8},
    "Vicuna 16k": _LLAMA2
    | {"max_sequence_length": 16384, "rope_scaling": {"factor": 4.0, "type": "linear"}},
    "CodeLlama": _LLAMA2 | {"rope_theta": 1000000, "vocab_size": 32016},
    "TinyLlama": _LLAMA2
    | {"hidden_size": 2048, "intermediate_size": 5632, "num_key_value_heads": 4},
    "Yi": _LLAMA2 | {"pad_token_id": 0, "rope_theta": 5000000.0, "vocab_size": 64000},
    "Granite Code": _LLAMA2
    | {
        "attention_bias": True,
        "attention_dropout": 0.1,
        "mlp_bias": True,
        "pad_token_id": 0,
        "rope_theta": 10000000,
        "tie_word_embeddings": True,
    },
    "DeepSeek Coder": _LLAMA2
    | {"rope_scaling": {"factor": 4.0, "type": "linear"}, "rope_theta": 100000},
    "Llama 3": _LLAMA3,
    "Llama 3.1": _LLAMA31,
    "Llama 3.2 of unsloth": _LLAMA32
    | {"pad_token_id": 128004, "unsloth_fixed": True, "unsloth_version": "2024.9"},
    "DeepSeek R1 Distill Llama": _LLAMA31,
    "SmolLM2": _SMOLLM2,
    "Mistral 0.1": _MISTRAL,
    "Mistral 0.3": _MISTRAL
    | {"rope_theta": 1e6, "sliding_window": None, "vocab_size": 32768, "attention_dropout": 0.0},
    "Mistral Nemo": _MISTRAL
    | {"head_dim": 128, "hidden_size": 5120, "sliding_window": None, "vocab_size": 131072},
    "Zephyr": _MISTRAL | {"_name_or_path": "mistralai/Mistral-7B-v0.1", "pad_token_id": 2},
    "OpenHermes": _MISTRAL | {"eos_token_id": 32000, "use_cache": False, "vocab_size": 32002},
    "Qwen2": _QWEN2,
    "Qwen2.5": _QWEN2 | {"use_mrope": False, "_attn_implementation_autoset": True},
    "DeepSeek R1 Distill Qwen": _QWEN2
    | {"bos_token_id": 151646, "eos_token_id": 151643, "sliding_window": 4096, "use_mrope": False},
    "Qwen3": _QWEN3,
    "Qwen3 as transformers 5 writes it": {
        **{key: value for key, value in _QWEN3.items() if key not in _BEFORE_5},
        "dtype": "bfloat16",
        "layer_types": ["full_attention"] * 28,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
        "pad_token_id": None,
        "transformers_version": "5.2.0",
    },
}
