"""What is not exported: one sentence, exit code 2, nothing written."""

import numpy as np
import pytest
from exports import as_values, export, hadamard, write_run
from models import write_folder
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from qrot.errors import InputError
from qrot.export.formats import compressed_tensors as ct
from qrot.export.source import open_source, weight_method
from qrot.files.whole import whole_folder
from qrot.grid import Grid
from qrot.quantize.keep import read_about, save_network
from qrot.rotation.store import load_rotations, save_rotations
from qrot.rotation.transform import Transform
from qrot.scheme import Override, Scheme

pytest.importorskip("torch")
pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("quick_compile")


REFUSED = [
    ("--format compressed-tensors", "asymmetric grid; choose a scheme"),
    ("--format compressed-tensors --scheme W3A3", "'W3A3' is not one of W4A16"),
    ("--format compressed-tensors --scheme W4A4 --online", "not a learned one"),
    ("--format compressed-tensors --group 8", "--group goes with --scheme"),
    ("--format spinquant", "one R2 a layer"),
    ("--format onnx", "there is no 'onnx'; expected one of compressed-tensors"),
    ("--format torc", "did you mean 'torch'?"),
    ("--format torch --scheme W4A4", "--scheme goes with --format compressed-tensors only"),
    ("--online", "--online goes with --format compressed-tensors, gguf only"),
    ("--weights awk", "there is no 'awk'; did you mean 'awq'?"),
    ("--format torch --weights qat", "which is done in a run only"),
    ("--row other", "--row picks one of the networks in a run folder"),
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
    path, out = made("llama", transform=hadamard("llama", tmp_path)), tmp_path / "out"
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
        ({"weights": Grid(), "activations": Grid()}, "no weight is rounded"),
        (
            {"overrides": (Override("layers.1.up", weights=5),)},
            "up of layer 1 at W5A4 is none of W4A16",
        ),
    ],
)
def test_schemes_that_the_format_cannot_say(change, message):
    fine = {"weights": Grid(4), "activations": Grid(4, "symmetric_half")}
    ct.check_scheme(Scheme(**fine), 3)
    with pytest.raises(InputError, match=message):
        ct.check_scheme(Scheme(**{**fine, **change}), 3)


def test_another_models_rotations_are_refused(made, monkeypatch, tmp_path, capsys):
    path = made("llama")
    write_folder(tmp_path / "other", "llama", seed=1)
    out = tmp_path / "out"
    assert export(monkeypatch, path, "--out", out, "--model", tmp_path / "other") == 2
    error = capsys.readouterr().err
    assert "fitted to" in error
    assert "--allow-mismatch" in error
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
    assert export(monkeypatch, run, "--out", out, "--row", "learned") == 2
    assert "kept no network of a row; run it again with keep=all" in capsys.readouterr().err
    assert export(monkeypatch, run, "--out", out) == 2
    assert "without learned rotations or a kept network" in capsys.readouterr().err
    path.rename(run / "seed0" / "rotations.safetensors")
    assert export(monkeypatch, run, "--out", out) == 2
    assert "several seeds, export one of" in capsys.readouterr().err
    (run / "seed0" / "rotations.safetensors").rename(run / "rotations.safetensors")
    assert export(monkeypatch, run, "--out", out) == 0


def test_runs_with_mixed_bits_that_kept_no_network_are_refused(made, monkeypatch, tmp_path, capsys):
    path = made("llama")
    (path.parent / "config.yaml").write_text("scheme: {weights: {bits: 4}}\nmixed: {bits: 3.0}\n")
    arguments = path, "--out", tmp_path / "out", "--format"
    assert export(monkeypatch, *arguments, "torch") == 2
    assert "the run gave each projection its own bits" in capsys.readouterr().err
    assert export(monkeypatch, *arguments, "huggingface") == 0


