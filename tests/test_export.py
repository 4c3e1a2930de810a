"""Every export, opened in PyTorch, computes what qrot computes."""

import json
import struct
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from learned import ALL, put, some_clips, some_shifts
from models import VARIANTS, write_folder, write_variant
from pydantic import TypeAdapter
from rich.console import Console
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from qrot import cli
from qrot.errors import InputError
from qrot.experiment.config import RunConfig
from qrot.experiment.data import Data, read_texts
from qrot.experiment.stages import Stages
from qrot.export import compressed_tensors as ct
from qrot.export.export import Options
from qrot.export.export import export as write
from qrot.export.fitted import read_fitted
from qrot.export.folder import whole_folder, write_tensors
from qrot.export.huggingface import config_json
from qrot.export.spinquant import read_spinquant, spinquant_tensors
from qrot.export.verify import apply_spinquant, logits_in_qrot
from qrot.grid import Grid, fake_quantise
from qrot.model import assemble
from qrot.model.fuse import fold_norms, fuse
from qrot.model.load import load, open_model
from qrot.quantize.layer_by_layer import Calibration
from qrot.quantize.rtn import rtn
from qrot.rotation.random import RotationSites, random_rotations
from qrot.rotation.rotations import Learned, Rotations
from qrot.rotation.store import load_rotations, save_rotations
from qrot.scheme import Scheme

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("quick_compile")
TOKENS = np.random.default_rng(7).integers(0, 97, (1, 24), np.int32)
A4 = Grid(4, "asymmetric")
W4A4KV4 = Scheme(Grid(4, clip="mse"), A4, A4, A4)
FOUR = ("llama-biases", "mistral", "qwen2-tied", "qwen3-biases")


