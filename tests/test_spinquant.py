"""Rotations to SpinQuant's R.bin and back."""

import sys

import numpy as np
import pytest
from exports import TOKENS, apart, export, hadamard, logits, opened
from models import write_folder

from qrot import cli
from qrot.errors import InputError
from qrot.export.fitted import read_fitted
from qrot.export.spinquant import read_spinquant, spinquant_tensors
from qrot.export.verify import apply_spinquant, logits_in_qrot
from qrot.grid import Grid
from qrot.model.io.load import load
from qrot.rotation.random import random_rotations
from qrot.scheme import Scheme

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("quick_compile")


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