def test_how_an_older_run_rounded_weights(made, monkeypatch, tmp_path, capsys):
    """Its rotation file names no method; config.yaml does, settings in a section of their own."""
    path = made("llama")
    config = path.parent / "config.yaml"
    config.write_text("weight_method: quip_sharp\nquip: {damping: 0.02, seed: 5}\n")
    method, settings = weight_method(open_source(path))
    assert (method.name, settings.damping, settings.seed) == ("quip_sharp", 0.02, 5)
    config.write_text("weights: {method: gptq, damping: 0.03}\ndata: {source: files}\n")
    source = open_source(path)
    assert weight_method(source)[1].damping == 0.03
    assert source.about["data"] == {"source": "files"}
    assert weight_method(source, "rtn")[0].name == "rtn"
    config.write_text("weights: {method: gptq, dampin: 0.03}\n")
    assert export(monkeypatch, path, "--out", tmp_path / "out", "--format", "torch") == 2
    assert "Gptq.dampin" in capsys.readouterr().err
    config.write_text("weights: {")
    assert export(monkeypatch, path, "--out", tmp_path / "out", "--format", "torch") == 2
    assert "config.yaml: not valid YAML" in capsys.readouterr().err


def test_rows_of_a_run(monkeypatch, tmp_path, capsys):
    """One of the networks that it kept, by the name of its row or of its file."""
    alone = hadamard("llama", tmp_path, key=False, down=False)
    run, network = write_run(tmp_path, "llama", alone, Scheme(Grid(4)))
    (run / "networks").mkdir()
    told = {**read_about(run / "network.safetensors"), "row": "random hadamard, seed 1"}
    other = run / "networks" / "random-hadamard-seed-1.safetensors"
    save_network(other, as_values(network), told)
    assert export(monkeypatch, run, "--out", tmp_path / "a", "--row", "random") == 2
    assert "--row: there is no 'random'" in capsys.readouterr().err
    for i, row in enumerate(["random hadamard, seed 1", "random-hadamard-seed-1"]):
        out = tmp_path / f"row{i}"
        assert export(monkeypatch, run, "--out", out, "--row", row) == 0
        assert "judged (random hadamard, seed 1)" in " ".join(capsys.readouterr().out.split())
    # The rotations beside it are those of another row.
    assert export(monkeypatch, other, "--out", tmp_path / "b", "--format", "spinquant") == 2
    assert "no rotation file of this row is kept beside it" in capsys.readouterr().err


def test_values_are_no_integers(monkeypatch, tmp_path, capsys):
    alone = hadamard("llama", tmp_path, key=False, down=False)
    run, _ = write_run(tmp_path, "llama", alone, Scheme(Grid(4)), as_values)
    arguments = run, "--out", tmp_path / "out", "--format", "compressed-tensors"
    assert export(monkeypatch, *arguments) == 2
    assert "the run's weights are values, not integers" in capsys.readouterr().err
    assert export(monkeypatch, *arguments, "--weights", "rtn") == 0


def test_a_network_of_another_model_is_refused(monkeypatch, tmp_path, capsys):
    alone = hadamard("llama", tmp_path, key=False, down=False)
    run, _ = write_run(tmp_path, "llama", alone, Scheme(Grid(4)))
    write_folder(tmp_path / "other", "llama", seed=1)
    arguments = run, "--out", tmp_path / "out", "--model", tmp_path / "other"
    assert export(monkeypatch, *arguments) == 2
    assert "fitted to" in capsys.readouterr().err


def test_two_exports_at_once(tmp_path):
    """Each in a folder of its own; the slower one gets a sentence, and what is there stays."""
    out = tmp_path / "out"

    def slowly():
        with whole_folder(out) as slow:
            (slow / "a").write_text("slow")
            with whole_folder(out) as fast:
                (fast / "a").write_text("fast")

    with pytest.raises(InputError, match="is there already"):
        slowly()
    assert (out / "a").read_text() == "fast"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


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
    down = hadamard("llama", tmp_path).rotations["down"]
    save_rotations(path, Transform({"down": down}), {"model": "m", "digest": "0"})
    loaded, _ = load_rotations(path)
    np.testing.assert_array_equal(loaded.rotations["down"].signs, down.signs)
    tensors = load_file(path)
    with safe_open(path, "np") as file:
        metadata = file.metadata()
    tensors["rotations.down.factor0"] = tensors["rotations.down.factor0"][::-1].copy()
    save_file(tensors, path, metadata)
    with pytest.raises(InputError, match="other Hadamard matrices"):
        load_rotations(path)
