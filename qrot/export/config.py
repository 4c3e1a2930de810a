"""config.json of an export, such that readers of every version make the same model of it.

transformers 5 reads rope_parameters and dtype, versions before it rope_theta, rope_scaling and
torch_dtype, and each version has defaults of its own for what is not there. So all that changes the
model is written, in both layouts; only what changes nothing is taken over as it was.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from qrot.model.config import ModelConfig
from qrot.model.io.config_json import ARCHITECTURES
from qrot.model.io.load import Opened

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rms_norm_eps",
    "max_position_embeddings",
)
# Of whoever wrote the file, and not true of an export: the code, the quantisation and the kernels
# that the old weights wanted, and lengths that stand elsewhere. So is all that begins with "_".
_STALE = (
    "auto_map",
    "quantization_config",
    "compression_config",
    "attn_implementation",
    "qrot_head",
    "original_max_position_embeddings",
    "partial_rotary_factor",
)
_BY_LAYER = ("qwen2", "qwen3")  # whose window is that of some layers only
_FULL, _SLIDING = "full_attention", "sliding_attention"


def config_json(opened: Opened, config: ModelConfig | None = None) -> dict[str, Any]:
    """The contents of config.json, its dtype and what says of biases aside.

    Args:
        opened: the model that the export comes from.
        config: of what is exported, where it is another one.
    """
    config = config or opened.config
    old = opened.metadata if opened.path.is_dir() else {}
    kept = {key: x for key, x in old.items() if key not in _STALE and not key.startswith("_")}
    return {
        **special_tokens(config),
        **kept,
        "model_type": config.architecture,
        "architectures": [ARCHITECTURES[config.architecture]],
        **{key: getattr(config, key) for key in _SIZES},
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        **_rope(config),
        **_window(config),
    }


def special_tokens(config: ModelConfig) -> dict[str, Any]:
    """The special ids, under Hugging Face's names: one number, or a list of several."""
    ends = list(config.eos_token_ids)
    return {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": ends if len(ends) > 1 else next(iter(ends), None),
    }


def _rope(config: ModelConfig) -> dict[str, Any]:
    """Both layouts."""
    theta, scaling = {"rope_theta": config.rope_theta}, None
    if config.rope_scaling is not None:
        scaling = asdict(config.rope_scaling)
        scaling = {"rope_type": scaling.pop("kind"), **scaling}
        if scaling["rope_type"] == "linear":  # whose name was another one when llama3 came
            scaling = {"rope_type": "linear", "type": "linear", "factor": scaling["factor"]}
    new = {**theta, **(scaling or {"rope_type": "default"})}
    return {**theta, "rope_scaling": scaling, "rope_parameters": new}


def _window(config: ModelConfig) -> dict[str, Any]:
    """The sliding window, and where the architecture has it in some layers only in which."""
    windows = config.sliding_window
    window = None if windows is None else max(windows)
    if config.architecture not in _BY_LAYER:
        return {"sliding_window": window}
    windows = windows or (0,) * config.num_hidden_layers
    return {
        "sliding_window": window,
        "use_sliding_window": window is not None,
        # For readers that do not know layer_types: the layers before it have no window.
        "max_window_layers": next((i for i, x in enumerate(windows) if x), len(windows)),
        "layer_types": [_SLIDING if x else _FULL for x in windows],
    }
