"""Rotations to SpinQuant's R.bin and back."""

import sys

import ml_dtypes
import numpy as np
import pytest
from exports import TOKENS, apart, export, fused, hadamard, in_qrot, logits, opened
from models import write_folder

from qrot import cli
from qrot.errors import InputError
from qrot.export.formats.spinquant import (
    apply_spinquant,
    fixed_rotations,
    read_spinquant,
    same_as_spinquant,
    spinquant_tensors,
)
from qrot.export.source import open_source
from qrot.grid import Grid
from qrot.model.config import ModelConfig
from qrot.model.io.load import load
from qrot.quantize.rtn import rtn
from qrot.rotation.forms import Dense
from qrot.rotation.random import random_rotations
from qrot.rotation.transform import Transform
from qrot.scheme import Scheme

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.mark.parametrize("name", ["llama-biases", "qwen2-tied"])
def test_r_bin(made, monkeypatch, tmp_path, name, capsys):
    """Applied by SpinQuant's rules and verified; the matrices are the rotations themselves."""
    transform = hadamard(name, tmp_path)
    path, out = made(name, transform=transform), tmp_path / "out"
    assert export(monkeypatch, path, "--out", out, "--format", "spinquant", "--verify") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Verified" in printed
    assert "without R3, R4, at full precision in place of W4A4KV4" in printed
    readme = (out / "README.md").read_text()
    assert "R3 of order 12 is another one than qrot's, R4 of order 56 is another one" in readme
    tensors = torch.load(out / "R.bin", weights_only=True)
    assert set(tensors) == {"R1", *(f"model.layers.{i}.self_attn.R2" for i in range(3))}
    assert all(x.dtype == torch.float32 and x.device.type == "cpu" for x in tensors.values())
    theirs = transform.rotations
    np.testing.assert_array_equal(tensors["R1"], np.asarray(theirs["residual"].matrix))
    config = load(str(tmp_path / name)).network.config
    back = read_spinquant(out / "R.bin", config).rotations
    np.testing.assert_array_equal(back["residual"].matrix, theirs["residual"].matrix)
    np.testing.assert_array_equal(back["value"].matrix, theirs["value"].matrix)


def test_weights_rounded_after_r_bin_are_qrots(made, tmp_path):
    """In the rotated basis: a transposed R1 would leave the logits alone, but not these."""
    transform = hadamard("llama", tmp_path, key=False, down=False)
    made("llama", transform=transform)
    tensors = spinquant_tensors(transform, load(str(tmp_path / "llama")).network.config)
    torch.save({k: torch.tensor(x) for k, x in tensors.items()}, tmp_path / "R.bin")
    model = apply_spinquant(opened(tmp_path / "llama"), tmp_path / "R.bin")
    for layer in model.model.layers:
        for module in (*layer.self_attn.children(), *layer.mlp.children()):
            if isinstance(module, torch.nn.Linear):
                weight = module.weight.data
                scale = weight.abs().amax(1, keepdim=True) / 7
                module.weight.data = (weight / scale).round().clamp(-8, 7) * scale
    network = rtn(fused(tmp_path / "llama", transform).replace(scheme=Scheme(Grid(4))))
    assert apart(logits(model), in_qrot(network, TOKENS)) < 1e-4


def test_import(made, monkeypatch, tmp_path, capsys):
    transform = hadamard("llama", tmp_path)
    path, folder = made("llama", transform=transform), tmp_path / "llama"
    assert export(monkeypatch, path, "--out", tmp_path / "out", "--format", "spinquant") == 0
    file = tmp_path / "imported.safetensors"
    arguments = ["import", tmp_path / "out" / "R.bin", "--model", folder, "--weight-bits", 16]
    monkeypatch.setattr(sys, "argv", ["qrot", *map(str, arguments), "--out", str(file)])
    words = "R3 of order 12 is another one than qrot's.* was learned beside its own"
    with pytest.raises(SystemExit) as end, pytest.warns(UserWarning, match=words):
        cli.main()
    assert end.value.code == 0
    source = open_source(file)
    assert source.about["trained_weight_bits"] == 16
    assert source.about["same_as_spinquant"] == {"key": False, "down": False}
    mine, theirs = source.transform.rotations, transform.rotations
    np.testing.assert_array_equal(mine["value"].matrix, theirs["value"].matrix)
    assert "down" in mine


def sizes(head_dim, intermediate):
    return ModelConfig("llama", 576, intermediate, 2, 9, 3, head_dim, 97)


def test_which_fixed_rotations_are_the_same():
    """Sylvester's, of a power of two; all others are built on other matrices."""
    assert same_as_spinquant(sizes(64, 1536)) == {"key": True, "down": False}
    assert same_as_spinquant(sizes(128, 8192)) == {"key": True, "down": True}
    assert fixed_rotations(sizes(64, 1536)) == (
        "SpinQuant has a fixed R3 and R4: R3 of order 64 is the same as qrot's, R4 of order 1536 "
        "is another one than qrot's."
    )


def test_a_file_in_bfloat16_is_brought_to_orthogonality(tmp_path):
    """As exact as float32 is, near what it says; what is further off is refused."""
    config = sizes(64, 1536)
    kinds = random_rotations(config, 0, kind="orthogonal")
    exact = spinquant_tensors(Transform(kinds), config)
    rough = {k: x.astype(ml_dtypes.bfloat16).astype(np.float64) for k, x in exact.items()}
    errors = [np.abs(x @ x.T - np.eye(len(x))).max() for x in rough.values()]
    assert 1e-3 < max(errors) < 1e-2
    torch.save({k: torch.tensor(x).bfloat16() for k, x in rough.items()}, tmp_path / "R.bin")
    found = read_spinquant(tmp_path / "R.bin", config).rotations
    for rotation, name in ((found["residual"], "R1"), (found["value"], None)):
        matrix = np.asarray(rotation.matrix, np.float64)
        assert isinstance(rotation, Dense)
        assert np.abs(matrix @ matrix.mT - np.eye(matrix.shape[-1])).max() < 1e-6
        if name is not None:
            assert np.abs(matrix - exact[name]).max() < np.abs(rough[name] - exact[name]).max() * 2
    far = {k: torch.tensor(x + 1e-2 * (k == "R1")) for k, x in exact.items()}
    torch.save(far, tmp_path / "R.bin")
    with pytest.raises(InputError, match="R1 is not orthogonal"):
        read_spinquant(tmp_path / "R.bin", config)


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
    config = load(str(folder)).network.config
    tensors = spinquant_tensors(Transform(random_rotations(config, 0)), config)
    tensors = {k: torch.tensor(x) for k, x in tensors.items()}
    change(tensors)
    torch.save(tensors, tmp_path / "R.bin")
    with pytest.raises(InputError, match=message):
        read_spinquant(tmp_path / "R.bin", config)
    (tmp_path / "R.bin").write_bytes(b"nothing")
    with pytest.raises(InputError, match="not a file of tensors"):
        read_spinquant(tmp_path / "R.bin", config)
