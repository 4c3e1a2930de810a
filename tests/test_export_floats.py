"""Exports in FP4 and FP8, opened by compressed-tensors in PyTorch, compute what qrot computes."""

import ml_dtypes
import numpy as np
import pytest
from exports import (
    about,
    apart,
    export,
    fused,
    in_qrot,
    logits,
    logits_with_rounded_inputs,
    opened,
    save,
    tokenizer,
)
from models import write_folder
from pydantic import TypeAdapter
from safetensors import safe_open

from qrot.export.floats import STORED, arguments, input_scale, pack_fp4
from qrot.export.format import offline
from qrot.export.formats import compressed_tensors as ct
from qrot.grid import GRIDS, Grid
from qrot.model.io.load import load
from qrot.quantize.gptq import gptq
from qrot.quantize.keep import save_network
from qrot.quantize.rtn import rtn
from qrot.rotation.random import RotationSites, random_rotations
from qrot.rotation.transform import Transform
from qrot.scheme import Scheme

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
pytestmark = pytest.mark.usefixtures("quick_compile")

PRESETS = [f"{name}{alone}" for name in STORED for alone in ("", "A16")]
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
R1_R2 = RotationSites(key=False, down=False)


@pytest.fixture
def model(tmp_path):
    """The folder of a tiny model whose widths groups of 32 divide."""
    folder = tmp_path / "model"
    write_folder(folder, "llama", **SIZES)
    tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def rotations(folder):
    return Transform(random_rotations(load(str(folder)).network.config, 0, sites=R1_R2))


@pytest.mark.parametrize("preset", PRESETS)
def test_floats_in_transformers(model, monkeypatch, tmp_path, preset):
    transform, scheme, out = rotations(model), ct.preset(preset), tmp_path / "out"
    path = save(model, transform, Scheme())
    arguments = ("--out", out, "--format", "compressed-tensors", "--scheme", preset)
    assert export(monkeypatch, path, *arguments) == 0
    network = rtn(fused(model, offline(transform)).replace(scheme=scheme))
    quantised = ct.load_unpacked(out)
    found = logits_with_rounded_inputs(quantised, scheme)
    modules = dict(quantised.named_modules())
    for i in range(3):
        for name, module in (("q", "self_attn.q_proj"), ("down", "mlp.down_proj")):
            mine = np.asarray(network.params.layers.linear(name).weight[i]).T
            theirs = modules[f"model.layers.{i}.{module}"].weight.detach().numpy()
            np.testing.assert_allclose(theirs, mine, rtol=1e-6)
    if not scheme.activations.on:
        assert apart(found, in_qrot(network)) < 1e-5
    assert apart(found, logits(opened(model))) > 1e-3


@pytest.mark.parametrize(("name", "limit"), [("NVFP4", 1e-5), ("FP8", 1e-5)])
def test_what_was_judged_is_what_is_exported(model, monkeypatch, tmp_path, name, limit):
    """Weights that GPTQ rounded keep their codes and scales."""
    run, out = tmp_path / "run", tmp_path / "out"
    scheme = Scheme(
        Grid(**{**vars(GRIDS[name]), "granularity": None} if name == "FP8" else vars(GRIDS[name]))
    )
    network = fused(model, rotations(model)).replace(scheme=scheme)
    rows = np.random.default_rng(1).integers(0, 97, (6, 32), np.int32)
    network = gptq(network, rows)
    run.mkdir()
    save_network(run / "network.safetensors", network, about(model, scheme))
    assert export(monkeypatch, run, "--out", out, "--format", "compressed-tensors") == 0
    assert "It is the network that was judged" in (out / "README.md").read_text()
    assert apart(logits(ct.load_unpacked(out)), in_qrot(network)) < limit


def test_projections_that_engines_fuse_share_a_tensor_scale(model, monkeypatch, tmp_path):
    path, out = save(model, rotations(model), Scheme()), tmp_path / "out"
    arguments = ("--out", out, "--format", "compressed-tensors", "--scheme", "NVFP4")
    assert export(monkeypatch, path, *arguments) == 0
    with safe_open(out / "model.safetensors", "pt") as file:
        for end in ("weight_global_scale", "input_global_scale"):
            for site in (
                ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                ("mlp.gate_proj", "mlp.up_proj"),
            ):
                shared = {float(file.get_tensor(f"model.layers.0.{n}.{end}")) for n in site}
                assert len(shared) == 1
                assert np.log2(shared.pop()) % 1 == 0
        packed = file.get_tensor("model.layers.0.mlp.down_proj.weight_packed")
        assert (packed.dtype, tuple(packed.shape)) == (torch.uint8, (64, 48))


def test_packing_is_theirs():
    helpers = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    draw = np.random.default_rng(0)
    codes = draw.choice(levels, (5, 32)) * draw.choice(np.float32([-1, 1]), (5, 32))
    codes[codes == 0] = 0  # of no sign
    expected = helpers.pack_fp4_to_uint8(torch.tensor(codes)).numpy()
    np.testing.assert_array_equal(pack_fp4(codes), expected)


@pytest.mark.parametrize(("name", "theirs"), [
    ("NVFP4", "NVFP4"), ("MXFP4", "MXFP4"), ("MXFP8", "MXFP8"), ("FP8", "FP8_DYNAMIC"),
])  # fmt: skip
def test_config_says_what_their_presets_say(name, theirs):
    quantization = pytest.importorskip("compressed_tensors.quantization")
    preset = quantization.preset_name_to_scheme(theirs, ["Linear"])
    for inputs, expected in ((False, preset.weights), (True, preset.input_activations)):
        found = quantization.QuantizationArgs(**arguments(GRIDS[name], inputs=inputs))
        kept = {"num_bits", "type", "symmetric", "strategy", "dynamic", "group_size", "scale_dtype"}
        assert found.model_dump(include=kept) == expected.model_dump(include=kept)


@pytest.mark.parametrize("largest", [0.0, 1e-6, 3.0, 5e4])
def test_tensor_scales_of_inputs_leave_room(largest):
    scale = input_scale(largest)
    assert np.log2(scale).item() % 1 == 0
    stored = np.float32(largest / 6 * scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert largest == 0 or 448 / 16 < stored.item() <= 448 / 4


@pytest.mark.parametrize(("scheme", "said"), [
    (Scheme(GRIDS["NF4"]), "weights in NF4 have no format; those that have are NVFP4, MXFP4"),
    (Scheme(GRIDS["NVFP4"], Grid(8)), "activations beside weights in NVFP4 must be in NVFP4"),
    (Scheme(GRIDS["NVFP4"], keys=GRIDS["NVFP4"]), "it has no integer cache of 4 bits"),
    (Scheme(Grid(codebook="e2m1", granularity="group", group=8)), "weights in E2M1 have no format"),
    (Scheme(Grid(codebook="e4m3", granularity="tensor")), "weights in FP8 are by channel"),
])  # fmt: skip
def test_what_it_cannot_say(model, monkeypatch, tmp_path, capfd, scheme, said):
    path = save(model, rotations(model), scheme)
    arguments = ("--out", tmp_path / "out", "--format", "compressed-tensors")
    assert export(monkeypatch, path, *arguments) == 2
    assert said in " ".join(capfd.readouterr().err.split())
    assert TypeAdapter(Scheme).dump_python(scheme)
    assert not (tmp_path / "out").exists()
