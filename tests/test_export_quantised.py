"""Quantised exports, opened in PyTorch, compute what qrot computes."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exports import TOKENS, apart, export, hadamard, logits, opened
from safetensors import safe_open
from safetensors.numpy import load_file

from qrot.run.config import RunConfig
from qrot.export import compressed_tensors as ct
from qrot.export.fitted import read_fitted
from qrot.export.verify import logits_in_qrot
from qrot.grid import fake_quantise
from qrot.network import fold_norms, fuse
from qrot.calibrate.moments import Calibration
from qrot.quantize.rtn import rtn
from qrot.rotation.forms import Learned

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("quick_compile")
FOUR = ("llama-biases", "mistral", "qwen2-tied", "qwen3-biases")


# compressed-tensors


@pytest.mark.parametrize("shape", [(1, 8), (5, 12), (3, 64), (2, 7)])
def test_packing_is_theirs(shape):
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    q = np.random.default_rng(0).integers(-8, 8, shape).astype(np.int8)
    expected = helpers.pack_to_int32(torch.tensor(q), 4)
    np.testing.assert_array_equal(ct.pack(q), expected.numpy())


@pytest.mark.parametrize("preset", ct.PRESETS)
@pytest.mark.parametrize("name", FOUR)
def test_integers_in_transformers(made, monkeypatch, tmp_path, name, preset):
    pytest.importorskip("compressed_tensors")
    path, out = made(name), tmp_path / "out"
    arguments = ("--out", out, "--format", "compressed-tensors", "--scheme", preset)
    assert export(monkeypatch, path, *arguments) == 0
    fitted = read_fitted(path)
    learned = Learned(
        fitted.learned.rotations.replace(key=None, down=None), scales=fitted.learned.scales
    )
    scheme, quantised = ct.preset(preset), opened(out)
    seen = watched(quantised)
    found = logits(quantised)
    assert len(seen) == 3 * 7
    for linear, x, y in seen:
        rounded = np.array(fake_quantise(jnp.asarray(x), scheme.activations))
        expected = torch.nn.functional.linear(torch.tensor(rounded), linear.weight, linear.bias)
        assert apart(y, expected.detach()) < 1e-5
    if not scheme.activations.on:
        # With them on, the last bit of a sum decides where the largest value of a token goes, which
        # at absmax/7.5 lies just between two levels; and no two programs add in the same order.
        expected = logits_in_qrot(fitted, learned, scheme)(TOKENS)
        assert apart(found, expected) < 1e-5
    assert apart(found, logits(opened(tmp_path / name))) > 1e-3
    for q, weight in weights_of(quantised, fitted, learned, preset):
        np.testing.assert_array_equal(q, weight)


def watched(model):
    """(layer, input, output) of each quantised linear layer, filled in as the model runs."""
    seen = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_hook(
                lambda m, x, y: seen.append((m, x[0].numpy().copy(), y.detach()))
            )
    return seen


def weights_of(quantised, fitted, learned, preset):
    """Pairs of each weight of the first layer: as PyTorch sees it, as qrot rounded it."""
    model = fold_norms(fitted.opened.model(fitted.opened.read()))
    params, *_ = fuse(model.params, learned.rotations, model.config, None, learned.scales)
    layer = jax.tree.map(lambda x: x[0], rtn(params, ct.preset(preset)).layers)
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
    fitted = read_fitted(path)
    learned = Learned(fitted.learned.rotations.replace(key=None, down=None))
    learned = learned.replace(scales=fitted.learned.scales)
    expected = logits_in_qrot(fitted, learned, ct.preset("W4A16", group=8))(TOKENS)
    assert apart(logits(opened(out)), expected) < 1e-5
    scale = load_file(out / "model.safetensors")["model.layers.0.mlp.down_proj.weight_scale"]
    assert scale.shape == (48, 7)


def test_r4_for_vllm(made, monkeypatch, tmp_path):
    """A block Hadamard online: by our module, and by compressed-tensors' own transform."""
    transform = pytest.importorskip("compressed_tensors.transform")
    learned = hadamard("llama-biases", tmp_path, down=8)
    path, out = made("llama-biases", learned=learned), tmp_path / "out"
    arguments = ("--format", "compressed-tensors", "--scheme", "W4A16", "--online")
    assert export(monkeypatch, path, "--out", out, *arguments) == 0
    fitted = read_fitted(path)
    without = fitted.learned.replace(rotations=fitted.learned.rotations.replace(key=None))
    expected = logits_in_qrot(fitted, without, ct.preset("W4A16"), signs_folded=True)(TOKENS)
    sys.path.insert(0, str(out))
    try:
        import qrot_torch
    finally:
        sys.path.remove(str(out))
    assert apart(logits(qrot_torch.load(out)), expected) < 1e-5
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    plain = opened(out)
    assert apart(logits(plain), expected) > 0.1  # what the README of the folder warns of
    r4 = config["transform_config"]["config_groups"]["R4"]
    scheme = transform.TransformScheme(
        type=r4["type"], head_dim=r4["head_dim"], apply=[r4["apply"][0]]
    )
    transform.TransformFactory.from_scheme(scheme, name="R4").apply_to_model(plain)
    assert apart(logits(plain), expected) < 1e-5
    stored = load_file(out / "model.safetensors")["model.layers.2.mlp.down_proj.R4_input.weight"]
    own = plain.model.layers[2].mlp.down_proj.R4_input.weight
    np.testing.assert_array_equal(stored, own.detach().numpy())
    assert "computes something else" in (out / "README.md").read_text()
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


