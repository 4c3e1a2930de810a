"""Kept networks: what comes back computes the same, and a file that is damaged is refused."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learned import ALL, put, some_clips, some_shifts
from safetensors import safe_open
from safetensors.numpy import save_file

from qrot.errors import InputError
from qrot.grid import Grid
from qrot.model.forward import forward
from qrot.network import fold, fuse
from qrot.quantize.awq import Awq, awq
from qrot.quantize.gptq import gptq
from qrot.quantize.keep import load_network, read_about, save_network
from qrot.quantize.pack import pack
from qrot.quantize.qat import Qat, qat
from qrot.quantize.quip import quip
from qrot.quantize.rtn import rtn
from qrot.quantize.slicegpt import cut
from qrot.rotation.forms import Dense
from qrot.rotation.random import random_rotations
from qrot.rotation.transform import Transform
from qrot.scheme import Override, Scheme
from qrot.sites import PROJECTIONS

pytestmark = pytest.mark.usefixtures("quick_compile")
ROWS = np.random.default_rng(7).integers(0, 97, (4, 12), np.int32)
A4 = Grid(4, "asymmetric")
W4A4KV4 = Scheme(Grid(4, clip="mse"), A4, A4, A4)
MIXED = (
    Override("layers.1.*", weights=8),
    Override("layers.2.up", weights=16),
    Override("*.down", weights=3, activations=8),
    Override("*.k", weights=12),
)
logits = jax.jit(forward)
ABOUT = {"model": "tiny", "seed": 3, "grids": [1, 2], "text": None}


def whole(model, scheme, names=ALL):
    """A network with everything on it, fused."""
    network, draw = fold(model.network), np.random.default_rng(1)
    transform = put(network, names).replace(
        shifts=some_shifts(network, draw), clips=some_clips(network, draw)
    )
    return fuse(network, transform).replace(scheme=scheme)


def again(path, network):
    """The network that comes back, which is the same in every value."""
    save_network(path, network, ABOUT)
    found, about = load_network(path)
    assert about == read_about(path) == ABOUT
    assert jax.tree.structure(found) == jax.tree.structure(network)
    for a, b in zip(*map(jax.tree.leaves, (found, network)), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    ours, theirs = (np.asarray(logits(x, jnp.asarray(ROWS))) for x in (found, network))
    np.testing.assert_array_equal(ours, theirs)
    return found


def stored(path):
    with safe_open(path, "numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("name", ["llama-biases", "llama-tied", "qwen3-biases", "mistral-window"])
def test_everything_that_a_network_has_comes_back(variant, tmp_path, name):
    """Biases, norms of q and k, windows; shifts, clips, scales and rotations, R4 online."""
    names = ALL if name == "llama-biases" else [n for n in ALL if n != "rotation down"]
    network = rtn(whole(variant(name), W4A4KV4, names))
    found = again(tmp_path / "network.safetensors", network)
    assert {*found.online.rotations} == {"key", "down"}
    assert len(found.online.shifts) == 4
    kinds = {key.rpartition(".")[2] for key in stored(tmp_path / "network.safetensors")}
    assert "int4" in kinds
    assert not kinds & {"int8", "weight"}
    ours, theirs = (pack(x).params.layers for x in (found, network))
    for a, b in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_model_that_is_not_folded(variant, tmp_path):
    network = variant("llama-tied").network
    assert again(tmp_path / "a", network).params.head is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "grid",
    [Grid(4), Grid(2, "symmetric_half", "group", 4, clip="mse"), Grid(8, granularity="tensor")],
    ids=lambda grid: grid.granularity,
)
def test_grids_and_dtypes(variant, tmp_path, dtype, grid):
    network = fold(variant("llama", dtype).network).replace(scheme=Scheme(grid))
    path = tmp_path / "network.safetensors"
    again(path, rtn(network))
    tensors = stored(path)
    assert not any(name.startswith("layers.") and name.endswith("weight") for name in tensors)
    codes = sum(x.nbytes for name, x in tensors.items() if name.endswith(("int4", "int8")))
    weights = sum(network.params.layers.linear(name).weight.size for name in PROJECTIONS)
    assert codes == weights // (1 if grid.bits == 8 else 2)


def test_bits_that_differ_from_layer_to_layer(variant, tmp_path):
    scheme = Scheme(Grid(4), A4, A4, A4, MIXED)
    network = rtn(fold(variant("llama").network).replace(scheme=scheme))
    path = tmp_path / "network.safetensors"
    assert again(path, network).scheme == scheme
    tensors = stored(path)
    np.testing.assert_array_equal(tensors["layers.up.widths"], [4, 8, 0])
    np.testing.assert_array_equal(tensors["layers.q.widths"], [4, 8, 4])
    np.testing.assert_array_equal(tensors["layers.down.widths"], [4, 4, 4])
    np.testing.assert_array_equal(tensors["layers.k.widths"], [0, 0, 0])  # 12 bits are values


def test_weights_on_an_asymmetric_grid_and_at_full_precision_are_values(variant, tmp_path):
    network = whole(variant("llama"), Scheme(Grid(4, "asymmetric"), A4, A4, A4))
    for some in (network, rtn(network)):
        again(tmp_path / "network.safetensors", some)
        assert "layers.q.weight" in stored(tmp_path / "network.safetensors")


def test_what_each_method_rounds(variant, tmp_path):
    network = fold(variant("llama-biases").network).replace(scheme=W4A4KV4)
    path = tmp_path / "network.safetensors"
    settings = Qat(steps=1, batch=2, length=12)
    for found in (
        gptq(network, ROWS),
        awq(network, ROWS, Awq(steps=4)),
        qat(network, ROWS, settings),
    ):
        again(path, found)
        assert "layers.q.int4" in stored(path)
    again(path, quip(network, ROWS))
    assert "layers.q.weight" in stored(path)


def test_a_network_that_slicegpt_has_cut(variant, tmp_path):
    network = fold(variant("qwen3-biases").network)
    rotation = random_rotations(network.config, 0)["residual"]
    fused = fuse(network, Transform({"residual": rotation}))
    smaller = cut(fused, 40).replace(scheme=W4A4KV4)
    found = again(tmp_path / "network.safetensors", rtn(smaller))
    assert found.config.hidden_size == 40
    assert found.config == smaller.config


def test_a_transform_that_is_not_fused(variant, tmp_path):
    network = fold(variant("llama").network)
    n = network.config.hidden_size
    some = Transform(
        {"residual": Dense(jnp.asarray(np.linalg.qr(np.ones((n, n)) + np.eye(n))[0], jnp.float32))},
        clips={"o": jnp.full(3, 0.9)},
    )
    again(tmp_path / "network.safetensors", network.replace(online=some, scheme=Scheme(Grid(), A4)))


def test_a_file_that_is_not_there_is_damaged_or_foreign(variant, tmp_path):
    network = rtn(fold(variant("llama").network).replace(scheme=Scheme(Grid(4))))
    path = tmp_path / "network.safetensors"
    save_network(path, network, ABOUT)
    with pytest.raises(InputError, match=r"other\.safetensors: no such network file"):
        load_network(tmp_path / "other.safetensors")
    good = path.read_bytes()
    tensors = stored(path)
    with safe_open(path, "numpy") as file:
        header = file.metadata()

    def refused(sentence, read=load_network):
        with pytest.raises(InputError) as error:
            read(path)
        assert str(error.value).startswith(f"{path}: {sentence}")
        assert "\n" not in str(error.value)

    for content in (good[:-100], good[: len(good) // 3], b"", b"\0" * 4096, b"PK" * 999):
        path.write_bytes(content)
        for read in (load_network, read_about):
            refused("not a readable network file", read)
    save_file({"a": np.zeros(3)}, path, {"format": "pt"})
    for read in (load_network, read_about):
        refused("not a", read)
    save_file({"a": np.zeros(3)}, path)
    refused("not a network file of qrot")

    for name in ("embed", "norm", "layers.q.scale", "layers.up.int4", "layers.v.widths"):
        save_file({key: x for key, x in tensors.items() if key != name}, path, header)
        refused("a damaged network file")
    save_file({**tensors, "layers.q.widths": np.array([4, 8, 4], np.int8)}, path, header)
    refused("a damaged network file")
    save_file({**tensors, "layers.up.int4": tensors["layers.up.int4"][:, :-2]}, path, header)
    refused("a damaged network file")
    save_file({**tensors, "more": np.zeros(3)}, path, header)
    refused("holds more")
    for key, value in {
        "config": {"hidden_size": 3},
        "scheme": {"weights": {"bits": 1}},
        "online": {"kind": "?", "forms": {}},
        "dtypes": {},
    }.items():
        save_file(tensors, path, {**header, key: json.dumps(value)})
        refused("")


def test_what_is_written_is_whole_or_not_there(variant, tmp_path):
    network = fold(variant("llama").network)
    path = tmp_path / "network.safetensors"
    with pytest.raises(TypeError):
        save_network(path, network, {"seed": object()})
    assert not list(tmp_path.iterdir())
