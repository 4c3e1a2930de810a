"""config.json: what is implemented is read, what is harmless passes, all else is refused."""

import copy
import math
from typing import Any

import models
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from real_configs import CONFIGS, LLAMA3_SCALING

from qrot.errors import InputError
from qrot.model.config import RopeScaling
from qrot.model.io.config_json import ARCHITECTURES, parse_config
from qrot.model.io.harmless import HARMLESS, NEUTRAL

try:
    import transformers
except ImportError:
    transformers = None


def parse(kind="llama", **changes):
    return parse_config({**models.config_json(kind), **changes}).config


@pytest.mark.parametrize("name", CONFIGS)
def test_the_settings_of_published_models(name):
    raw = CONFIGS[name]
    config = parse_config(raw).config
    assert config.architecture == raw["model_type"]
    assert config.num_hidden_layers == raw["num_hidden_layers"]
    assert config.tie_word_embeddings == raw.get("tie_word_embeddings", False)
    assert config.bos_token_id == raw["bos_token_id"]
    scaling = raw.get("rope_scaling")
    assert (config.rope_scaling is None) == (scaling is None)
    window = raw.get("sliding_window") if raw["model_type"] == "mistral" else None
    assert config.sliding_window == (window and (window,) * config.num_hidden_layers)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_the_settings_that_transformers_writes(kind):
    if transformers is None:
        pytest.skip("needs transformers")
    written = transformers.AutoConfig.for_model(kind).to_dict()
    config = parse_config(written).config
    for key in ("num_key_value_heads", "head_dim", "max_position_embeddings", "vocab_size"):
        assert getattr(config, key) == written.get(key, getattr(config, key))
    assert config.rope_theta == written["rope_parameters"]["rope_theta"]
    assert (config.sliding_window is None) == (written.get("sliding_window") is None)
    # What stands there only where it is not the default, for which we have the same.
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    least = {key: written[key] for key in ("model_type", "vocab_size", *sizes)}
    assert parse_config(least).config == config
    # Keys of transformers 4 that were dropped since.
    before = transformers.GenerationConfig._get_default_generation_params()
    for key in (*before, "torch_dtype", "torchscript", "pruned_heads", "tie_encoder_decoder"):
        assert key in HARMLESS or key in NEUTRAL, key


