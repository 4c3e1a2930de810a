"""config.json of an export: readers that know one layout only make the same model of it."""

import json
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from models import LLAMA3, VARIANTS, write_folder, write_variant

from qrot.errors import InputError
from qrot.export.checkpoint import write_checkpoint
from qrot.export.config import config_json
from qrot.export.content import streamed, whole
from qrot.export.packed import to_nearest
from qrot.grid import Grid
from qrot.model.config import RopeScaling
from qrot.model.io.config_json import parse_config
from qrot.model.io.load import load, open_model
from qrot.network import fold
from qrot.rotation.transform import Online, Transform
from qrot.scheme import Scheme, layer_schemes

# What a reader of transformers 4 and one of transformers 5 does not know.
OF_5 = ("rope_parameters", "dtype", "layer_types")
OF_4 = ("rope_theta", "rope_scaling", "torch_dtype", "max_window_layers")


def parsed(raw, without=()):
    return parse_config({key: x for key, x in raw.items() if key not in without})[0]


def exported(folder):
    """(config.json of an export of the model in a folder, that model's configuration)."""
    opened = open_model(str(folder))
    return config_json(opened), opened.config


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_both_layouts_are_the_same_model(tmp_path, name):
    write_variant(tmp_path, name)
    raw, config = exported(tmp_path)
    config = replace(config, tie_word_embeddings=False)
    by_layer = name == "qwen3-window"  # its windows are not those of the last layers
    for without in (OF_5[: 2 if by_layer else 3], OF_4, ("model_type",), ("architectures",)):
        assert parsed(raw, without) == config
    assert json.loads(json.dumps(raw)) == raw


@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 4.0}, LLAMA3])
def test_what_came_in_the_layout_of_5_goes_out_in_that_of_4(tmp_path, scaling):
    """transformers 4 ignores rope_parameters: it would take theta 10000 and no scaling."""
    new = {"rope_theta": 500000.0, "rope_type": "default", **(scaling or {})}
    write_folder(tmp_path, "llama", rope_theta=None, rope_parameters=new)
    raw, config = exported(tmp_path)
    assert raw["rope_theta"] == config.rope_theta == 500000.0
    assert raw["rope_parameters"].items() >= new.items()
    if scaling is None:
        assert raw["rope_scaling"] is None
    else:
        assert raw["rope_scaling"].items() >= scaling.items()
        assert raw["rope_scaling"].get("type") in (None, scaling["rope_type"])


def test_what_is_stale_goes_and_what_is_harmless_stays(tmp_path):
    stale = {
        "_name_or_path": "org/other",
        "_attn_implementation": "flash_attention_2",
        "quantization_config": None,
        "auto_map": {},
    }
    kept = {"transformers_version": "4.40.0", "initializer_range": 0.02, "pad_token_id": 3}
    more = {"architectures": ["LLaMAForCausalLM"], "model_type": "llama", "bos_token_id": 5}
    write_folder(tmp_path, "llama", **stale, **kept, **more)
    raw, _ = exported(tmp_path)
    assert not stale.keys() & raw.keys()
    assert kept.items() <= raw.items()
    assert raw["architectures"] == ["LlamaForCausalLM"]
    assert (raw["bos_token_id"], raw["eos_token_id"]) == (5, 2)


def test_defaults_are_written_out(tmp_path):
    """Versions differ in what they take for granted."""
    write_folder(tmp_path, "mistral", num_key_value_heads=2, eos_token_id=[2, 7])
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text())
    for key in ("rms_norm_eps", "rope_theta", "bos_token_id", "max_position_embeddings"):
        del raw[key]
    file.write_text(json.dumps(raw))
    found, config = exported(tmp_path)
    assert found["rms_norm_eps"] == config.rms_norm_eps
    assert found["max_position_embeddings"] == 4096 * 32
    assert (found["head_dim"], found["bos_token_id"], found["eos_token_id"]) == (12, 1, [2, 7])
    assert found["sliding_window"] is None


def test_gguf_has_both_layouts_too():
    opened = open_model("smollm2")
    scaling = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    for config in (opened.config, replace(opened.config, rope_scaling=scaling)):
        raw = config_json(opened, config)
        same = replace(config, tie_word_embeddings=False)
        assert parsed(raw, OF_5) == parsed(raw, OF_4) == same


def written(folder, opened, content, dtype="float32"):
    folder.mkdir()
    write_checkpoint(folder, opened, content, dtype=dtype)
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("name", ["llama", "llama-biases", "qwen3-biases", "qwen2"])
def test_an_export_reads_as_the_model_that_it_came_from(tmp_path, name):
    write_variant(tmp_path / "model", name)
    opened = open_model(str(tmp_path / "model"))
    raw = written(tmp_path / "out", opened, streamed(opened, Transform(), Scheme()), "bfloat16")
    assert raw["dtype"] == raw["torch_dtype"] == "bfloat16"
    assert load(str(tmp_path / "out")).network.config == replace(
        opened.config, tie_word_embeddings=False
    )


def test_a_projection_without_the_bias_that_its_neighbours_have(tmp_path):
    """A GGUF file may have such; transformers' Llama has a bias in all four or in none."""
    write_variant(tmp_path / "model", "llama")
    opened = open_model(str(tmp_path / "model"))
    network = fold(load(str(tmp_path / "model")).network)
    layers = network.params.layers
    bias = jnp.asarray(np.random.default_rng(0).normal(size=(3, 48)), jnp.float32)
    layers = layers.replace(q=layers.q.replace(bias=bias))
    network = network.replace(params=network.params.replace(layers=layers))
    raw = written(tmp_path / "out", opened, whole(network))
    assert (raw["attention_bias"], raw["mlp_bias"]) == (True, False)
    found = load(str(tmp_path / "out")).network.params.layers
    np.testing.assert_array_equal(found.q.bias, bias)
    for linear in (found.k, found.v, found.o):
        np.testing.assert_array_equal(linear.bias, 0)
    assert found.up.bias is None


def test_numbers_that_a_dtype_cannot_hold_are_refused(tmp_path):
    write_variant(tmp_path / "model", "llama")
    opened = open_model(str(tmp_path / "model"))
    content = streamed(opened, Transform(), Scheme())
    large = content._replace(norm=content.norm * 1e5)
    with pytest.raises(InputError, match=r"norm.weight has numbers that float16 cannot hold"):
        written(tmp_path / "out", opened, large, "float16")
    (grids,) = layer_schemes(Scheme(Grid(4)), 1)
    layer = next(content.layers())
    small = layer.replace(up=layer.up.replace(weight=layer.up.weight * 1e-9))
    with pytest.raises(InputError, match="scale of a weight is no float16"):
        to_nearest(small, Online(), grids, dtype=jnp.float16)
