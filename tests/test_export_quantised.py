"""Quantised exports, opened in PyTorch, compute what qrot computes."""

import json
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from exports import (
    W4A4KV4,
    apart,
    as_values,
    everything,
    export,
    fused,
    hadamard,
    in_qrot,
    logits,
    logits_with_rounded_inputs,
    opened,
    opened_by_module,
    watched,
    write_run,
)
from models import VARIANTS, write_folder
from safetensors import safe_open
from safetensors.numpy import load_file

from qrot.export import packed
from qrot.export.content import whole
from qrot.export.format import offline
from qrot.export.formats import compressed_tensors as ct
from qrot.export.online import ONLINE, write_online
from qrot.grid import Grid, fake_quantise
from qrot.model.io.load import load
from qrot.quantize.gptq import Gptq, gptq
from qrot.quantize.rtn import rtn
from qrot.rotation.store import load_rotations
from qrot.scheme import Override, Scheme

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("quick_compile")
FOUR = ("llama-biases", "mistral", "qwen2-tied", "qwen3-biases")


# compressed-tensors


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("shape", [(1, 8), (5, 12), (3, 64), (2, 7)])
def test_packing_is_theirs(shape, bits):
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    q = np.random.default_rng(0).integers(-(2 ** (bits - 1)), 2 ** (bits - 1), shape)
    expected = helpers.pack_to_int32(torch.tensor(q.astype(np.int8)), bits)
    np.testing.assert_array_equal(packed.pack(q.astype(np.int8), bits), expected.numpy())


def test_presets_are_theirs():
    theirs = pytest.importorskip("compressed_tensors.quantization.quant_scheme").PRESET_SCHEMES
    for name, (weights, activations) in ct.PRESETS.items():
        found = theirs[name]
        assert found["weights"].num_bits == weights
        inputs = found.get("input_activations")
        assert (16 if inputs is None else inputs.num_bits) == activations


PRESETS = [(n, preset) for n in FOUR for preset in ("W4A16", "W8A8", "W4A8", "W4A4")]
PRESETS += [("mistral", preset) for preset in ("W8A16", "W3A16", "W6A8", "W2A4")]


@pytest.mark.parametrize(("name", "preset"), PRESETS)
def test_integers_in_transformers(made, monkeypatch, tmp_path, name, preset):
    pytest.importorskip("compressed_tensors")
    path, out = made(name), tmp_path / "out"
    arguments = ("--out", out, "--format", "compressed-tensors", "--scheme", preset)
    assert export(monkeypatch, path, *arguments) == 0
    network = to_nearest(path, tmp_path / name, ct.preset(preset))
    scheme, quantised = ct.preset(preset), opened(out)
    found = logits_with_rounded_inputs(quantised, scheme)
    if not scheme.activations.on:
        # With them on, the last bit of a sum decides where the largest value of a token goes, which
        # at absmax/7.5 lies just between two levels; and no two programs add in the same order.
        assert apart(found, in_qrot(network)) < 1e-5
    assert apart(found, logits(opened(tmp_path / name))) > 1e-3
    for q, weight in weights_of(quantised, network):
        np.testing.assert_array_equal(q, weight)


def to_nearest(path, folder, scheme):
    """What of the rotations in a file weights can hold, in them, rounded to nearest."""
    network = fused(folder, offline(load_rotations(path)[0]))
    return rtn(network.replace(scheme=scheme))


def weights_of(quantised, network):
    """Pairs of each weight of the first layer: as PyTorch sees it, as qrot rounded it."""
    layer = jax.tree.map(lambda x: x[0], network.params.layers)
    torch_layer = quantised.model.layers[0]
    for mine, theirs in (
        (layer.q, torch_layer.self_attn.q_proj),
        (layer.o, torch_layer.self_attn.o_proj),
        (layer.up, torch_layer.mlp.up_proj),
        (layer.down, torch_layer.mlp.down_proj),
    ):
        yield theirs.weight.detach().numpy(), np.asarray(mine.weight).T


def test_groups(made, monkeypatch, tmp_path):
    pytest.importorskip("compressed_tensors")
    path, out = made("llama"), tmp_path / "out"
    arguments = ("--format", "compressed-tensors", "--scheme", "W4A16", "--group", 8)
    assert export(monkeypatch, path, "--out", out, *arguments) == 0
    expected = in_qrot(to_nearest(path, tmp_path / "llama", ct.preset("W4A16", group=8)))
    assert apart(logits(opened(out)), expected) < 1e-5
    scale = load_file(out / "model.safetensors")["model.layers.0.mlp.down_proj.weight_scale"]
    assert scale.shape == (48, 7)


