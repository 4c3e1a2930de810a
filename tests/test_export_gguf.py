"""GGUF files: what is written is read again, by qrot's reader and by transformers."""

import json

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from exports import W4A4KV4, apart, export, fused, in_qrot, save
from gguf import GGMLQuantizationType as Kind
from gguf_exports import G32, GGUF, TOKENS, by_gptq, in_run, model, only, rotated, stored
from hypothesis import given, settings
from hypothesis import strategies as st
from models import LLAMA3

from qrot.errors import InputError
from qrot.export import gguf_types
from qrot.export.content import to_nearest
from qrot.export.formats.gguf import llama_rotation, read_network, weights_only
from qrot.grid import Grid
from qrot.model.io.gguf_hadamard import contract, read_contract
from qrot.model.io.load import load as load_model
from qrot.quantize.rtn import rtn
from qrot.rotation.forms import Blocks, Hadamard
from qrot.rotation.transform import Online, Transform
from qrot.scheme import Override, Scheme, layer_schemes
from qrot.sites import PROJECTIONS

pytestmark = pytest.mark.usefixtures("quick_compile")


# Blocks


@st.composite
def rows(draw, low, high):
    """Integers, and a float16 scale for each 32 of them."""
    seed = draw(st.integers(0, 2**32 - 1))
    shape = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    random = np.random.default_rng(seed)
    codes = random.integers(low, high + 1, (shape[0], shape[1] * 32)).astype(np.float32)
    scale = random.normal(0, 10.0 ** random.integers(-3, 3), shape).astype(np.float16)
    return codes, scale.astype(np.float32)


@pytest.mark.parametrize("kind", gguf_types.HELD)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_integers_come_back(kind, data):
    codes, scale = data.draw(rows(*gguf_types.HELD[kind]))
    raw = gguf_types.blocks(codes, scale, kind)
    np.testing.assert_array_equal(gguf.dequantize(raw, kind), codes * np.repeat(scale, 32, axis=1))


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1])
@given(seed=st.integers(0, 2**32 - 1), spread=st.integers(-3, 2))
@settings(max_examples=40, deadline=None)
def test_rounded_to_nearest_is_the_packages_own(kind, seed, spread):
    """Bytes equal to `gguf.quants`, from the values that the network to compare with has."""
    random = np.random.default_rng(seed)
    weight = random.normal(0, 10.0**spread, (3, 64)).astype(np.float32)
    weight[0, :32] = 0
    expected = gguf.quantize(weight, kind)
    values = gguf_types.through(weight, kind)
    np.testing.assert_array_equal(values, gguf.dequantize(expected, kind))
    np.testing.assert_array_equal(gguf_types.through(values, kind), values)
    if kind not in gguf_types.HELD:
        np.testing.assert_array_equal(gguf_types.encoded(values, kind), expected)


@pytest.mark.parametrize("size", [1e-7, 1e7])
def test_a_scale_that_float16_has_not_is_refused(tmp_path, size):
    network = load_model(str(model(tmp_path, "llama"))).network
    layer = jax.tree.map(lambda x: x[:1] * size, network.params.layers)
    grids = layer_schemes(Scheme(G32), 3)[0]
    layer = to_nearest(layer, Online(), grids)
    with pytest.raises(InputError, match="no float16"):
        gguf_types.on_float16_scales(layer, Online(), grids)


# Whole files