@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.parametrize(
    "changes",
    [
        {"is_causal": False},
        {"is_causal": None},
        {"a_new_idea": False},
        {"a_new_idea": 0},
        {"a_new_idea": ""},
        {"attention_chunk_size": 8192},
        {"per_layer_config": {"0": {"head_dim": 4}}},
        {"final_logit_softcapping": 30.0},
        {"attn_logit_softcapping": 50.0},
        {"query_pre_attn_scalar": 144},
        {"residual_multiplier": 0.22},
        {"logits_scaling": 8},
        {"embedding_multiplier": True},
        {"no_rope_layers": [1, 1, 0]},
        {"rope_interleaved": True},
        {"num_local_experts": 8},
        {"qk_norm": True},
        {"use_mrope": True},
        {"dual_chunk_attention_config": {"chunk_size": 262144}},
        {"is_encoder_decoder": True},
        {"add_cross_attention": 1},
        {"pruned_heads": {"0": [1]}},
        {"auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}},
        {"transform_config": {"config_groups": {}}},
        {"rope_condense_ratio": 8},
    ],
    ids=str,
)
def test_a_setting_that_may_change_the_function(kind, changes):
    (key,) = changes
    with pytest.raises(InputError, match=f"^{key} is set to .*"):
        parse(kind, **changes)


def test_a_setting_without_a_value_passes():
    assert parse(a_new_idea=None, is_causal=True, quantization_config=None) == parse()


def test_biases_are_read_only_where_the_architecture_has_them():
    def biased(kind, **changes):
        return parse_config({**models.config_json(kind), **changes}).biased

    assert biased("llama", attention_bias=True, mlp_bias=True) == [*"qkvo", "gate", "up", "down"]
    assert biased("qwen3", attention_bias=True) == [*"qkvo"]
    assert biased("qwen2", attention_bias=False) == [*"qkv"]
    assert biased("mistral", mlp_bias=False) == []
    for kind, key in [
        ("mistral", "attention_bias"),
        ("qwen2", "attention_bias"),
        ("qwen3", "mlp_bias"),
    ]:
        with pytest.raises(InputError, match=f"{key} is set to True"):
            biased(kind, **{key: True})


_HUGE = 10**30
SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings",
)  # fmt: skip


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize("value", ["4", 4.0, True, 0, -4, _HUGE, math.nan, [4], {}], ids=str)
def test_sizes_are_integers_in_range(key, value):
    with pytest.raises(InputError, match=key):
        parse(**{key: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000; at most"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architectures must be a list of texts"),
        ({"architectures": 3}, "architectures must be a list of texts, not 3"),
        ({"architectures": "LlamaForCausalLM"}, "architectures must be a list"),
        ({"architectures": {"LlamaForCausalLM": 1}}, "architectures must be a list"),
        ({"model_type": ["llama"]}, "model_type must be text"),
        ({"model_type": 1}, "model_type must be text"),
        ({"layer_types": [["full_attention"]] * 3}, "layer_types must be a list of texts"),
        ({"layer_types": "full_attention"}, "layer_types"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types must name"),
        (
            {"tie_word_embeddings": "false"},
            "tie_word_embeddings must be true or false, not 'false'",
        ),
        ({"tie_word_embeddings": 0}, "tie_word_embeddings"),
        ({"tie_word_embeddings": None}, "tie_word_embeddings"),
        ({"attention_bias": "no"}, "attention_bias must be true or false"),
        ({"mlp_bias": 1}, "mlp_bias"),
        ({"hidden_act": ["silu"]}, "hidden_act"),
        ({"hidden_act": None}, "hidden_act"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rms_norm_eps": 1e-40}, "rms_norm_eps is 1e-40; 1e-12 to 1 is taken"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"hidden_size": 50}, "head_dim is missing, and 4 heads do not divide 50"),
        ({"bos_token_id": "1"}, "bos_token_id must be the id of a token"),
        ({"bos_token_id": -1}, "bos_token_id"),
        ({"bos_token_id": True}, "bos_token_id"),
        ({"bos_token_id": 97}, r"bos_token_id names token 97, but the vocabulary has 97"),
        ({"bos_token_id": [1, 2]}, "bos_token_id names several tokens"),
        ({"eos_token_id": [2, "3"]}, "eos_token_id"),
        ({"eos_token_id": [2, 3.0]}, "eos_token_id"),
        ({"eos_token_id": [2, _HUGE]}, "eos_token_id names token"),
        ({"eos_token_id": {"a": 1}}, "eos_token_id"),
        ({"qrot_head": "both"}, "qrot_head must be one of stored, embedding"),
    ],
    ids=str,
)
def test_types_and_ranges(changes, message):
    with pytest.raises(InputError, match=message):
        parse(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": None, "architectures": None}, "neither model_type nor architectures"),
        (
            {"model_type": "mistral"},
            "model_type is 'mistral', but architectures has LlamaForCausalLM",
        ),
        ({"architectures": ["LlamaForCausalLM", "Qwen3ForCausalLM"]}, "but architectures has"),
        ({"architectures": ["LlamaModel"]}, "without a head.*LlamaForCausalLM"),
        ({"architectures": ["Qwen3Model"]}, "without a head.*Qwen3ForCausalLM"),
        ({"architectures": ["GPT2Model"]}, "'GPT2Model' is not supported"),
        ({"model_type": "qwen3_moe", "architectures": []}, "'qwen3_moe' is not supported"),
        ({"text_config": {"model_type": "mistral"}}, "text_config says .* more than text"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "'gptq', bits 4.*dequant"),
        ({"quantization_config": {}}, "quantization_config says"),
        ({"compression_config": {"format": "pack-quantized"}}, "compression_config.*quantised"),
        ({"quantization": {"group_size": 64, "bits": 4}}, "quantization says.*bits 4"),
    ],
    ids=str,
)
def test_other_models_are_refused_with_a_word_of_help(changes, message):
    with pytest.raises(InputError, match=message):
        parse(**changes)


