"""What a decoder looks like: sizes and switches, in the names of Hugging Face's config.json."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeScaling:
    """Frequency scaling of the rotary embedding.

    Attributes:
        kind: `linear`: every frequency is divided by `factor`. `llama3` (Llama 3.1): frequencies
            whose wavelength exceeds original_max_position_embeddings / low_freq_factor are divided
            by `factor`, those below original_max_position_embeddings / high_freq_factor stay, and
            those between are blended.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


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