def without_signs(network):
    """R4's signs in up, its inputs turned by the transform alone."""
    return ct.without_signs(whole(network)).network()


def test_r4_for_vllm(made, monkeypatch, tmp_path):
    """A block Hadamard online: by our module, and by compressed-tensors' own transform."""
    theirs = pytest.importorskip("compressed_tensors.transform")
    transform = hadamard("llama-biases", tmp_path, down=8)
    path, out = made("llama-biases", transform=transform), tmp_path / "out"
    arguments = ("--format", "compressed-tensors", "--scheme", "W4A16", "--online")
    assert export(monkeypatch, path, "--out", out, *arguments) == 0
    network = without_signs(fused(tmp_path / "llama-biases", transform))
    expected = in_qrot(rtn(network.replace(scheme=ct.preset("W4A16"))))
    sys.path.insert(0, str(out))
    try:
        import qrot_torch
    finally:
        sys.path.remove(str(out))
    assert apart(logits(qrot_torch.load(out)), expected) < 1e-5
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    plain = opened(out, variant="online")
    assert apart(logits(plain), expected) > 0.1  # so that without a word it must not be found
    r4 = config["transform_config"]["config_groups"]["R4"]
    scheme = theirs.TransformScheme(
        type=r4["type"], head_dim=r4["head_dim"], apply=[r4["apply"][0]]
    )
    theirs.TransformFactory.from_scheme(scheme, name="R4").apply_to_model(plain)
    assert apart(logits(plain), expected) < 1e-5
    stored = load_file(out / "model.online.safetensors")
    stored = stored["model.layers.2.mlp.down_proj.R4_input.weight"]
    own = plain.model.layers[2].mlp.down_proj.R4_input.weight
    np.testing.assert_array_equal(stored, own.detach().numpy())
    assert "does not find them" in (out / "README.md").read_text()
    # What compressed-tensors rounds is what our module has turned.
    arguments, again = ("--scheme", "W4A4", "--online"), tmp_path / "again"
    kind = ("--format", "compressed-tensors")
    assert export(monkeypatch, path, "--out", again, *kind, *arguments) == 0
    model = qrot_torch.load(again)
    seen = watched(model)
    logits(model)
    for linear, x, y in seen:
        rounded = np.array(fake_quantise(jnp.asarray(x), ct.preset("W4A4").activations))
        expected = torch.nn.functional.linear(torch.tensor(rounded), linear.weight, linear.bias)
        assert apart(y, expected.detach()) < 1e-5


# What was judged


INPUTS = Grid(8, "symmetric_half")
MIXED = (
    Override("layers.1.*", weights=3),
    Override("layers.2.down", weights=16),
    Override("layers.0.*", weights=8, activations=8),
)


def integers(out, tensor):
    """(Integers, scales) of a linear layer as its folder has them."""
    (file,) = out.glob("model*.safetensors")
    stored = load_file(file)
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    scale = stored[f"{tensor}.weight_scale"].astype(np.float32)
    if f"{tensor}.weight" in stored:
        return stored[f"{tensor}.weight"], scale
    shape = torch.Size(stored[f"{tensor}.weight_shape"])
    words = torch.tensor(stored[f"{tensor}.weight_packed"])
    bits = words.shape[1] * 32 // shape[1]
    return helpers.unpack_from_int32(words, bits, shape).numpy(), scale


def judged(network, name, i):
    """(Integers, scales) of a projection [out, in], [out, groups] as the network has them."""
    linear = network.params.layers.linear(name)
    weight, scale = np.asarray(linear.weight[i]), np.asarray(linear.scale[i])
    steps = weight.reshape(len(scale), -1, weight.shape[1]) / scale[:, None]
    return np.rint(steps).reshape(weight.shape).T, scale.T


def by_gptq(network):
    """Weights that no rounding to nearest gives."""
    return gptq(network, np.random.default_rng(5).integers(0, 97, (4, 16), np.int32), Gptq())


