"""From the metadata of a GGUF file to `ModelConfig`.

What is known and implemented is read, and what is known not to change the function passes. All
else under the name of the architecture is refused, whatever its value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np
from jaxtyping import Float32

from qrot.errors import InputError
from qrot.files.plain import short, shown
from qrot.model.config import ModelConfig, RopeScaling
from qrot.model.io.settings import (
    EPSILON,
    THETA,
    Settings,
    take_flag,
    take_integer,
    take_number,
    take_text,
)

ARCHITECTURES = ("llama", "qwen2", "qwen3")  # Mistral and SmolLM are stored as llama
_HARMLESS = {  # settings of the architecture that do not change the function
    "rope.scaling.original_context_length",  # read by scalings that are refused
    "rope.scaling.finetuned",
    "pooling_type",  # what an embedding takes of the last layer
    "tensor_data_layout",  # names the only one that there is
}
# What ends a text, and a turn or a message of a dialogue: llama.cpp stops at each.
_ENDS = ("eos", "eot", "eom")
_TOKENS = "tokenizer.ggml.tokens"


def check_kind(metadata: Mapping[str, Any]) -> str:
    """Refuse, by name, a file that is no model, not all of one, or of another architecture.

    Keys of names that neither GGUF nor an architecture claims pass: those who publish files leave
    notes of their own in them.

    Returns:
        The architecture.
    """
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise InputError(
            f"architecture {short(architecture)} is not supported in GGUF; supported are"
            f" {', '.join(ARCHITECTURES)} (which includes Mistral and SmolLM)."
        )
    split = metadata.get("split.count", 0), metadata.get("split.no", 0)
    if split not in ((0, 0), (1, 0)) or {type(x) for x in split} != {int}:  # 0: merged again
        raise InputError("the model is split over several GGUF files, which is not supported.")
    for key, only in (
        ("general.type", "model"),
        ("general.quantization_version", gguf.GGML_QUANT_VERSION),
    ):
        if not _is(metadata.get(key, only), only):
            raise InputError(f"{key} is {short(metadata[key])}; supported is {short(only)}.")
    others = {*gguf.MODEL_ARCH_NAMES.values(), "adapter"} - {architecture}
    for key in metadata:
        if key.split(".")[0] in others:
            raise InputError(f"the setting {shown(key)} is none of a {architecture} model.")
    return architecture


def _is(value: Any, only: Any) -> bool:
    return type(value) is type(only) and value == only


def parse_metadata(
    metadata: Mapping[str, Any],
    *,
    rows: int,
    tied: bool,
    divisors: Float32[np.ndarray, " frequencies"] | None,
) -> ModelConfig:
    """The configuration.

    Args:
        metadata: of a file that `check_kind` passes.
        rows: of the table of embeddings.
        tied: whether there is no output projection.
        divisors: of the frequencies of the rotary embedding, in which GGUF stores Llama 3's
            settings; None for none.

    Raises:
        InputError: for whatever qrot does not support, by name.
    """
    architecture = metadata["general.architecture"]
    start = f"{architecture}."
    settings = {key: value for key, value in metadata.items() if key.startswith(start)}
    layers = take_integer(settings, start + "block_count")
    hidden = take_integer(settings, start + "embedding_length")
    heads = _take_alike(settings, start + "attention.head_count", layers)
    head_dim = take_integer(settings, start + "attention.key_length", max(1, hidden // heads))
    for key, value, of in (
        ("attention.value_length", head_dim, "the head dimension"),
        ("rope.dimension_count", head_dim, "the head dimension"),
        ("vocab_size", rows, "the rows of the embedding"),
    ):
        if (found := take_integer(settings, start + key, value)) != value:
            raise InputError(f"{start}{key} is {found} and differs from {of}, {value}.")
    if not take_flag(settings, start + "attention.causal", True):
        raise InputError(f"{start}attention.causal is False, which is not supported.")
    tokens = metadata.get(_TOKENS)
    if isinstance(tokens, list) and len(tokens) != rows:
        raise InputError(f"{_TOKENS} has {len(tokens)} entries, but the embedding {rows} rows.")
    eps = start + "attention.layer_norm_rms_epsilon"
    theta = take_number(settings, start + "rope.freq_base", 1e4, **THETA)
    config = ModelConfig(
        architecture=architecture,
        hidden_size=hidden,
        intermediate_size=_take_alike(settings, start + "feed_forward_length", layers),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=_take_alike(settings, start + "attention.head_count_kv", layers, heads),
        head_dim=head_dim,
        vocab_size=rows,
        rms_norm_eps=take_number(settings, eps, 1e-5, **EPSILON),
        rope_theta=theta,
        rope_scaling=_take_rope_scaling(settings, start + "rope.", theta, head_dim, divisors),
        max_position_embeddings=take_integer(settings, start + "context_length"),
        tie_word_embeddings=tied,
        bos_token_id=next(iter(_tokens(metadata, rows, "bos")), None),
        eos_token_ids=_tokens(metadata, rows, *_ENDS),
    )
    if left := [key for key in settings if key.removeprefix(start) not in _HARMLESS]:
        raise InputError(f"the setting {shown(left[0])} is not supported.")
    return config


def _take_alike(settings: Settings, key: str, layers: int, default: int | None = None) -> int:
    """Take a size that a file may give once, or again for each layer."""
    value = settings.get(key)
    if isinstance(value, list) and value and len(value) == layers:
        settings[key] = value[0]
        if any(entry != value[0] for entry in value):
            raise InputError(f"{key} differs from layer to layer, which is not supported.")
    return take_integer(settings, key, default)


def _tokens(metadata: Mapping[str, Any], rows: int, *kinds: str) -> tuple[int, ...]:
    """The ids of special tokens that the file names, each once: one of a kind, or as Ollama writes
    them a list."""
    found: dict[int, None] = {}
    for key in (f"tokenizer.ggml.{kind}_token_id{many}" for kind in kinds for many in ("", "s")):
        if key not in metadata:
            continue
        value = metadata[key]
        ids = value if key.endswith("s") else [value]
        if not isinstance(ids, list) or any(type(x) is not int or not 0 <= x < rows for x in ids):
            raise InputError(f"{key} is {short(value)}, but tokens are 0 to {rows - 1}.")
        found |= dict.fromkeys(ids)
    return tuple(found)


def _take_rope_scaling(
    settings: Settings,
    prefix: str,
    theta: float,
    head_dim: int,
    divisors: Float32[np.ndarray, " frequencies"] | None,
) -> RopeScaling | None:
    kind = take_text(settings, prefix + "scaling.type") or "linear"
    if kind not in ("none", "linear"):
        raise InputError(
            f"rope scaling {short(kind)} is not supported; supported are none, linear and llama3."
        )
    old = take_number(settings, prefix + "scale_linear", 1.0)
    factor = take_number(settings, prefix + "scaling.factor", old)
    if old not in (1, factor):
        raise InputError(f"{prefix}scaling.factor and {prefix}scale_linear differ.")
    linear = RopeScaling("linear", factor) if kind == "linear" and factor != 1 else None
    if divisors is None:
        return linear
    if linear is not None:
        raise InputError(f"{prefix}scaling.factor beside rope_freqs.weight is not supported.")
    if divisors.shape != (head_dim // 2,) or not (np.isfinite(divisors) & (divisors >= 1)).all():
        raise InputError(
            f"rope_freqs.weight must hold {head_dim // 2} finite numbers that are not below 1."
        )
    return _llama3(divisors, theta)


def _llama3(divisors: Float32[np.ndarray, " frequencies"], theta: float) -> RopeScaling | None:
    """GGUF stores Llama 3's scaling as one divisor for each frequency; find its settings again.

    Every published model with it has low 1, high 4 and 8192 positions; the factor differs.
    """
    scaling = RopeScaling("llama3", float(divisors.max()), 1.0, 4.0, 8192)
    wavelength = 2 * np.pi * theta ** (np.arange(len(divisors)) / len(divisors))
    smooth = np.clip((8192 / wavelength - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    if not np.allclose(divisors, 1 / ((1 - smooth) / scaling.factor + smooth), rtol=1e-4):
        raise InputError("rope_freqs.weight holds frequencies other than those of Llama 3.")
    return scaling if scaling.factor > 1 else None
