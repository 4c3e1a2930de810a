"""A rotated folder, opened in PyTorch, computes what the model did; and how folders are written."""

import json
import struct
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from exports import (
    apart,
    as_values,
    export,
    hadamard,
    in_qrot,
    logits,
    opened,
    opened_by_module,
    save,
    write_run,
)
from models import VARIANTS, write_folder
from rich.console import Console
from safetensors import safe_open

from qrot.export.config import config_json
from qrot.export.export import export as write
from qrot.export.format import Options
from qrot.export.online import ONLINE
from qrot.export.source import open_source
from qrot.files.tensors import write_tensors
from qrot.grid import Grid
from qrot.model.io import assemble
from qrot.model.io.load import load, open_model
from qrot.progress import Stages
from qrot.quantize.rtn import rtn
from qrot.quantize.slicegpt import cut
from qrot.rotation.random import random_rotations
from qrot.rotation.transform import Transform
from qrot.scheme import Scheme

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_a_rotated_folder_computes_what_the_model_did(made, monkeypatch, tmp_path, name):
    out = tmp_path / "out"
    assert export(monkeypatch, made(name), "--out", out, "--format", "huggingface") == 0
    rotated, original = opened(out), opened(tmp_path / name)
    assert apart(logits(rotated), logits(original)) < 1e-5
    assert apart(rotated.lm_head.weight.detach(), original.lm_head.weight.detach()) > 0.1
    assert not rotated.config.tie_word_embeddings
    same = (tmp_path / name / "tokenizer.json").read_bytes()
    assert (out / "tokenizer.json").read_bytes() == same
    assert opened(out).generation_config.temperature == 0.5
    readme = (out / "README.md").read_text()
    assert "R3, R4, shifts, clip ratios" in readme
    assert "at full precision in place of W4A4KV4" in readme
    assert "seed 3" in readme


def test_rounded_weights_alone_are_written_as_they_were_judged(monkeypatch, tmp_path, capsys):
    """Whatever rounded them: their values, not rounded again; with R4 they are not alone."""
    alone = hadamard("llama", tmp_path, key=False, down=False)
    run, network = write_run(tmp_path, "llama", alone, Scheme(Grid(4)), as_values)
    out = tmp_path / "out"
    assert export(monkeypatch, run, "--out", out, "--verify") == 0
    assert "It is the network that was judged" in capsys.readouterr().out
    loaded = opened(out)
    mine, theirs = network.params.layers.o.weight, loaded.model.layers[1].self_attn.o_proj
    np.testing.assert_array_equal(theirs.weight.detach().numpy(), np.asarray(mine[1]).T)
    assert apart(logits(loaded), in_qrot(network)) < 1e-5
    assert apart(logits(loaded), logits(opened(tmp_path / "llama"))) > 1e-3


def test_a_network_that_weights_alone_are_not_is_built_in_full_precision(
    monkeypatch, tmp_path, capsys
):
    transform = hadamard("llama", tmp_path)
    run, _ = write_run(tmp_path, "llama", transform, Scheme(Grid(4)))
    out = tmp_path / "out"
    assert export(monkeypatch, run, "--out", out, "--verify") == 0
    sentence = (
        "It is not the network that was judged: without R3, R4, at full precision in place of "
        "W4A16KV16."
    )
    assert sentence in " ".join(capsys.readouterr().out.split())
    assert sentence in (out / "README.md").read_text()
    assert apart(logits(opened(out)), logits(opened(tmp_path / "llama"))) < 1e-5


def test_a_network_with_directions_cut_off_is_smaller(monkeypatch, tmp_path, capsys):
    """Its width, its norms and their eps are its own, with head_dim as it was."""
    alone = hadamard("llama", tmp_path, key=False, down=False)
    run, network = write_run(tmp_path, "llama", alone, Scheme(Grid(8)), lambda x: rtn(cut(x, 40)))
    out = tmp_path / "out"
    assert export(monkeypatch, run, "--out", out, "--format", "torch", "--verify") == 0
    loaded = opened_by_module(out)
    assert (loaded.config.hidden_size, loaded.config.head_dim) == (40, 12)
    assert apart(logits(loaded), in_qrot(network)) < 1e-5