@pytest.mark.parametrize("overrides", [(), MIXED])
def test_judged_integers_are_what_is_written(monkeypatch, tmp_path, overrides, capsys):
    """Those of GPTQ, not rounded a second time; several bit widths are several groups."""
    pytest.importorskip("compressed_tensors")
    weights = Grid(4, "symmetric_half", "group", 4, clip="mse")
    scheme = Scheme(weights, Grid(16, "symmetric_half"), overrides=overrides)
    alone = hadamard("llama", tmp_path, key=False, down=False)
    run, network = write_run(tmp_path, "llama", alone, scheme, by_gptq, weights={"method": "gptq"})
    out = tmp_path / "out"
    arguments = ["--out", out, "--format", "compressed-tensors"]
    assert export(monkeypatch, run, *arguments, *([] if overrides else ["--verify"])) == 0
    assert "weights by GPTQ, not rounded again" in " ".join(capsys.readouterr().out.split())
    modules = {"q": "self_attn.q_proj", "o": "self_attn.o_proj", "up": "mlp.up_proj"}
    for i in range(3):
        for name, module in modules.items():
            found, mine = integers(out, f"model.layers.{i}.{module}"), judged(network, name, i)
            np.testing.assert_array_equal(found[0], mine[0])
            np.testing.assert_array_equal(found[1], mine[1])
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    groups = config["config_groups"].values()
    if not overrides:
        assert [group["targets"] for group in groups] == [["Linear"]]
        return
    assert {group["weights"]["num_bits"]: len(group["targets"]) for group in groups} == {
        8: 7,
        3: 7,
        4: 6,
    }
    assert config["format"] == "mixed-precision"
    assert config["ignore"] == ["lm_head", "model.layers.2.mlp.down_proj"]
    loaded = opened(out)
    seen = watched(loaded)
    logits(loaded)
    for linear, x, y in seen[:7]:
        x = torch.tensor(np.array(fake_quantise(jnp.asarray(x), INPUTS)))
        expected = torch.nn.functional.linear(x, linear.weight, linear.bias)
        assert apart(y, expected.detach()) < 1e-5
    for i in range(3):
        for name, module in [*modules.items(), ("down", "mlp.down_proj")]:
            theirs = loaded.get_submodule(f"model.layers.{i}.{module}").weight.detach()
            mine = network.params.layers.linear(name).weight[i]
            np.testing.assert_array_equal(theirs.numpy(), np.asarray(mine).T)


def test_judged_integers_with_r4(monkeypatch, tmp_path, capsys):
    """R4's signs leave the integers as they are: the scales of up_proj change sign."""
    pytest.importorskip("compressed_tensors")
    transform = hadamard("llama-biases", tmp_path, key=False, down=8)
    scheme = Scheme(Grid(4, "symmetric_half"), Grid(16, "symmetric_half"))
    run, network = write_run(tmp_path, "llama-biases", transform, scheme)
    out = tmp_path / "out"
    arguments = "--out", out, "--format", "compressed-tensors", "--online", "--verify"
    assert export(monkeypatch, run, *arguments) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "It is the network that was judged" in printed
    assert "Verified" in printed
    signs = np.asarray(transform.rotations["down"].signs)
    assert 0 < (signs < 0).sum() < len(signs)
    for i in range(3):
        found, mine = integers(out, f"model.layers.{i}.mlp.up_proj"), judged(network, "up", i)
        np.testing.assert_array_equal(found[0], mine[0])
        np.testing.assert_array_equal(found[1], mine[1] * signs[:, None])
    assert (mine[0] == -8).any()  # which would be 8
    # Without R4 it is another network, built anew.
    assert export(monkeypatch, run, "--out", tmp_path / "b", *arguments[2:4]) == 0
    assert "not the network that was judged: without R4" in (tmp_path / "b/README.md").read_text()


