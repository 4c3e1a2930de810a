"""Folders as people have them: prefixes, heads, shards, and what is something else."""

import json
import os
import shutil

import jax
import models
import numpy as np
import pytest
from safetensors.numpy import save_file

from qrot.errors import InputError
from qrot.model.io.load import load

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def same(a, b):
    assert a.config == b.config
    a, b = a.params, b.params
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def write(folder, tensors, **changes):
    """A folder of these tensors, in place of what was there."""
    shutil.rmtree(folder, ignore_errors=True)
    models.write_files(folder, models.config_json("llama", **changes), tensors)
    return str(folder)


def refused(folder, message):
    with pytest.raises(InputError, match=message) as caught:
        load(str(folder))
    assert "\n" not in str(caught.value)


def tied():
    return models.weights(models.config_json("llama", tie_word_embeddings=True))


def test_a_stored_head_must_be_the_embedding_or_config_json_says_which_counts(tmp_path):
    plain = load(write(tmp_path / "plain", tied(), tie_word_embeddings=True)).network
    assert plain.params.head is None
    differs = tied()
    differs[HEAD] = differs[EMBED].copy()
    same(load(write(tmp_path / "same", differs, tie_word_embeddings=True)).network, plain)
    differs[HEAD][-1, -1] += 1e-3
    folder = tmp_path / "differs"
    write(folder, differs, tie_word_embeddings=True)
    refused(folder, r'tie_word_embeddings .*lm_head.weight is stored that differs.*"qrot_head"')
    found = load(write(folder, differs, tie_word_embeddings=True, qrot_head="embedding"))
    same(found.network, plain)
    for changes in ({"tie_word_embeddings": True, "qrot_head": "stored"}, {}):
        network = load(write(folder, differs, **changes)).network
        assert not network.config.tie_word_embeddings
        np.testing.assert_array_equal(network.params.head.T, differs[HEAD])
    write(folder, differs, qrot_head="embedding")
    refused(folder, "qrot_head is embedding, but there is only the one that is stored")
    write(folder, tied(), tie_word_embeddings=True, qrot_head="stored")
    refused(folder, "qrot_head is stored, but there is only the one that is embedding")


def test_a_stored_head_of_another_shape_or_dtype(tmp_path):
    tensors = tied()
    tensors[HEAD] = tensors[EMBED][:-1].copy()
    write(tmp_path, tensors, tie_word_embeddings=True)
    refused(tmp_path, "differs from model.embed_tokens.weight")
    write(tmp_path, tensors, tie_word_embeddings=True, qrot_head="stored")
    refused(tmp_path, r"lm_head.weight has shape \[96, 48\]")
    tensors[EMBED] = np.float16(tensors[EMBED]).astype(np.float32)
    tensors[HEAD] = np.float16(tensors[EMBED])
    load(write(tmp_path, tensors, tie_word_embeddings=True))


def test_a_head_that_is_missing_is_not_taken_to_be_the_embedding(tmp_path):
    write(tmp_path, tied())
    refused(tmp_path, r"lack the tensor lm_head.weight; .*tie_word_embeddings: true")


@pytest.mark.parametrize(
    "prefix", ["_orig_mod.", "module.", "language_model.", "base_model.model.", "a.b.c."]
)
def test_a_prefix_of_all_tensors(tmp_path, prefix):
    tensors = models.weights(models.config_json("llama"))
    plain = load(write(tmp_path, tensors)).network
    prefixed = {prefix + name: value for name, value in tensors.items()}
    same(load(write(tmp_path, prefixed)).network, plain)
    if not prefix.endswith("model."):  # or it would be read as a shorter one
        flat = {prefix + name.removeprefix("model."): value for name, value in tensors.items()}
        same(load(write(tmp_path, flat)).network, plain)
    prefixed[HEAD] = prefixed.pop(prefix + HEAD)
    write(tmp_path, prefixed)
    refused(tmp_path, f"stored as {prefix}{EMBED}, but lm_head.weight does not begin with {prefix}")


def test_a_model_saved_without_its_head(tmp_path):
    """As Qwen3-Embedding: no "model.", no head, which is the embedding."""
    tensors = tied()
    plain = load(write(tmp_path, tensors, tie_word_embeddings=True)).network
    flat = {name.removeprefix("model."): value for name, value in tensors.items()}
    same(load(write(tmp_path, flat, tie_word_embeddings=True)).network, plain)
    write(tmp_path, flat, tie_word_embeddings=True, architectures=["LlamaModel"])
    refused(tmp_path, "config.json: architectures says LlamaModel, a model without a head")


def test_names_of_another_program_are_named(tmp_path):
    tensors = models.weights(models.config_json("llama"))
    renamed = {name.replace("embed_tokens", "tok_embeddings"): x for name, x in tensors.items()}
    write(tmp_path, renamed)
    refused(tmp_path, f"lack the tensor {EMBED}, and hold the tensor model.tok_embeddings.weight")
    tensors["x" * 5000] = tensors["\x1b[31m\n"] = np.ones(1, np.float32)
    write(tmp_path, tensors)
    refused(tmp_path, r"hold 'x+\.\.\.|hold '\\x1b\[31m\\n'")


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("adapter_config.json", "{}", r"an adapter .*qrot merge, .* model: {base: MODEL"),
        ("hf_quant_config.json", "{}", "ModelOpt quantised.*dequantise"),
        ("quantize_config.json", "{}", "AutoGPTQ quantised.*dequantise"),
        ("generation_config.json", "[]", "generation_config.json: must hold a JSON object"),
        ("generation_config.json", "{", "generation_config.json: not valid JSON"),
        ("generation_config.json", '{"eos_token_id": "2"}', "generation_config.json: eos_token_id"),
        ("generation_config.json", '{"eos_token_id": [2, 97]}', "token 97, but the vocabulary has"),
        ("generation_config.json", '{"eos_token_id": 1e9}', "eos_token_id must be the id of"),
        ("config.json", '{"model_type": "llama", "model_type": "llama"}', "is there twice"),
        ("config.json", "[" * 5000, "config.json: not valid JSON"),
        ("config.json", " " * (1 << 23), "config.json: larger than"),
    ],
    ids=lambda value: value[:30],
)
def test_files_beside_the_weights(tmp_path, file, text, message):
    models.write_folder(tmp_path)
    (tmp_path / file).write_text(text)
    refused(tmp_path, message)


