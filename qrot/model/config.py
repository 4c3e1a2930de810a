"""What a decoder looks like: sizes and switches, in the names of Hugging Face's config.json."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from qrot.errors import InputError

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class RopeScaling:
    """Frequency scaling of the rotary embedding.

    Attributes:
        kind: `linear`: every frequency is divided by `factor`. `llama3` (Llama 3.1): frequencies
            whose wavelength exceeds original_max_position_embeddings / low_freq_factor are divided
            by `factor`, those below original_max_position_embeddings / high_freq_factor stay, and
            those between are blended.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


# Of the class below: what changes no logit, or follows from the weights.
_NO_FUNCTION = (
    "architecture",
    "max_position_embeddings",
    "tie_word_embeddings",
    "vocab_size",
    "bos_token_id",
    "eos_token_ids",
)


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only model with RMSNorm, rotary embedding and a gated MLP.

    Attributes:
        architecture: llama, mistral, qwen2 or qwen3.
        sliding_window: tokens that a layer may look back on, itself included; one entry a layer, 0
            for no limit. None: no layer has a limit.
        bos_token_id: what texts begin with; None where the model has none.
        eos_token_ids: the tokens that end a text, the usual one first; () where the model has none.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: int = 2048
    sliding_window: tuple[int, ...] | None = None
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def prefix_token_id(self) -> int | None:
        """What stands for an empty context: BOS, or the first EOS where there is no BOS."""
        first = next(iter(self.eos_token_ids), None)
        return first if self.bos_token_id is None else self.bos_token_id

    @property
    def function(self) -> dict[str, Any]:
        """What of it changes a logit and does not follow from the weights, as plain values."""
        return {key: x for key, x in asdict(self).items() if key not in _NO_FUNCTION}


def check_config(config: ModelConfig) -> None:
    """Raise InputError where a configuration out of one of qrot's own files is that of no model."""
    scaling, window = config.rope_scaling, config.sliding_window
    bos, ends = config.bos_token_id, config.eos_token_ids
    numbers = {**vars(config), **(vars(scaling) if scaling else {}), "bos_token_id": None}
    for name, value in numbers.items():
        if type(value) in (int, float) and not 0 < value < math.inf:
            raise InputError(f"{name} is {value}, which is no positive number")
    fine = {
        "architecture": config.architecture in ARCHITECTURES,
        "num_key_value_heads": config.num_attention_heads % config.num_key_value_heads == 0,
        "head_dim": config.head_dim % 2 == 0,
        "kind": scaling is None or scaling.kind in ("linear", "llama3"),
        "sliding_window": window is None
        or (len(window) == config.num_hidden_layers and min(window) >= 0),
        "bos_token_id": bos is None or 0 <= bos < config.vocab_size,
        "eos_token_ids": all(token >= 0 for token in ends),
    }
    if wrong := [name for name, right in fine.items() if not right]:
        raise InputError(f"{wrong[0]} is that of no model that qrot has")