@pytest.mark.parametrize("bits", [4, 8])
def test_judged_integers_on_scales_in_bfloat16(monkeypatch, tmp_path, bits):
    """The same integers, the scales rounded once; built anew, integers nearest on those scales."""
    pytest.importorskip("compressed_tensors")
    alone = hadamard("llama", tmp_path, key=False, down=False)
    scheme = Scheme(Grid(bits, "symmetric_half", clip="mse"), INPUTS)
    run, network = write_run(tmp_path, "llama", alone, scheme)
    kind = "--format", "compressed-tensors", "--dtype", "bfloat16"
    assert export(monkeypatch, run, "--out", tmp_path / "out", *kind) == 0
    plain = run / "rotations.safetensors"
    assert export(monkeypatch, plain, "--out", tmp_path / "anew", *kind) == 0
    exact = np.asarray(fused(tmp_path / "llama", alone).params.layers.o.weight)
    for i in range(3):
        name = f"model.layers.{i}.self_attn.o_proj"
        (q, scale), mine = integers(tmp_path / "out", name), judged(network, "o", i)
        np.testing.assert_array_equal(q, mine[0])
        np.testing.assert_array_equal(scale, mine[1].astype(ml_dtypes.bfloat16).astype(np.float32))
        q, again = integers(tmp_path / "anew", name)
        np.testing.assert_array_equal(again, scale)
        top = 2 ** (bits - 1)
        nearest = np.clip(np.rint(exact[i].T / scale), -top, top - 1)
        np.testing.assert_array_equal(q, nearest)


@pytest.mark.parametrize("change", [by_gptq, as_values])
def test_a_torch_folder_has_the_values_that_were_judged(monkeypatch, tmp_path, change, capsys):
    """Whatever rounded them, with everything on; the text is not read again."""
    folder = tmp_path / "sizes"
    write_folder(folder, VARIANTS["llama-biases"][0], **VARIANTS["llama-biases"][1])
    transform = everything(load(str(folder)).network)
    scheme = replace(W4A4KV4, overrides=(Override("layers.1.*", weights=8),))
    about = {"weights": {"method": "gptq"}, "data": {"source": "files", "path": "/nowhere"}}
    run, network = write_run(tmp_path, "llama-biases", transform, scheme, change, **about)
    out = tmp_path / "out"
    assert export(monkeypatch, run, "--out", out, "--format", "torch", "--verify") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "It is the network that was judged" in printed
    assert "Verified: in float64" in printed
    mine = network.params.layers.down.weight[1]
    theirs = opened_by_module(out).model.layers[1].mlp.down_proj.weight.detach().numpy()
    np.testing.assert_array_equal(theirs, np.asarray(mine).T)
    anew = "--out", tmp_path / "b", "--format", "torch", "--weights", "gptq"
    assert export(monkeypatch, run, *anew) == 2
    assert "calibration.txt: cannot be read" in capsys.readouterr().err


# torch


@pytest.mark.parametrize("name", ["llama-biases", "qwen3-biases"])
def test_a_torch_folder_is_the_network_that_was_judged(made, monkeypatch, tmp_path, name, capsys):
    """Verified by the command itself, at W4A4KV4 with everything on."""
    path, out = made(name), tmp_path / "out"
    assert export(monkeypatch, path, "--out", out, "--format", "torch", "--verify") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Verified: in float64 logits differ by at most" in printed
    assert "windows of pydoc" in printed
    with safe_open(out / ONLINE, "np") as file:
        assert json.loads(file.metadata()["fused"]) is True


@pytest.mark.parametrize("kind", ["torch", "compressed-tensors"])
def test_weights_by_gptq(made, monkeypatch, tmp_path, kind, capsys):
    """Rounded for the export, on the text of the run, and proven; they are not those of RTN."""
    path, out = made("llama"), tmp_path / "out"
    arguments = ["--out", out, "--format", kind, "--weights", "gptq", "--verify"]
    if kind == "compressed-tensors":
        pytest.importorskip("compressed_tensors")
        arguments += ["--scheme", "W4A16"]
    assert export(monkeypatch, path, *arguments) == 0
    assert "Verified" in capsys.readouterr().out
    assert "weights rounded anew by GPTQ" in (out / "README.md").read_text()
    plain = tmp_path / "plain"
    arguments[1] = plain
    assert export(monkeypatch, path, *arguments[:4], *arguments[7:]) == 0
    load = opened_by_module if kind == "torch" else opened
    assert apart(logits(load(out)), logits(load(plain))) > 1e-3


def without_shifts(folder, source, online, scheme):
    write_online(folder, source, online.replace(shifts={}), scheme)


def test_an_export_that_computes_something_else_is_not_kept(made, monkeypatch, tmp_path, capsys):
    path, out = made("llama"), tmp_path / "out"
    monkeypatch.setattr("qrot.export.formats.torch.write_online", without_shifts)
    assert export(monkeypatch, path, "--out", out, "--format", "torch", "--verify") == 2
    assert "computes something else" in capsys.readouterr().err
    assert not out.exists()
    assert not list(tmp_path.glob(".*"))
