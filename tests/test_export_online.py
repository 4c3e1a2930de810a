"""Exports with something online: loaders that know nothing of it fail, and the module is strict."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from exports import (
    TOKENS,
    apart,
    export,
    fused,
    hadamard,
    in_qrot,
    logits,
    opened,
    opened_by_module,
    write_fitted,
)
from rich.console import Console
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from qrot.errors import InputError
from qrot.export.export import export as write
from qrot.export.format import Options
from qrot.export.online import ONLINE
from qrot.export.source import open_source
from qrot.grid import Grid
from qrot.model.io.load import load
from qrot.progress import Stages
from qrot.rotation.store import save_rotations
from qrot.rotation.transform import Transform
from qrot.scheme import Scheme, grids_by_layer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
import qrot.export.runtime.qrot_torch as qt  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_compile")
KINDS = {
    "torch": ("--format", "torch"),
    "compressed-tensors": ("--format", "compressed-tensors", "--scheme", "W4A16", "--online"),
}


def refused(function, *arguments):
    """What a function says that is to fail."""
    with pytest.raises((ValueError, OSError, InputError)) as error:
        function(*arguments)
    return str(error.value)


@pytest.mark.parametrize("kind", KINDS)
def test_plain_loaders_fail(monkeypatch, tmp_path, kind):
    """Not a word of theirs would say that they computed something else."""
    if kind == "compressed-tensors":
        pytest.importorskip("compressed_tensors")
    transform = hadamard("llama", tmp_path, key=False, down=8)
    path, out = write_fitted(tmp_path, "llama", Scheme(), transform), tmp_path / "out"
    assert export(monkeypatch, path, "--out", out, *KINDS[kind]) == 0
    by_class = transformers.LlamaForCausalLM.from_pretrained
    assert "no file named model.safetensors" in refused(by_class, out)
    said = refused(transformers.AutoModelForCausalLM.from_pretrained, out)
    assert ("qrot_torch" if kind == "torch" else "no file named model.safetensors") in said
    said = refused(load, str(out))  # qrot itself
    assert ("QrotForCausalLM" if kind == "torch" else "compressed-tensors") in said
    # What reads all *.safetensors of a folder, as vLLM does, meets nothing but weights.
    files = list(out.glob("*.safetensors"))
    assert {file.name for file in files} - {"rotations.safetensors"} == {"model.online.safetensors"}
    config = json.loads((out / "config.json").read_text())
    assert (config["model_type"] == "llama") == (kind == "compressed-tensors")
    transformers.AutoTokenizer.from_pretrained(out)


def test_the_module_finds_the_weights_in_shards(tmp_path):
    transform = hadamard("llama", tmp_path, key=False)
    path, out = write_fitted(tmp_path, "llama", Scheme(), transform), tmp_path / "out"
    with Stages(Console(quiet=True)) as stages:
        write(open_source(path), out, "torch", Options(shard=50_000), stages)
    assert len(list(out.glob("model-*.safetensors"))) > 2
    assert "no file named model.safetensors" in refused(
        transformers.LlamaForCausalLM.from_pretrained, out
    )
    expected = in_qrot(fused(tmp_path / "llama", transform))
    assert apart(logits(opened_by_module(out)), expected) < 1e-5


@pytest.fixture
def file(tmp_path):
    """A rotation file for weights that hold the rest, with shifts and clip ratios."""
    down = hadamard("llama", tmp_path).rotations["down"]
    file = tmp_path / "online.safetensors"
    transform = Transform(
        {"down": down}, shifts={"down": np.ones((3, 56))}, clips={"down": np.ones(3)}
    )
    grids = grids_by_layer(Scheme(activations=Grid(4)), 3)
    about = {"model": "m", "digest": "0", "grids": grids, "fused": True}
    save_rotations(file, transform, about)
    return file


def changed(file, change):
    """The same with its tensors and metadata changed by a function of both."""
    tensors = load_file(file)
    with safe_open(file, "np") as stored:
        metadata = {key: json.loads(text) for key, text in stored.metadata().items()}
    change(tensors, metadata)
    save_file(tensors, file, {key: json.dumps(value) for key, value in metadata.items()})
    return file


def rename(old, new):
    def change(tensors, metadata):
        tensors[new] = tensors.pop(old)

    return change


def put(name, value):
    def change(tensors, metadata):
        tensors[name] = np.full_like(tensors[name], value)

    return change


def forms(**more):
    return lambda tensors, metadata: metadata["forms"].update(more)


def grid(**more):
    return lambda tensors, metadata: metadata["grids"][0][2]["down"].update(more)


def site(change):
    return lambda tensors, metadata: change(metadata["grids"][0][2])


def layers(*bounds):
    def change(tensors, metadata):
        ((_, _, sites),) = metadata["grids"]
        metadata["grids"] = [(start, stop, sites) for start, stop in bounds]

    return change


DAMAGED = {
    "a tensor of another kind": (rename("clips.down", "biases.down"), "biases.down"),
    "an unknown site of a tensor": (rename("shifts.down", "shifts.mixer"), "shifts.mixer"),
    "an unknown part": (rename("rotations.down.factor0", "rotations.down.extra"), "down.extra"),
    "a rotation that weights hold": (rename("shifts.down", "rotations.residual.matrix"), "resid"),
    "scales that weights hold": (rename("shifts.down", "scales.down"), "scales.down"),
    "a form that is not known": (forms(down={"form": "butterfly"}), "down is"),
    "a rotation that is not known": (forms(mixer={"form": "dense"}), "mixer"),
    "a rotation without tensors": (forms(key={"form": "dense"}), "key"),
    "NaN": (put("shifts.down", np.nan), "shifts.down"),
    "infinity": (put("rotations.down.signs", np.inf), "rotations.down.signs"),
    "a stack of other layers": (layers((0, 4)), "down"),
    "layers that are missing": (layers((0, 1), (2, 3)), "layers"),
    "layers twice": (layers((0, 2), (1, 3)), "layers"),
    "a site more": (site(lambda sites: sites.update(mixer=sites["down"])), "the site mixer"),
    "a site less": (site(lambda sites: sites.pop("o")), "the site o"),
    "a setting of a grid": (grid(lattice="E8"), "lattice"),
    "a codebook": (grid(codebook="nf4"), "codebook nf4"),
    "another format": (lambda t, metadata: metadata.update(format="qrot rotations 5"), "format"),
    "not for these weights": (lambda t, metadata: metadata.update(fused=False), "belongs to"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_file_that_the_module_would_not_follow_is_refused(file, case):
    qt.State(file, fused=True)
    change, named = DAMAGED[case]
    with pytest.raises(ValueError, match=named):
        qt.State(changed(file, change), fused=True)


@pytest.mark.parametrize("setting", [{"kind": "codebook"}, {"granularity": "channel"}])
def test_a_grid_that_the_module_does_not_know_is_no_other_grid(setting):
    grid = {"bits": 4, "kind": "symmetric", "granularity": "token", "clip": 1.0, **setting}
    with pytest.raises(KeyError):
        qt.fake_quantise(torch.ones(2, 3), grid)


def fake(kind="llama", layers=3, hidden=48, intermediate=56, head_dim=12):
    """As much of a model as its sizes are told by."""
    config = SimpleNamespace(model_type=kind, hidden_size=hidden, intermediate_size=intermediate)
    layer = SimpleNamespace(self_attn=SimpleNamespace(head_dim=head_dim))
    return SimpleNamespace(config=config, model=SimpleNamespace(layers=[layer] * layers))


def test_models_that_a_file_is_not_for(file):
    state = qt.State(file, fused=True)
    qt._check_fit(fake(), state)
    for other in (fake("gemma2"), fake(layers=4), fake(intermediate=112)):
        with pytest.raises(ValueError, match="of another model"):
            qt.install(other, state)


@pytest.mark.parametrize("size", [0, 28])
def test_a_hadamard_matrix_without_its_factors_is_refused(file, size):
    def change(tensors, metadata):
        factor = tensors.pop("rotations.down.factor0")
        if size:
            tensors["rotations.down.factor0"] = np.ascontiguousarray(factor[:size, :size])

    state = qt.State(changed(file, change), fused=True)
    with pytest.raises(ValueError, match="down lacks a factor of its Hadamard matrix"):
        qt.install(fake(), state)


def test_weights_as_they_came_and_rotated_ones_are_told_apart(monkeypatch, tmp_path):
    transform = hadamard("llama", tmp_path)
    path, out = write_fitted(tmp_path, "llama", Scheme(), transform), tmp_path / "out"
    assert export(monkeypatch, path, "--out", out, "--format", "torch") == 0
    plain = opened(tmp_path / "llama")
    with pytest.raises(ValueError, match=r"use load\(folder\)"):
        qt.apply_rotations(plain, out / ONLINE)
    before = logits(plain, TOKENS)
    qt.apply_rotations(plain, out / "rotations.safetensors")
    assert apart(logits(plain, TOKENS), before) < 1e-5
    (out / ONLINE).write_bytes((out / "rotations.safetensors").read_bytes())
    with pytest.raises(ValueError, match="belongs to weights as they came"):
        qt.load(out)