def test_one_name_of_an_architecture_is_enough():
    for changes in (
        {"model_type": None},
        {"architectures": None},
        {"architectures": []},
        {"architectures": ["LLaMAForCausalLM"]},
        {"architectures": ["LLaMAForCausalLM"], "model_type": None},
    ):
        assert parse(**changes) == parse()


def test_windows():
    assert parse(sliding_window=128).sliding_window is None  # all that there are positions for
    for kind, changes, message in [
        ("llama", {"sliding_window": 7}, "sliding_window is 7, but LlamaForCausalLM has none"),
        ("llama", {"use_sliding_window": True}, "use_sliding_window is True"),
        (
            "mistral",
            {"sliding_window": 7, "use_sliding_window": False},
            "use_sliding_window is False",
        ),
        ("mistral", {"sliding_window": 0}, "sliding_window must be a positive integer"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "layer_types must be full_attention"),
        ("qwen2", {"use_sliding_window": "yes"}, "use_sliding_window must be true or false"),
        ("qwen2", {"max_window_layers": -1}, "max_window_layers"),
        ("qwen3", {"head_dim": None}, "head_dim"),
    ]:
        with pytest.raises(InputError, match=message):
            parse(kind, **changes)


DEFAULT5 = {"rope_type": "default", "rope_theta": 5e5}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_theta": 5e5}, (5e5, None)),
        ({"rope_parameters": DEFAULT5}, (5e5, None)),
        ({"rope_parameters": DEFAULT5, "rope_theta": 500000}, (5e5, None)),
        ({"rope_parameters": DEFAULT5, "rope_theta": 5e5, "rope_scaling": None}, (5e5, None)),
        ({"rope_parameters": {}, "rope_theta": 5e5}, (5e5, None)),
        ({"rope_scaling": {}, "rope_theta": 5e5}, (5e5, None)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, (1e4, RopeScaling("linear", 2.0))),
        ({"rope_scaling": {"type": "linear", "factor": 1.0}}, (1e4, None)),
        ({"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2}},
         (1e4, RopeScaling("linear", 2.0))),
        ({"rope_scaling": LLAMA3_SCALING}, (1e4, RopeScaling("llama3", 8.0, 1.0, 4.0, 8192))),
        ({"rope_scaling": LLAMA3_SCALING, "rope_theta": 5e5,
          "rope_parameters": LLAMA3_SCALING | {"rope_theta": 5e5}},
         (5e5, RopeScaling("llama3", 8.0, 1.0, 4.0, 8192))),
        ({"rope_scaling": {k: v for k, v in LLAMA3_SCALING.items() if k[0] != "o"}},
         (1e4, RopeScaling("llama3", 8.0, 1.0, 4.0, 128))),
        ({"rope_scaling": LLAMA3_SCALING | {"attention_factor": None}},
         (1e4, RopeScaling("llama3", 8.0, 1.0, 4.0, 8192))),
        ({"partial_rotary_factor": 1.0, "original_max_position_embeddings": 64}, (1e4, None)),
    ],
    ids=str,
)  # fmt: skip
def test_rope(changes, expected):
    raw = models.config_json("llama", rope_theta=None)
    config = parse_config({**raw, **changes}).config
    assert (config.rope_theta, config.rope_scaling) == expected
    if transformers is not None:
        read = transformers.AutoConfig.for_model(**copy.deepcopy({**raw, **changes}))
        theirs = dict(read.rope_parameters)
        assert theirs["rope_theta"] == config.rope_theta
        ours = config.rope_scaling or RopeScaling("default", 1.0)
        for key in theirs.keys() & {"factor", "low_freq_factor", "high_freq_factor"}:
            assert theirs[key] == getattr(ours, key)
        if ours.kind == "llama3":
            key = "original_max_position_embeddings"
            assert theirs[key] == getattr(ours, key)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": DEFAULT5}, "rope_parameters.rope_theta is 500000.0, but rope_theta"),
        ({"rope_scaling": {"rope_theta": 7.0}}, "rope_scaling.rope_theta is 7.0, but rope_theta"),
        ({"rope_parameters": LLAMA3_SCALING, "rope_scaling": None}, "contradict each other"),
        ({"rope_parameters": {"rope_type": "default"},
          "rope_scaling": {"type": "linear", "factor": 2.0}}, "contradict each other"),
        ({"rope_parameters": LLAMA3_SCALING, "original_max_position_embeddings": 64},
         "rope_parameters.original_max_position_embeddings is 8192, but original_max"),
        ({"rope_scaling": {"rope_type": "default", "type": "linear"}}, "rope_type is .*but type"),
        ({"rope_scaling": {"rope_type": ["linear"]}}, "rope_scaling: rope_type must be text"),
        ({"rope_scaling": [1]}, "rope_scaling must be an object"),
        ({"rope_scaling": {"factor": 2.0}}, "factor is set to 2.0, which rope scaling default"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": math.inf}}, "factor is inf"),
        ({"rope_scaling": {"type": "linear", "factor": -2}}, "factor must be a positive"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor must be a positive"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "mrope_section": [1]}}, "mrope_section"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "low_freq_factor": 1}}, "low_freq"),
        ({"rope_scaling": LLAMA3_SCALING | {"high_freq_factor": 1.0}}, "smaller than high_freq"),
        ({"rope_scaling": LLAMA3_SCALING | {"low_freq_factor": 0}}, "low_freq_factor must be"),
        ({"rope_scaling": LLAMA3_SCALING | {"attention_factor": 2.0}}, "attention_factor"),
        ({"rope_scaling": LLAMA3_SCALING | {"original_max_position_embeddings": 0}}, "original"),
        ({"rope_scaling": LLAMA3_SCALING | {"original_max_position_embeddings": None}}, "original"),
        ({"rope_theta": math.nan}, "rope_theta must be a positive number, not nan"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": -1e4}, "rope_theta"),
        ({"rope_theta": 1e300}, "rope_theta is 1e.300; 1 to 1e.15 is taken"),
        ({"rope_theta": 10**400}, "rope_theta is a number of more"),
        ({"rope_theta": "10000"}, "rope_theta"),
        ({"rope_theta": None}, "rope_theta"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"full_attention": DEFAULT5}}, "full_attention is set to"),
    ],
    ids=str,
)  # fmt: skip
def test_ropes_that_are_refused(changes, message):
    with pytest.raises(InputError, match=message):
        parse(**changes)


_PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=9)
    | st.sampled_from([*ARCHITECTURES, "linear", "llama3", "full_attention", 10**40]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3)
    ),
    max_leaves=6,
)
_KNOWN = [
    *models.config_json("llama"), *HARMLESS, *NEUTRAL, "rope_scaling", "rope_parameters",
    "sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "head_dim",
    "qrot_head", "partial_rotary_factor", "original_max_position_embeddings",
]  # fmt: skip
_KEYS = st.sampled_from([*_KNOWN, "quantization_config", "text_config"]) | st.text(max_size=12)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([*ARCHITECTURES]), st.dictionaries(_KEYS, _PLAIN, max_size=3))
def test_whatever_stands_there_is_read_or_refused(kind, changes: dict[str, Any]):
    raw = {**models.config_json(kind), **changes}
    refused, config = "", None
    try:
        config = parse_config(raw).config
    except InputError as error:
        refused = str(error)
    assert "\n" not in refused
    assert len(refused) < 600
    if config is not None:
        assert min(getattr(config, name) for name in SIZES) > 0
        assert all(key in _KNOWN or value is None for key, value in changes.items())