def tokenizer():
    """97 words of the text that verification reads; the rest is unknown."""
    words = sorted(set(read_texts(Data()).evaluation.split()))[:96]
    vocabulary = {word: i for i, word in enumerate(["[UNK]", *words])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


def save(folder, learned, scheme, digest=None):
    """A rotation file for the model in `folder`, beside it."""
    path = folder.parent / f"{folder.name}.safetensors"
    digest = digest or load(str(folder)).digest
    metadata = {
        "model": str(folder),
        "digest": digest,
        "scheme": TypeAdapter(Scheme).dump_python(scheme, mode="json"),
        "seed": 3,
    }
    save_rotations(path, learned, metadata)
    return path


@pytest.fixture
def made(tmp_path):
    """(variant, scheme, learned) -> rotation file of a tiny model in a folder of its own."""

    def make(name, scheme=W4A4KV4, learned=None):
        folder = tmp_path / name
        write_variant(folder, name)
        tokenizer().save(str(folder / "tokenizer.json"))
        (folder / "generation_config.json").write_text('{"temperature": 0.5}')
        return save(folder, everything(load(str(folder))) if learned is None else learned, scheme)

    return make


def everything(model):
    """All that can be learned."""
    rotations, scales = jax.tree.map(jnp.float32, put(model, ALL))
    draw = np.random.default_rng(3)
    return Learned(rotations, some_shifts(model, draw), some_clips(model, draw), scales)


def hadamard(name, tmp_path, **sites):
    folder = tmp_path / "sizes"
    write_variant(folder, name)
    return Learned(random_rotations(load(str(folder)).config, 0, sites=RotationSites(**sites)))


def export(monkeypatch, *arguments):
    """`qrot export ...` in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", ["qrot", "export", *map(str, arguments)])
    try:
        cli.main()
    except SystemExit as end:
        return end.code or 0
    return 0


def logits(model, tokens=TOKENS):
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.float().numpy()


def opened(folder, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def apart(a, b):
    return np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(np.asarray(b)).max()


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
    assert "seed 3" in readme


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
    learned = Learned(random_rotations(load(str(folder)).config, 0))
    path, out = save(folder, learned, Scheme()), tmp_path / "out"
    assert export(monkeypatch, path, "--out", out) == 0
    assert load_dtype(out) == "BF16"
    exact = logits(opened(folder, dtype=torch.float32))
    before, after = (apart(logits(opened(f)), exact) for f in (folder, out))
    assert after < 1.5 * before


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
        write(read_fitted(path), out, "huggingface", Options(shard=50_000), stages)
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


# qrot.torch


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


# SpinQuant


@pytest.mark.parametrize("name", ["llama-biases", "qwen2-tied"])
def test_r_bin(made, monkeypatch, tmp_path, name, capsys):
    """Applied by SpinQuant's rules and verified; the matrices are the rotations themselves."""
    learned = hadamard(name, tmp_path)
    path, out = made(name, learned=learned), tmp_path / "out"
    assert export(monkeypatch, path, "--out", out, "--format", "spinquant", "--verify") == 0
    assert "Verified" in capsys.readouterr().out
    tensors = torch.load(out / "R.bin", weights_only=True)
    assert set(tensors) == {"R1", *(f"model.layers.{i}.self_attn.R2" for i in range(3))}
    assert all(x.dtype == torch.float32 and x.device.type == "cpu" for x in tensors.values())
    np.testing.assert_array_equal(tensors["R1"], np.asarray(learned.rotations.residual))
    config = load(str(tmp_path / name)).config
    back = read_spinquant(out / "R.bin", config)
    np.testing.assert_array_equal(back.residual, learned.rotations.residual)
    np.testing.assert_array_equal(back.value, learned.rotations.value)


def test_weights_rounded_after_r_bin_are_qrots(made, tmp_path):
    """In the rotated basis: a transposed R1 would leave the logits alone, but not these."""
    learned = hadamard("llama", tmp_path, key=False, down=False)
    path = made("llama", learned=learned)
    fitted = read_fitted(path)
    tensors = spinquant_tensors(learned.rotations, fitted.opened.config)
    torch.save({k: torch.tensor(x) for k, x in tensors.items()}, tmp_path / "R.bin")
    model = apply_spinquant(opened(tmp_path / "llama"), tmp_path / "R.bin")
    for layer in model.model.layers:
        for module in (*layer.self_attn.children(), *layer.mlp.children()):
            if isinstance(module, torch.nn.Linear):
                weight = module.weight.data
                scale = weight.abs().amax(1, keepdim=True) / 7
                module.weight.data = (weight / scale).round().clamp(-8, 7) * scale
    expected = logits_in_qrot(fitted, learned, Scheme(Grid(4)))(TOKENS)
    assert apart(logits(model), expected) < 1e-4


def test_import(made, monkeypatch, tmp_path, capsys):
    learned = hadamard("llama", tmp_path)
    path, folder = made("llama", learned=learned), tmp_path / "llama"
    assert export(monkeypatch, path, "--out", tmp_path / "out", "--format", "spinquant") == 0
    file = tmp_path / "imported.safetensors"
    arguments = ["import", tmp_path / "out" / "R.bin", "--model", folder, "--weight-bits", 16]
    monkeypatch.setattr(sys, "argv", ["qrot", *map(str, arguments), "--out", str(file)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 0
    fitted = read_fitted(file)
    assert fitted.metadata["trained_weight_bits"] == 16
    np.testing.assert_array_equal(fitted.learned.rotations.value, learned.rotations.value)
    assert fitted.learned.rotations.down is not None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("R1"), "has no R1"),
        (lambda t: t.update(R1=t["R1"][:4]), "R1 is 4 x 48, and this model needs 48 x 48"),
        (lambda t: t["R1"].mul_(1.01), "R1 is not orthogonal"),
        (lambda t: t["model.layers.2.self_attn.R2"].zero_(), "layers.2.self_attn.R2 is not"),
        (lambda t: t["R1"].fill_(float("nan")), "not orthogonal"),
    ],
)
def test_an_r_bin_that_is_none(tmp_path, change, message):
    folder = tmp_path / "llama"
    write_folder(folder, "llama")
    config = load(str(folder)).config
    tensors = spinquant_tensors(random_rotations(config, 0), config)
    tensors = {k: torch.tensor(x) for k, x in tensors.items()}
    change(tensors)
    torch.save(tensors, tmp_path / "R.bin")
    with pytest.raises(InputError, match=message):
        read_spinquant(tmp_path / "R.bin", config)
    (tmp_path / "R.bin").write_bytes(b"nothing")
    with pytest.raises(InputError, match="not a file of tensors"):
        read_spinquant(tmp_path / "R.bin", config)


# Refusals: one sentence, exit code 2, nothing written.

