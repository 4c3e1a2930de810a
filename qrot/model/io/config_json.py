"""From config.json to `ModelConfig`: what is implemented is read, what is harmless passes.

All else is refused by name: readers of such files ignore what they do not know, so that a model may
say of itself what no program that reads it does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from qrot.errors import InputError
from qrot.files.plain import short
from qrot.model.config import ModelConfig
from qrot.model.io import harmless
from qrot.model.io.rope import take_rope
from qrot.model.io.settings import (
    EPSILON,
    Settings,
    take_flag,
    take_integer,
    take_number,
    take_text,
    take_texts,
    take_tokens,
)

_MOST_LAYERS = 100_000
_FULL, _SLIDING = "full_attention", "sliding_attention"
HEADS = ("stored", "embedding")  # the values of "qrot_head"


@dataclass(frozen=True)
class _Architecture:
    """What transformers' class of this name assumes where config.json says nothing.

    Attributes:
        name: of the class.
        positions: max_position_embeddings.
        kv_heads: num_key_value_heads; None: as many as there are heads.
        head_dim: None: the hidden size divided among the heads.
        special: bos and eos.
        window: the sliding window; None for none.
        by_layer: whether use_sliding_window, max_window_layers and layer_types say which layers
            have the window; if not, all have it.
        biased: projections that always have a bias.
        bias_keys: the settings that give others a bias.
    """

    name: str
    positions: int
    kv_heads: int | None = None
    head_dim: int | None = None
    special: tuple[int | None, int | None] = (None, None)
    window: int | None = None
    by_layer: bool = False
    biased: tuple[str, ...] = ()
    bias_keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


_ATTENTION_BIAS = {"attention_bias": ("q", "k", "v", "o")}
_KNOWN = {  # by model_type
    "llama": _Architecture(
        "LlamaForCausalLM",
        positions=2048,
        special=(1, 2),
        bias_keys=_ATTENTION_BIAS | {"mlp_bias": ("gate", "up", "down")},
    ),
    "mistral": _Architecture(
        "MistralForCausalLM", positions=4096 * 32, kv_heads=8, special=(1, 2), window=4096
    ),
    "qwen2": _Architecture(
        "Qwen2ForCausalLM",
        positions=32768,
        kv_heads=32,
        window=4096,
        by_layer=True,
        biased=("q", "k", "v"),
    ),
    "qwen3": _Architecture(
        "Qwen3ForCausalLM",
        positions=32768,
        kv_heads=32,
        head_dim=128,
        window=4096,
        by_layer=True,
        bias_keys=_ATTENTION_BIAS,
    ),
}
ARCHITECTURES = {kind: known.name for kind, known in _KNOWN.items()}
BIASES = {kind: known.bias_keys for kind, known in _KNOWN.items()}  # projections by setting
_OF_OLD = {"LLaMAForCausalLM": "LlamaForCausalLM"}


class Parsed(NamedTuple):
    """What config.json says.

    Attributes:
        config: of the model.
        biased: the projections with a bias.
        head: which head counts where the embedding is tied and a head is stored, one of `HEADS`;
            None where config.json does not say.
    """

    config: ModelConfig
    biased: list[str]
    head: str | None


def parse_config(raw: Mapping[str, Any]) -> Parsed:
    """Read the contents of config.json.

    Raises:
        InputError: for whatever is wrong or unknown to qrot, by name.
    """
    _check_kind(raw)
    left = dict(raw)
    kind = _take_architecture(left)
    known = _KNOWN[kind]
    activation = left.pop("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise InputError(f"hidden_act {short(activation)} is not supported; supported is silu.")
    heads = take_integer(left, "num_attention_heads")
    hidden = take_integer(left, "hidden_size")
    layers = take_integer(left, "num_hidden_layers", most=_MOST_LAYERS)
    positions = take_integer(left, "max_position_embeddings", known.positions)
    vocabulary = take_integer(left, "vocab_size")
    theta, scaling = take_rope(left, positions)
    biased = [*known.biased]
    for key, projections in known.bias_keys.items():
        biased += projections if take_flag(left, key) else ()
    config = ModelConfig(
        architecture=kind,
        hidden_size=hidden,
        intermediate_size=take_integer(left, "intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        # Null means as many as there are heads; absent means the default.
        num_key_value_heads=take_integer(
            left, "num_key_value_heads", known.kv_heads or heads, null=heads
        ),
        head_dim=_take_head_dim(left, known, hidden, heads),
        vocab_size=vocabulary,
        rms_norm_eps=take_number(left, "rms_norm_eps", 1e-6, **EPSILON),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=positions,
        sliding_window=_take_window(left, known, layers, positions),
        tie_word_embeddings=take_flag(left, "tie_word_embeddings"),
        bos_token_id=_take_bos(left, vocabulary, known.special[0]),
        eos_token_ids=take_tokens(left, "eos_token_id", vocabulary, known.special[1]),
    )
    head = take_text(left, "qrot_head")
    if head not in (*HEADS, None):
        raise InputError(f"qrot_head must be one of {', '.join(HEADS)}, not {short(head)}.")
    harmless.check_rest(left)
    return Parsed(config, biased, head)


def _check_kind(raw: Mapping[str, Any]) -> None:
    """Refuse models of other kinds with a word on what to do."""
    for key in ("quantization_config", "compression_config", "quantization"):
        if (value := raw.get(key)) is not None:
            keys = ("quant_method", "quant_algo", "format", "bits")
            said = [
                f"{k} {short(value[k])}" for k in keys if isinstance(value, dict) and k in value
            ]
            raise InputError(
                f"{key} says that the weights are quantised ({', '.join(said) or short(value)});"
                " qrot needs the model that they were made of, or these weights dequantised first."
            )
    for key in ("text_config", "vision_config", "audio_config"):
        if raw.get(key) is not None:
            raise InputError(
                f"{key} says that {short(raw.get('model_type'))} is a model of more than text,"
                " which is not supported: save its language model as a model of its own first."
            )


def _take_architecture(left: Settings) -> str:
    names = [_OF_OLD.get(name, name) for name in take_texts(left, "architectures") or ()]
    said = take_text(left, "model_type")
    by_class = {name: kind for kind, name in ARCHITECTURES.items()}
    if said is None and not names:
        raise InputError("neither model_type nor architectures says which model it is.")
    supported = f"supported are {', '.join(ARCHITECTURES.values())} (SmolLM and SmolLM2 are Llama)."
    for name in names:
        full = name.removesuffix("Model") + "ForCausalLM"
        if name.endswith("Model") and full in by_class:
            raise InputError(
                f"architectures says {name}, a model without a head; if the embedding is its head,"
                f" write {full} there, and tie_word_embeddings: true."
            )
        if name not in by_class:
            raise InputError(f"the architecture {short(name)} is not supported; {supported}")
    if said is not None and said not in ARCHITECTURES:
        raise InputError(f"the architecture {short(said)} is not supported; {supported}")
    kinds: set[str] = {by_class[name] for name in names} | ({said} if said else set())
    if len(kinds) > 1:
        raise InputError(f"model_type is {short(said)}, but architectures has {', '.join(names)}.")
    return kinds.pop()


def _take_head_dim(left: Settings, known: _Architecture, hidden: int, heads: int) -> int:
    if known.head_dim is not None:
        return take_integer(left, "head_dim", known.head_dim)
    if left.get("head_dim") is None and hidden % heads:
        raise InputError(f"head_dim is missing, and {heads} heads do not divide {hidden}.")
    return take_integer(left, "head_dim", hidden // heads, null=hidden // heads)


def _take_bos(left: Settings, vocabulary: int, default: int | None) -> int | None:
    said = left.get("bos_token_id")
    tokens = take_tokens(left, "bos_token_id", vocabulary, default)
    if len(tokens) > 1:
        raise InputError(f"bos_token_id names several tokens, {short(said)}.")
    return next(iter(tokens), None)


def _take_window(
    left: Settings, known: _Architecture, layers: int, positions: int
) -> tuple[int, ...] | None:
    """The sliding window of each layer, 0 for none; None where no layer has one."""
    types = take_texts(left, "layer_types")
    if types is not None and (len(types) != layers or not {*types} <= {_FULL, _SLIDING}):
        raise InputError(
            f"layer_types must name {_FULL} or {_SLIDING} for each of {layers} layers, not"
            f" {short(types)}."
        )
    window = known.window  # null means none, absent means the default
    if "sliding_window" in left:
        null = left["sliding_window"] is None
        window = left.pop("sliding_window") if null else take_integer(left, "sliding_window")
    first = take_integer(left, "max_window_layers", 28, least=0)
    on = take_flag(left, "use_sliding_window", not known.by_layer and window is not None)
    if known.by_layer:
        window = window if on else None
    elif known.window is None and window is not None:
        # transformers' Llama has one in its cache only, which texts of its length never meet.
        if window < positions:
            raise InputError(f"sliding_window is {window}, but {known.name} has none.")
        window = None
    elif on != (window is not None):
        raise InputError(f"use_sliding_window is {on}, but sliding_window is {window}.")
    every = _FULL if window is None else _SLIDING
    if types is None:
        late = range(first if known.by_layer else 0, layers)
        types = [every if i in late else _FULL for i in range(layers)]
    elif {*types} != {every} and not (known.by_layer and window is not None):
        raise InputError(f"layer_types must be {every} for each layer of this model.")
    if window is None or _SLIDING not in types:
        return None
    return tuple(window if entry == _SLIDING else 0 for entry in types)