@pytest.mark.parametrize(
    ("removed", "there", "message"),
    [
        ("model.safetensors", "pytorch_model.bin", "holds pytorch_model.bin: save .* safetensors"),
        ("model.safetensors", "pytorch_model-00001-of-00002.bin", "save the model as safetensors"),
        ("model.safetensors", "model.fp16.safetensors", "holds model.fp16.safetensors: rename"),
        ("model.safetensors", "consolidated.safetensors", "consolidated.*Hugging Face's layout"),
        ("model.safetensors", "consolidated.00.pth", "consolidated.*Hugging Face's layout"),
        ("model.safetensors", "model-Q4_K.gguf", "holds model-Q4_K.gguf: give that file itself"),
        ("config.json", "tiny.gguf", "no config.json; it holds tiny.gguf: give that file itself"),
        ("config.json", "consolidated.safetensors", "no config.json; it holds consolidated"),
        ("config.json", "checkpoint-7/config.json", "holds checkpoint-7/config.json: give the fol"),
        ("config.json", "snapshots/0f/config.json", "holds snapshots/0f/config.json: give the fo"),
        ("config.json", "notes.txt", r"has no config.json\.$"),
    ],
)
def test_folders_that_hold_something_else(tmp_path, removed, there, message):
    models.write_folder(tmp_path)
    (tmp_path / removed).unlink()
    (tmp_path / there).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / there).touch()
    refused(tmp_path, message)


def sharded(folder):
    """The index of a model in two shards, and its contents."""
    models.write_folder(folder, shards=2)
    index = folder / "model.safetensors.index.json"
    return index, json.loads(index.read_text())


def test_shards_in_subfolders(tmp_path):
    models.write_folder(tmp_path / "one")
    index, text = sharded(tmp_path / "many")
    for name in set(text["weight_map"].values()):
        (tmp_path / "many" / "deep" / "er").mkdir(parents=True, exist_ok=True)
        (tmp_path / "many" / name).rename(tmp_path / "many" / "deep" / "er" / name)
    index.write_text(
        json.dumps({"weight_map": {k: f"./deep//er/{v}" for k, v in text["weight_map"].items()}})
    )
    one, many = load(str(tmp_path / "one")), load(str(tmp_path / "many"))
    same(one.network, many.network)
    # As the hub's cache has them: links to files elsewhere.
    for file in (tmp_path / "many" / "deep" / "er").iterdir():
        file.rename(tmp_path / file.name)
        file.symlink_to(tmp_path / file.name)
    same(one.network, load(str(tmp_path / "many")).network)


@pytest.mark.parametrize(
    "place",
    ["../{}", "/{}", "a/../../{}", "..", ".", "", "a\\{}", "{}\0", "x" * 5000, "no/{}", "\x1b[31m"],
)
def test_shards_that_are_no_files_of_the_folder(tmp_path, place, monkeypatch):
    index, text = sharded(tmp_path / "model")
    name = text["weight_map"]["model.norm.weight"]
    shutil.copy(tmp_path / "model" / name, tmp_path / name)
    text["weight_map"]["model.norm.weight"] = place.format(name)
    index.write_text(json.dumps(text))
    opened = []
    monkeypatch.setattr("qrot.model.io.huggingface.open_tensor_file", opened.append)
    refused(tmp_path / "model", "index.json: names the shard .*(no file of the folder|not there)")
    assert not opened


@pytest.mark.parametrize(
    "places", [None, [], "x", 3, {}, {"a": 3}, {"a": ["b"]}, {"a": None}], ids=str
)
def test_indices_of_other_types(tmp_path, places):
    index, text = sharded(tmp_path)
    index.write_text(json.dumps({**text, "weight_map": places}))
    refused(tmp_path, "index.json: has (no|a) weight_map")


def test_a_tensor_in_two_shards(tmp_path):
    _, text = sharded(tmp_path)
    first, second = sorted(set(text["weight_map"].values()))
    tensors = models.weights(models.config_json("llama"))
    names = [name for name, place in text["weight_map"].items() if place == second]
    twice = {name: tensors[name] for name in names} | {EMBED: tensors[EMBED] + 1}
    assert text["weight_map"][EMBED] == first
    save_file(twice, tmp_path / second)
    refused(tmp_path, f"names {first} and {second}, which both hold {EMBED}")


def test_one_file_and_shards(tmp_path):
    """An index may name the one file; where it names others, nobody can know which are meant."""
    models.write_folder(tmp_path)
    index, text = sharded(tmp_path)
    refused(tmp_path, "names other files than model.safetensors")
    index.write_text(
        json.dumps({"weight_map": dict.fromkeys(text["weight_map"], "model.safetensors")})
    )
    load(str(tmp_path))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "generation_config.json"])
def test_pipes_in_place_of_files_are_not_waited_for(tmp_path, name):
    models.write_folder(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    refused(tmp_path, f"{name}.*(cannot be read|has no|nor)|has (no|neither) {name}")