REFUSED = [
    ("--format compressed-tensors", "asymmetric grid; choose a scheme"),
    ("--format compressed-tensors --scheme W3A3", "'W3A3' is not one of W4A16"),
    ("--format compressed-tensors --scheme W4A4 --online", "not a learned one"),
    ("--format compressed-tensors --group 8", "--group goes with --scheme"),
    ("--format spinquant", "one R2 a layer"),
    ("--format onnx", "'onnx' is not one of spinquant"),
    ("--format torch --scheme W4A4", "go with --format compressed-tensors only"),
    ("--weights awq", "'awq' is not one of rtn, gptq"),
    ("--dtype int8", "'int8' is not one of float32"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_refusals(made, monkeypatch, tmp_path, capsys, arguments, message):
    path, out = made("llama"), tmp_path / "out"
    assert export(monkeypatch, path, "--out", out, *arguments.split()) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not out.exists()
    assert not list(tmp_path.glob(".*"))


def test_r4_that_is_no_power_of_two_is_refused(made, monkeypatch, tmp_path, capsys):
    path, out = made("llama", learned=hadamard("llama", tmp_path)), tmp_path / "out"
    arguments = ("--format", "compressed-tensors", "--scheme", "W4A4", "--online")
    assert export(monkeypatch, path, "--out", out, *arguments) == 2
    assert "needs a power of two, and R4 has 56" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activations": Grid(4)}, "symmetric_half grid by token"),
        ({"activations": Grid(4, "symmetric_half", clip=0.9)}, "symmetric_half grid by token"),
        ({"weights": Grid(4, "asymmetric")}, "weights must be symmetric"),
        ({"keys": Grid(4)}, "no integer cache of 4 bits"),
        ({"weights": Grid(6)}, "W6A4 is none of W4A16"),
    ],
)
def test_schemes_that_the_format_cannot_say(change, message):
    fine = {"weights": Grid(4), "activations": Grid(4, "symmetric_half")}
    ct.check_scheme(Scheme(**fine))
    with pytest.raises(InputError, match=message):
        ct.check_scheme(Scheme(**{**fine, **change}))


def test_another_models_rotations_are_refused(made, monkeypatch, tmp_path, capsys):
    path = made("llama")
    write_folder(tmp_path / "other", "llama", seed=1)
    out = tmp_path / "out"
    assert export(monkeypatch, path, "--out", out, "--model", tmp_path / "other") == 2
    assert "fitted to" in capsys.readouterr().err
    assert not out.exists()


def test_a_folder_that_is_there_is_left_alone(made, monkeypatch, tmp_path, capsys):
    path, out = made("llama"), tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("mine")
    assert export(monkeypatch, path, "--out", out) == 2
    assert "is there already" in capsys.readouterr().err
    assert [p.name for p in out.iterdir()] == ["mine"]


def test_run_folders(made, monkeypatch, tmp_path, capsys):
    path = made("llama")
    run = tmp_path / "run"
    (run / "seed0").mkdir(parents=True)
    out = tmp_path / "out"
    assert export(monkeypatch, run, "--out", out) == 2
    assert "without learned rotations" in capsys.readouterr().err
    path.rename(run / "seed0" / "rotations.safetensors")
    assert export(monkeypatch, run, "--out", out) == 2
    assert "several seeds, export one of" in capsys.readouterr().err
    (run / "seed0" / "rotations.safetensors").rename(run / "rotations.safetensors")
    assert export(monkeypatch, run, "--out", out) == 0


def test_runs_with_mixed_bits_are_refused(made, monkeypatch, tmp_path, capsys):
    path = made("llama")
    (path.parent / "config.yaml").write_text("scheme: {weights: {bits: 4}}\nmixed: {bits: 3.0}\n")
    arguments = path, "--out", tmp_path / "out", "--format"
    assert export(monkeypatch, *arguments, "torch") == 2
    assert "the run gave each projection its own bits" in capsys.readouterr().err
    assert export(monkeypatch, *arguments, "huggingface") == 0


def test_a_broken_export_never_looks_whole(tmp_path):
    out = tmp_path / "out"

    def interrupted(error):
        with whole_folder(out) as folder:
            (folder / "half").write_text("half")
            raise error

    with pytest.raises(KeyboardInterrupt):
        interrupted(KeyboardInterrupt())
    assert not list(tmp_path.iterdir())
    with pytest.raises(InputError, match="cannot be written"):
        interrupted(OSError(28, "No space left on device"))
    assert not list(tmp_path.iterdir())


def test_rotation_files_of_other_hadamard_matrices_are_refused(tmp_path):
    path = tmp_path / "r.safetensors"
    rotations = Rotations(down=hadamard("llama", tmp_path).rotations.down)
    save_rotations(path, Learned(rotations), {"model": "m", "digest": "0"})
    loaded, _ = load_rotations(path)
    np.testing.assert_array_equal(loaded.rotations.down.signs, rotations.down.signs)
    tensors = load_file(path)
    with safe_open(path, "np") as file:
        metadata = file.metadata()
    tensors["rotations.down.factor0"] = tensors["rotations.down.factor0"][::-1].copy()
    save_file(tensors, path, metadata)
    with pytest.raises(InputError, match="other Hadamard matrices"):
        load_rotations(path)
