"""Hugging Face folders: every tensor, every setting, and what is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest

from qrot.errors import InputError
from qrot.model.config import RopeScaling
from qrot.model.io.load import load

MODULES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
NORMS = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("variant", models.VARIANTS)
def test_folder_holds_every_tensor(tmp_path, variant):
    models.write_variant(tmp_path, variant)
    architecture, changes = models.VARIANTS[variant]
    stored = models.weights(models.config_json(architecture, **changes))
    params = load(str(tmp_path)).network.params

    def check(array, name):
        if array is None:
            assert name not in stored
        else:
            np.testing.assert_array_equal(array, stored.pop(name))

    check(params.embed, "model.embed_tokens.weight")
    check(params.norm, "model.norm.weight")
    check(None if params.head is None else params.head.T, "lm_head.weight")
    for layer in range(3):
        one = jax.tree.map(lambda x: x[layer], params.layers)  # noqa: B023
        for field, module in MODULES.items():
            name = f"model.layers.{layer}.{module}"
            check(getattr(one, field).weight.T, f"{name}.weight")
            check(getattr(one, field).bias, f"{name}.bias")
        for field, module in NORMS.items():
            check(getattr(one, field), f"model.layers.{layer}.{module}.weight")
    assert not stored


def test_shards_and_one_file_are_the_same_model(tmp_path):
    models.write_folder(tmp_path / "one", "qwen3")
    models.write_folder(tmp_path / "many", "qwen3", shards=4)
    one, many = load(str(tmp_path / "one")), load(str(tmp_path / "many"))
    same(one.network.params, many.network.params)
    assert one.network.config == many.network.config


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16", "float16"])
def test_dtypes(tmp_path, stored, wanted):
    models.write_folder(tmp_path, "llama", dtype=stored)
    params = load(str(tmp_path), dtype=wanted).network.params
    expected = models.weights(models.config_json("llama"))["lm_head.weight"].T
    assert {x.dtype.name for x in jax.tree.leaves(params)} == {wanted}
    expected = jnp.asarray(expected).astype(stored).astype(wanted)
    np.testing.assert_array_equal(params.head, expected)


def test_sliding_windows(tmp_path):
    def window(architecture, **changes):
        models.write_folder(tmp_path, architecture, **changes)
        return load(str(tmp_path)).network.config.sliding_window

    three = ["full_attention", "sliding_attention", "full_attention"]
    assert window("mistral", sliding_window=7) == (7, 7, 7)
    assert window("mistral", sliding_window=None) is None
    assert window("llama", sliding_window=None) is None
    assert window("qwen2", sliding_window=7, max_window_layers=0) is None
    on: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 7}
    assert window("qwen2", **on, max_window_layers=2) == (0, 0, 7)
    assert window("qwen3", **on, max_window_layers=9) is None
    assert window("qwen3", **on, max_window_layers=0, layer_types=three) == (0, 7, 0)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rope(tmp_path, key):
    scaling = {**models.LLAMA3, "rope_theta": 5e5}
    models.write_folder(tmp_path, "llama", rope_theta=None, **{key: scaling})
    config = load(str(tmp_path)).network.config
    assert config.rope_theta == 5e5
    assert config.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 32)


def test_rotary_buffers_and_a_head_that_is_the_embedding_are_ignored(tmp_path):
    config = models.config_json("llama", tie_word_embeddings=True)
    tensors = models.weights(config)
    models.write_files(tmp_path / "a", config, tensors)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(6, np.float32)
    models.write_files(tmp_path / "b", config, tensors)
    same(load(str(tmp_path / "a")).network.params, load(str(tmp_path / "b")).network.params)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}, "Gemma2.*Qwen3"),
        ({"model_type": "gemma2", "architectures": None}, "gemma2.*supported are Llama"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "SequenceClassification"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn.*linear and llama3"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "'dynamic'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor is missing"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "full_attention"),
        ({"hidden_act": "gelu"}, "'gelu'.*silu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"pretraining_tp": 2}, "pretraining_tp"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "48"}, "hidden_size must be a positive integer"),
        ({"num_key_value_heads": 3}, "3 key-value heads"),
        ({"head_dim": 13}, "head_dim is 13"),
        ({"head_dim": 10}, r"q_proj.weight has shape \[48, 48\].*says \[40, 48\]"),
        ({"num_hidden_layers": 4}, "lack model.layers.3.*more tensors"),
        ({"num_hidden_layers": 2}, "hold model.layers.2.*more tensors"),
        ({"attention_bias": True}, "lack .*bias"),
        ({"vocab_size": 96}, "embed_tokens.weight has shape"),
    ],
)
def test_unsupported_configurations(tmp_path, changes, message):
    tensors = models.weights(models.config_json("llama"))
    models.write_files(tmp_path, models.config_json("llama", **changes), tensors)
    with pytest.raises(InputError, match=message):
        load(str(tmp_path))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
def test_weights_that_are_not_finite(tmp_path, name, value):
    config = models.config_json("llama")
    tensors = models.weights(config)
    tensors[name].flat[-1] = value
    models.write_files(tmp_path, config, tensors)
    with pytest.raises(InputError, match=f"{name} contains NaN or Inf"):
        load(str(tmp_path))


def test_weights_that_do_not_fit(tmp_path):
    config = models.config_json("llama")
    tensors = models.weights(config)
    tensors["model.norm.weight"][0] = 1e6
    models.write_files(tmp_path, config, tensors)
    with pytest.raises(InputError, match=r"model.norm.weight .*too large for float16"):
        load(str(tmp_path), dtype=jnp.float16)
    assert load(str(tmp_path), dtype=jnp.bfloat16).network.params.norm[0] > 9e5


def _cut(folder, size):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "has no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "not valid JSON"),
        (lambda f: (f / "config.json").write_text("[]"), "JSON object"),
        (lambda f: (f / "model.safetensors").unlink(), "neither model.safetensors nor"),
        (lambda f: _cut(f, -1), "truncated"),
        (lambda f: _cut(f, 100), "truncated"),
        (lambda f: _cut(f, 3), "truncated"),
        (lambda f: _cut(f, 0), "empty"),
        (lambda f: (f / "model.safetensors").write_bytes(b"x" * 999), "truncated or not"),
        (lambda f: (f / "model.safetensors").write_bytes(bytes(999)), "not a valid"),
        (lambda f: (f / "tokenizer.json").write_text("{"), "tokenizer.json: not valid JSON"),
    ],
)
def test_damaged_folders(tmp_path, damage, message):
    models.write_folder(tmp_path)
    damage(tmp_path)
    with pytest.raises(InputError, match=message):
        load(str(tmp_path))


def test_damaged_shards(tmp_path):
    models.write_folder(tmp_path, shards=2)
    index = tmp_path / "model.safetensors.index.json"
    second = tmp_path / "model-00002-of-00002.safetensors"
    good, places = index.read_text(), json.loads(index.read_text())
    places["weight_map"]["model.norm.weight"] = "absent.safetensors"
    index.write_text(json.dumps(places))
    with pytest.raises(InputError, match=r"names the shard absent.safetensors, which is not there"):
        load(str(tmp_path))
    places["weight_map"] |= {"model.norm.weight": second.name, "other": second.name}
    index.write_text(json.dumps(places))
    with pytest.raises(InputError, match="which lacks it"):
        load(str(tmp_path))
    index.write_text("{}")
    with pytest.raises(InputError, match="weight_map"):
        load(str(tmp_path))
    index.write_text(good)
    second.unlink()
    with pytest.raises(InputError, match=r"00002-of-00002.safetensors, which is not there"):
        load(str(tmp_path))


def test_integer_weights_are_refused(tmp_path):
    config = models.config_json("llama")
    tensors = models.weights(config)
    tensors["model.norm.weight"] = np.ones(48, np.int8)
    models.write_files(tmp_path, config, tensors)
    with pytest.raises(InputError, match=r"model.norm.weight has dtype int8"):
        load(str(tmp_path))


def test_dtypes_that_are_refused(tmp_path):
    models.write_folder(tmp_path)
    for dtype, message in [("int8", "int8"), ("float3", "no dtype"), ("float64", "ENABLE_X64")]:
        if dtype == "float64" and jax.dtypes.canonicalize_dtype(dtype) == dtype:
            continue
        with pytest.raises(InputError, match=message):
            load(str(tmp_path), dtype=dtype)


_MEASURE = """
import sys
import jax, jax.numpy as jnp
from qrot.model.io.load import load

def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key)) * 1024

jnp.zeros(8).block_until_ready()
before = status("VmRSS")
params = jax.block_until_ready(load(sys.argv[1], dtype=sys.argv[2]).network.params)
size = sum(x.nbytes for x in jax.tree.leaves(params))
print(size, (status("VmHWM") - before) / size)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_peak_memory(tmp_path):
    sizes = {"vocab_size": 8192, "hidden_size": 768, "intermediate_size": 2048}
    config = models.config_json("llama", num_hidden_layers=8, **sizes)
    models.write_files(tmp_path, config, models.weights(config), shards=3)
    for dtype, least in (("float32", 200e6), ("bfloat16", 100e6)):
        result = subprocess.run(
            [sys.executable, "-c", _MEASURE, str(tmp_path), dtype],
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            check=True,
        )
        size, ratio = map(float, result.stdout.split())
        assert size > least
        assert ratio < 1.2, f"{dtype}: peak memory is {ratio:.2f} times the parameters"