NAMES = (
    "llama", "llama-tied", "llama-mha", "llama-head-dim", "llama-biases", "llama-rope-linear",
    "mistral", "qwen2", "qwen2-tied", "qwen3",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_float32_is_the_network(monkeypatch, tmp_path, name):
    """Rotated, its norms folded, its head its own: the function of the model."""
    folder, out = model(tmp_path, name), tmp_path / "out"
    path = save(folder, rotated(folder), W4A4KV4)
    assert export(monkeypatch, path, "--out", out, *GGUF, "--type", "f32") == 0
    network, original = read_network(only(out)), load_model(str(folder)).network
    assert apart(in_qrot(network, TOKENS), in_qrot(original, TOKENS)) < 1e-5
    assert (network.params.layers.attention_norm == 1).all()
    assert network.params.head is not None
    assert {out / "README.md", out / "qrot.json", only(out)} == {*out.iterdir()}
    assert json.loads((out / "qrot.json").read_text())["left_out"] == "R3, R4"


def test_llama_3s_frequencies(monkeypatch, tmp_path):
    scaling = {**LLAMA3, "original_max_position_embeddings": 8192}
    folder = model(tmp_path, "llama", rope_theta=500000.0, rope_scaling=scaling)
    out, path = tmp_path / "out", save(folder, rotated(folder), Scheme())
    assert export(monkeypatch, path, "--out", out, *GGUF, "--type", "f32", "--verify") == 0
    network, original = read_network(only(out)), load_model(str(folder)).network
    found, expected = network.config.rope_scaling, original.config.rope_scaling
    assert found.factor == pytest.approx(expected.factor)
    assert apart(in_qrot(network, TOKENS), in_qrot(original, TOKENS)) < 1e-5


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_transformers_reads_it(monkeypatch, tmp_path, name, kind):
    """An oracle that has never seen qrot's reader: permutation, names, biases, settings.

    It reads no biases of a llama, and no head_dim but the usual one of the architecture.
    """
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    usual = {"head_dim": 128} if name == "qwen3" else {}
    folder, out = model(tmp_path, name, **usual), tmp_path / "out"
    path = save(folder, rotated(folder), Scheme())
    assert export(monkeypatch, path, "--out", out, *GGUF, "--type", kind) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        out, gguf_file=only(out).name, dtype=torch.float32
    )
    with torch.no_grad():
        found = theirs.eval()(torch.tensor(TOKENS)).logits.numpy()
    assert apart(found, in_qrot(read_network(only(out)), TOKENS)) < 1e-5


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "q4_1", "f16", "bf16"])
def test_weights_are_the_packages_own(monkeypatch, tmp_path, kind, capsys):
    """Of each weight: what `gguf.quants` makes of it, and the network that was compared."""
    folder, out = model(tmp_path, "qwen2"), tmp_path / "out"
    transform = rotated(folder, down=32)
    path = save(folder, transform, W4A4KV4)
    assert export(monkeypatch, path, "--out", out, *GGUF, "--type", kind, "--verify") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "without R3, R4" in said
    assert "in the file, read again" in said
    whole = gguf_types.TYPES[kind]
    network = fused(folder, Transform({n: transform.rotations[n] for n in ("residual", "value")}))
    tensors = stored(only(out))
    for i in range(3):
        for ours, field in {"attn_q": "q", "attn_output": "o", "ffn_down": "down"}.items():
            tensor = tensors[f"blk.{i}.{ours}.weight"]
            weight = np.asarray(network.params.layers.linear(field).weight[i]).T
            assert tensor.tensor_type == whole.kind
            expected = gguf.quantize(np.ascontiguousarray(weight), whole.kind)
            found, expected = (np.asarray(x).view(np.uint8) for x in (tensor.data, expected))
            assert (found != expected).mean() < 1e-3  # layers are fused one at a time here
    assert tensors["token_embd.weight"].tensor_type == whole.ends
    assert tensors["output.weight"].tensor_type == whole.ends
    assert tensors["blk.0.attn_q.bias"].tensor_type == Kind.F32


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, None])
def test_judged_integers_are_what_is_written(monkeypatch, tmp_path, bits, group, capsys):
    """GPTQ's, with activations and cache left unrounded; only their scales are float16."""
    granularity = "channel" if group is None else "group"
    scheme = Scheme(Grid(bits, "symmetric", granularity, group), *[Grid(8)] * 3)
    folder, out = model(tmp_path, "llama", intermediate_size=128), tmp_path / "out"
    transform = rotated(folder, down=False)
    run, network = in_run(folder, transform, scheme, by_gptq, weights={"method": "gptq"})
    assert export(monkeypatch, run, "--out", out, *GGUF, "--verify") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "It has the weights of the network that was judged" in printed
    assert f"by GPTQ and not rounded again, at W{bits}A16KV16 in place of W{bits}A8KV8" in printed
    kind = Kind.Q4_0 if bits == 4 else Kind.Q8_0
    for name, field in {"attn_v": "v", "attn_output": "o", "ffn_down": "down"}.items():
        linear = network.params.layers.linear(field)
        for i in range(3):
            tensor = stored(only(out))[f"blk.{i}.{name}.weight"]
            assert tensor.tensor_type == kind
            codes, scale = (np.asarray(x).T for x in levels(linear.weight[i], linear.scale[i]))
            size = codes.shape[1] // scale.shape[1]
            written = np.repeat(scale.astype(np.float16).astype(np.float32), size, axis=1)
            found = gguf.dequantize(tensor.data, kind)
            np.testing.assert_array_equal(found, codes * written)
            moved = np.abs(found - np.asarray(linear.weight[i]).T)
            assert (moved <= 2**-11 * np.abs(found)).all()


