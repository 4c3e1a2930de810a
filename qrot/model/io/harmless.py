"""The keys of config.json that do not change what a model computes.

All keys that are neither implemented nor here are refused by name: a key that nobody has looked at
may be what makes a Llama something else. One belongs into `HARMLESS` if no value of it changes the
logits of a text, and into `NEUTRAL` if some values do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qrot.errors import InputError
from qrot.files.plain import short, shown

_REASONS = {  # why they are harmless: their names
    "what a model is called, and which program wrote the file": """
        _name_or_path name_or_path model_name _commit_hash version license transformers_version
        transformers.js_config unsloth_fixed unsloth_version is_llama_config
    """,
    "how numbers are stored and code is run": """
        dtype torch_dtype use_bfloat16 torchscript tf_legacy_loss use_cache return_dict
        output_hidden_states output_attentions tie_last_hidden_states chunk_size_feed_forward
        attn_implementation _attn_implementation _attn_implementation_autoset
        _attn_implementation_internal _experts_implementation use_flash_attn use_flash_attention
        use_flash_attention_2 _flash_attn_2_enabled is_decoder
    """,
    "training": """
        initializer_range initializer_factor init_std attention_dropout attn_pdrop embd_pdrop
        resid_pdrop resid_dropout residual_dropout hidden_dropout hidden_dropout_prob
        attention_probs_dropout_prob dropout classifier_dropout gradient_checkpointing loss_type
    """,
    "heads of other tasks": """
        num_labels id2label label2id problem_type finetuning_task task_specific_params
    """,
    "the tokenizer, and lengths that are meant for it": """
        tokenizer_class prefix pad_token_id unk_token_id sep_token_id cls_token_id mask_token_id
        decoder_start_token_id bos_token eos_token pad_token unk_token tokenizer_padding_side
        tokenizer_model_max_length model_max_length max_sequence_length max_seq_length max_seq_len
        seq_length
    """,
    "how texts are drawn from the logits": """
        max_length max_new_tokens min_length min_new_tokens do_sample early_stopping num_beams
        num_beam_groups diversity_penalty temperature top_k top_p min_p typical_p epsilon_cutoff
        eta_cutoff penalty_alpha repetition_penalty encoder_repetition_penalty length_penalty
        no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences
        output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id
        remove_invalid_values exponential_decay_length_penalty suppress_tokens
        begin_suppress_tokens num_assistant_tokens num_assistant_tokens_schedule
        assistant_confidence_threshold assistant_lookbehind target_lookbehind
    """,
}
HARMLESS = frozenset(key for keys in _REASONS.values() for key in keys.split())
# Read by other architectures than the one at hand, or by readers of their own: the values at which
# they ask for nothing. A null passes where it is listed.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "is_causal": (True,),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "tie_encoder_decoder": (False, None),
    "pruned_heads": ({}, None),
    "auto_map": ({}, None),
    "pretraining_tp": (0, 1, None),
    # Biases.
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "bias": (False, None),
    "use_bias": (False, None),
    # Positions.
    "rope_interleaved": (False, None),
    "rope_traditional": (False, None),
    "rotary_pct": (1, None),
    "no_rope_layers": ([], None),
    "use_mrope": (False, None),
    "use_dynamic_ntk": (False, None),
    "use_logn_attn": (False, None),
    "alibi": (False, None),
    # Norms of queries and keys.
    "qk_norm": (False, None),
    "use_qk_norm": (False, None),
    "qk_layernorm": (False, None),
    # Multipliers.
    "embedding_multiplier": (1, None),
    "residual_multiplier": (1, None),
    "logits_scaling": (1, None),
    "logit_scale": (1, None),
    # Experts, and layers that predict further tokens.
    "num_experts": (0, None),
    "num_local_experts": (0, 1, None),
    "n_routed_experts": (0, None),
    "num_nextn_predict_layers": (0, None),
}


def check_rest(settings: Mapping[str, Any]) -> None:
    """Refuse a setting that may change what a model computes.

    Args:
        settings: what a reader of config.json has left over. A null passes where `NEUTRAL` does
            not know the key: it is what writers give a setting that is not used.

    Raises:
        InputError: with its name and value.
    """
    for key, value in settings.items():
        if key in NEUTRAL and any(_same(value, neutral) for neutral in NEUTRAL[key]):
            continue
        if key in HARMLESS or (value is None and key not in NEUTRAL):
            continue
        known = "not supported" if key in NEUTRAL else "no setting that qrot knows"
        raise InputError(
            f"{shown(key)} is set to {short(value)}, which is {known} and may change what the model"
            " computes."
        )


def _same(value: Any, neutral: Any) -> bool:
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