def test_the_commit_of_a_hub_model_is_recorded(made, tmp_path):
    source, commit = open_source(made("llama")), "0123456789abcdef"
    source = replace(source, opened=source.opened._replace(revision=commit))
    with Stages(Console(quiet=True)) as stages:
        write(source, tmp_path / "out", "torch", Options(), stages)
    assert f"commit {commit}, sha256" in (tmp_path / "out" / "README.md").read_text()
    with safe_open(tmp_path / "out" / ONLINE, "np") as file:
        assert json.loads(file.metadata()["revision"]) == commit


def test_what_a_gguf_file_says():
    """Configuration, tokenizer and chat template come out of its metadata."""
    model = open_model("smollm2")
    raw = config_json(model)
    config = transformers.LlamaConfig(**raw)
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (576, 30, 49152)
    assert config.rope_parameters["rope_theta"] == model.config.rope_theta
    assert model.metadata["tokenizer.chat_template"]


def test_bfloat16_is_no_worse_than_before(tmp_path, monkeypatch):
    folder = tmp_path / "wide"
    write_folder(folder, "llama", dtype="bfloat16")
    config, exact = load(str(folder)).network.config, logits(opened(folder, dtype=torch.float32))
    after = []
    for seed in range(3):
        path = save(folder, Transform(random_rotations(config, seed)), Scheme())
        out = tmp_path / f"out{seed}"
        assert export(monkeypatch, path, "--out", out) == 0
        assert load_dtype(out) == "BF16"
        after.append(apart(logits(opened(out)), exact))
    assert np.mean(after) < 1.5 * apart(logits(opened(folder)), exact)


def load_dtype(folder):
    raw = (folder / "model.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])
    return header["model.norm.weight"]["dtype"]


def test_shards(tmp_path):
    """They say what one file says, and none is larger than asked for."""
    draw = np.random.default_rng(0)
    tensors = {
        f"a.{i}": draw.normal(size=(7, 11)).astype(kind)
        for i, kind in enumerate([np.float32, np.float16, ml_dtypes.bfloat16, np.int8] * 3)
    }
    tensors["scalar"] = np.array(3, np.int64)
    for name, shard in (("one", 1 << 20), ("many", 700)):
        (tmp_path / name).mkdir()
        write_tensors(tmp_path / name, iter(tensors.items()), shard=shard)
    from safetensors.torch import load_file as load_torch

    whole = load_torch(tmp_path / "one" / "model.safetensors")
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 2
    assert {f.name for f in files} == set(index["weight_map"].values())
    parts = {}
    for file in files:
        held = load_torch(file)
        assert sum(x.nbytes for x in held.values()) <= 700
        assert all(index["weight_map"][key] == file.name for key in held)
        parts |= held
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in tensors.values())
    for key, tensor in tensors.items():
        for found in (whole[key], parts[key]):
            assert found.to(torch.float64).numpy().tolist() == tensor.astype(float).tolist()


def test_a_sharded_folder_loads(made, tmp_path):
    path, out = made("llama"), tmp_path / "out"
    with Stages(Console(quiet=True)) as stages:
        write(open_source(path), out, "huggingface", Options(shard=50_000), stages)
    assert len(list(out.glob("model-*.safetensors"))) > 2
    assert apart(logits(opened(out)), logits(opened(tmp_path / "llama"))) < 1e-5


def test_only_one_layer_is_read_at_a_time(made, monkeypatch, tmp_path):
    """Exporting needs memory for a layer, not for a model."""
    seen = []
    read = assemble._read

    def spy(leaf, *rest):
        seen.append(len(leaf.names))
        return read(leaf, *rest)

    monkeypatch.setattr(assemble, "_read", spy)
    path = made("llama")
    seen.clear()
    assert export(monkeypatch, path, "--out", tmp_path / "out") == 0
    assert seen
    assert max(seen) == 1