def levels(weight, scale):
    steps = np.asarray(weight).reshape(len(scale), -1, scale.shape[1]) / np.asarray(scale)[:, None]
    return np.rint(steps).reshape(weight.shape), scale


def test_each_weight_has_the_type_of_its_bits(monkeypatch, tmp_path):
    overrides = (Override("layers.1.*", weights=8), Override("layers.2.up", weights=16))
    folder, out = model(tmp_path, "llama"), tmp_path / "out"
    scheme = Scheme(G32, overrides=overrides)
    run, network = in_run(folder, rotated(folder, down=False), scheme)
    assert export(monkeypatch, run, "--out", out, *GGUF, "--verify") == 0
    kinds = {name: tensor.tensor_type for name, tensor in stored(only(out)).items()}
    assert kinds["blk.0.ffn_up.weight"] == Kind.Q4_0
    assert kinds["blk.1.ffn_up.weight"] == Kind.Q8_0
    assert kinds["blk.2.ffn_up.weight"] == Kind.F32
    found = read_network(only(out)).params.layers.up.weight[2]
    np.testing.assert_array_equal(found, network.params.layers.up.weight[2])


@pytest.mark.parametrize("weights", [G32, Grid(4, clip="mse")])
def test_rotations_alone_are_rounded_on_the_runs_own_grid(monkeypatch, tmp_path, weights):
    """With --type that of llama.cpp's own, unless the run's has its blocks."""
    folder = model(tmp_path, "llama", intermediate_size=128)
    transform = rotated(folder, key=False, down=False)
    path = save(folder, transform, Scheme(weights))
    for name, more in {"own": (), "theirs": ("--type", "q4_0")}.items():
        assert export(monkeypatch, path, "--out", tmp_path / name, *GGUF, *more) == 0
    network = rtn(fused(folder, transform).replace(scheme=Scheme(weights)))
    own, theirs = (read_network(only(tmp_path / name)) for name in ("own", "theirs"))
    exact = network.params.layers.gate.weight
    assert apart(own.params.layers.gate.weight, exact) < 2**-10
    assert (apart(theirs.params.layers.gate.weight, exact) < 2**-10) == (weights == G32)
    said = (tmp_path / "own" / "README.md").read_text()
    assert "It is the network that was judged, built once more" in said


def test_another_type_than_that_of_the_judged_network(monkeypatch, tmp_path):
    """Another grid is rounded anew; f32 has the very values that were judged."""
    folder, transform = model(tmp_path, "llama"), None
    transform = rotated(folder, down=False)
    run, network = in_run(folder, transform, Scheme(G32), by_gptq, weights={"method": "rtn"})
    assert export(monkeypatch, run, "--out", tmp_path / "q8", *GGUF, "--type", "q8_0") == 0
    assert "weights rounded anew" in (tmp_path / "q8" / "README.md").read_text()
    assert export(monkeypatch, run, "--out", tmp_path / "f32", *GGUF, "--type", "f32") == 0
    read = read_network(only(tmp_path / "f32"))
    for name in PROJECTIONS:
        found, expected = (x.params.layers.linear(name).weight for x in (read, network))
        np.testing.assert_array_equal(found, expected)


