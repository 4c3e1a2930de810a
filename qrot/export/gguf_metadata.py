"""What a GGUF file says of its model beside the tensors: sizes, switches, whose it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf

import qrot
from qrot.errors import InputError
from qrot.export.format import Plan
from qrot.export.gguf_file import architecture
from qrot.export.gguf_tokenizer import tokenizer_metadata
from qrot.export.gguf_types import TensorType
from qrot.export.source import Source
from qrot.model.config import ModelConfig
from qrot.model.io.load import Opened

# Of "general.", and not of the model but of the file that it came in.
_STALE = ("architecture", "type", "file_type", "quantization_version", "alignment")

# The architectures for which b11739 follows the contract of `qrot.model.io.gguf_hadamard`.
_WITH_R4 = ("llama", "qwen3")


def check_model(opened: Opened, *, online: bool) -> None:
    """Raise InputError for a model that llama.cpp refuses, or would compute another one of.

    Args:
        opened: the model.
        online: whether R4 is to act at run time.
    """
    config = opened.config
    if online and architecture(config) not in _WITH_R4:
        raise InputError(
            f"--online: llama.cpp has R4 for {' and '.join(_WITH_R4)}, not for "
            f"{config.architecture}"
        )
    if config.architecture == "qwen3" and any(n.endswith(".bias") for n in opened.identity.tensors):
        raise InputError("this model has biases, which llama.cpp's qwen3 lacks")
    window = min((x for x in config.sliding_window or () if x), default=None)
    if window is not None and window < config.max_position_embeddings:
        raise InputError(
            f"layers of this model look back on {window} tokens only, and llama.cpp's "
            f"{architecture(config)} on all: GGUF cannot say it"
        )
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "llama3" and architecture(config) != "llama":
        raise InputError(
            f"llama.cpp scales the rotary embedding as Llama 3 does in its llama only, not in "
            f"{config.architecture}"
        )


def metadata(source: Source, plan: Plan, config: ModelConfig, kind: TensorType) -> dict[str, Any]:
    """All keys but the architecture's name and those of what is online, in plain values.

    Args:
        source: whose model it is; of a GGUF file its own words are kept.
        plan: what is exported.
        config: of it.
        kind: that its weights have.
    """
    return {
        **_general(source, kind),
        **_sizes(config),
        **tokenizer_metadata(source.opened, config),
        **_own(source, plan),
    }


def model_name(source: Source) -> str:
    """The last part of the model's name, without the end of a GGUF file's."""
    name = Path(str(source.about["model"])).name
    return name.removesuffix(".gguf") or "model"


def _general(source: Source, kind: TensorType) -> dict[str, Any]:
    opened = source.opened
    said = {} if opened.path.is_dir() else opened.metadata
    start = "general."
    kept = {key: x for key, x in said.items() if key.startswith(start)}
    for key in _STALE:
        kept.pop(start + key, None)
    return {
        "general.type": "model",
        "general.name": model_name(source),
        **kept,
        "general.file_type": int(kind.file_type),
        "general.quantization_version": gguf.GGML_QUANT_VERSION,
    }


def _sizes(config: ModelConfig) -> dict[str, Any]:
    said = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": float(config.rope_theta),
    }
    if config.rope_scaling is not None and config.rope_scaling.kind == "linear":
        factor = float(config.rope_scaling.factor)
        said |= {"rope.scaling.type": "linear", "rope.scaling.factor": factor}
    return {f"{architecture(config)}.{key}": value for key, value in said.items()}


def _own(source: Source, plan: Plan) -> dict[str, Any]:
    """What was done to the weights, so that the file says it where its folder is not there."""
    about = source.about
    said = {
        "version": qrot.__version__,
        "model": str(about["model"]),
        "digest": about["digest"],
        "scheme": plan.scheme.name,
        "left_out": plan.lost,
    }
    return {f"qrot.{key}": str(value) for key, value in said.items()}