# qrot.export.runtime.qrot_torch


@pytest.mark.parametrize("name", ["llama-biases", "qwen3-biases"])
def test_a_torch_folder_is_the_network_that_was_judged(made, monkeypatch, tmp_path, name, capsys):
    """Verified by the command itself, at W4A4KV4 with everything on."""
    path, out = made(name), tmp_path / "out"
    assert export(monkeypatch, path, "--out", out, "--format", "torch", "--verify") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Verified: in float64 logits differ by at most" in printed
    assert "windows of pydoc" in printed
    with safe_open(out / "online.safetensors", "np") as file:
        assert json.loads(file.metadata()["fused"]) is True


@pytest.mark.parametrize("kind", ["torch", "compressed-tensors"])
def test_weights_by_gptq(made, monkeypatch, tmp_path, kind, capsys):
    """Rounded for the export, on the text of the run, and proven; they are not those of RTN."""
    path, out = made("llama"), tmp_path / "out"
    monkeypatch.setattr(
        "qrot.export.fitted.RunConfig", lambda: RunConfig(calibration=Calibration(4, 64))
    )
    arguments = ["--out", out, "--format", kind, "--weights", "gptq", "--verify"]
    if kind == "compressed-tensors":
        pytest.importorskip("compressed_tensors")
        arguments += ["--scheme", "W4A16"]
    assert export(monkeypatch, path, *arguments) == 0
    assert "Verified" in capsys.readouterr().out
    assert "by GPTQ" in (out / "README.md").read_text()
    plain = tmp_path / "plain"
    arguments[1] = plain
    assert export(monkeypatch, path, *arguments[:4], *arguments[7:]) == 0
    assert apart(logits(opened(out)), logits(opened(plain))) > 1e-3


def test_an_export_that_computes_something_else_is_not_kept(made, monkeypatch, tmp_path, capsys):
    path, out = made("llama"), tmp_path / "out"
    monkeypatch.setattr("qrot.export.pytorch.fuse_shifts", lambda *_: None)
    assert export(monkeypatch, path, "--out", out, "--format", "torch", "--verify") == 2
    assert "computes something else" in capsys.readouterr().err
    assert not out.exists()
    assert not list(tmp_path.glob(".*"))