# R4


def test_r4_online(monkeypatch, tmp_path, capsys):
    folder, out = model(tmp_path, "llama-biases"), tmp_path / "out"
    transform = rotated(folder, down=32)
    path = save(folder, transform, Scheme())
    arguments = ("--type", "f32", "--online", "--verify")
    assert export(monkeypatch, path, "--out", out, *GGUF, *arguments) == 0
    assert "without R3" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(InputError, match="read rotated inputs"):
        load_model(str(only(out)))  # which would take it for another model
    network = read_network(only(out))
    assert apart(in_qrot(network, TOKENS), in_qrot(load_model(str(folder)).network, TOKENS)) < 1e-5
    without = network.replace(online=network.online.replace(rotations={}))
    assert apart(in_qrot(without, TOKENS), in_qrot(network, TOKENS)) > 1e-2
    fields = gguf.GGUFReader(only(out)).fields
    assert fields["prism.hadamard.block_size"].contents() == 32
    assert fields["prism.hadamard.weight_names"].contents()[2] == "blk.2.ffn_down.weight"
    signs = np.asarray(transform.rotations["down"].signs)
    assert fields["prism.hadamard.sign_values"].contents() == signs.astype(int).tolist()


def test_the_transform_is_sylvesters():
    """As llama.cpp's contract says: signs, then a normalised Sylvester matrix in blocks."""
    sylvester = np.ones((1, 1))
    while len(sylvester) < 8:
        sylvester = np.kron(np.array([[1, 1], [1, -1]]), sylvester)
    x, signs = np.random.default_rng(0).normal(size=(5, 24)), np.tile([1.0, -1.0, -1.0], 8)
    expected = ((x * signs).reshape(5, 3, 8) @ sylvester / np.sqrt(8)).reshape(5, 24)
    found = Hadamard(jnp.asarray(signs), 8).apply(jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_contract_of_something_else_is_refused(tmp_path):
    config = load_model(str(model(tmp_path, "llama"))).network.config
    said = contract(Hadamard(jnp.ones(96), 32), 3)
    assert read_contract(said, config).block == 32
    for change in (
        {"version": 2},
        {"block_size": 24},
        {"sign_values": [2] * 96},
        {"sign_widths": [64]},
        {"weight_names": ["output.weight"]},
        {"inverse_weight_names": ["token_embd.weight"]},
    ):
        own = {f"prism.hadamard.{key}": value for key, value in change.items()}
        with pytest.raises(InputError, match="prism"):
            read_contract({**said, **own}, config)


@pytest.mark.parametrize(
    ("rotation", "message"),
    [
        (None, "have no R4"),
        (Blocks(jnp.eye(4)[None]), "not a learned one"),
        (Hadamard(jnp.ones((2, 8))), "one R4 for all layers"),
        (Hadamard(jnp.ones(96)), "a power of two, and R4 has 96"),
    ],
)
def test_r4_that_llama_cpp_has_not(rotation, message):
    with pytest.raises(InputError, match=message):
        llama_rotation(rotation)


def test_weights_only():
    overrides = (Override("*.down", weights=8, activations=8), Override("*.keys", keys=8))
    scheme = weights_only(Scheme(G32, Grid(4), Grid(4), Grid(4), overrides))
    assert scheme == Scheme(G32, overrides=(Override("*.down", weights=8),))


def test_a_number_that_float16_has_not():
    with pytest.raises(InputError, match="F16 cannot hold"):
        gguf_types.encoded(np.full((1, 32), 1e6, np.float32), Kind.F16)
    large = np.full((1, 32), 1e6, ml_dtypes.bfloat16).astype(np.float32)
    assert gguf_types.encoded(large, Kind.BF16).nbytes == 64
