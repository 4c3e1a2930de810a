"""Kept networks that no loader may trust: one sentence each, whatever is wrong with them."""

import json
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from exports import export
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from learned import ALL, put, some_clips, some_shifts
from rotation_files import Text, read, write
from runs import quiet

from qrot.errors import InputError
from qrot.files.tensors import open_tensor_file
from qrot.grid import Grid
from qrot.network import fold, fuse
from qrot.quantize.keep import is_network, load_network, read_about, save_network
from qrot.quantize.rtn import rtn
from qrot.run.run import run
from qrot.scheme import Override, Scheme

A4 = Grid(4, "asymmetric")
MIXED = (Override("layers.1.*", weights=8), Override("layers.2.up", weights=16))
ABOUT = {"model": "tiny", "digest": "0" * 16, "row": "no rotation", "seed": None}
pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture(scope="module")
def network(variant):
    """Weights of 4 bits, 8 and values; biases, norms of q and k; rotations, shifts, clips."""
    network, draw = fold(variant("qwen3-biases").network), np.random.default_rng(1)
    names = [name for name in ALL if name != "rotation down"]
    transform = put(network, names).replace(
        shifts=some_shifts(network, draw), clips=some_clips(network, draw)
    )
    return rtn(fuse(network, transform).replace(scheme=Scheme(Grid(4), A4, A4, A4, MIXED)))


@pytest.fixture(scope="module")
def good(network, tmp_path_factory):
    """Tensors and values of the header of a file that is as it has to be."""
    path = tmp_path_factory.mktemp("good") / "network.safetensors"
    save_network(path, network, ABOUT)
    return read(path)


def refused(path, *words, model=None, read=load_network):
    with pytest.raises(InputError) as error:
        read(path) if model is None else read(path, model)
    sentence = str(error.value)
    assert sentence.startswith(f"{path}: ")
    assert sentence.isprintable()
    assert len(sentence) < len(str(path)) + 300
    assert all(word in sentence for word in words), sentence


def test_the_good_one_is_read(tmp_path, good):
    write(path := tmp_path / "network.safetensors", *good)
    found, about = load_network(path)
    assert about == ABOUT
    assert load_network(path, found.config)[1] == ABOUT
    assert is_network(path)
    kinds = {name.rpartition(".")[2] for name in good[0]}
    assert {"int4", "int8", "weight", "bias", "widths", "q_norm"} <= kinds


def filled(value, like="embed"):
    return lambda tensors: {like: np.full_like(tensors[like], value)}


def cut(name, *slices):
    return lambda tensors: {name: tensors[name][slices]}


def typed(name, dtype):
    return lambda tensors: {name: tensors[name].astype(dtype)}


def gone(name):
    return lambda tensors: {name: None}


Q, UP = "layers.q", "layers.up"
TENSORS = {
    "embed: nan": (filled(np.nan), "embed holds numbers that are not finite"),
    "head: inf": (filled(np.inf, "head"), "head holds numbers that are not finite"),
    "norm: nan": (filled(np.nan, "norm"), "norm holds numbers that are not finite"),
    "scale: nan": (filled(np.nan, f"{Q}.scale"), "layers.q.scale holds numbers that are not"),
    "scale: too large": (filled(3e38, f"{Q}.scale"), "layers.q holds numbers that are not finite"),
    "bias: nan": (filled(np.nan, f"{Q}.bias"), "layers.q.bias holds numbers that are not finite"),
    "values: nan": (filled(np.nan, f"{UP}.weight"), "layers.up holds numbers that are not finite"),
    "k_norm: inf": (filled(np.inf, "layers.k_norm"), "layers.k_norm holds numbers that are not"),
    "embed: few rows": (cut("embed", slice(90)), "embed has the shape [90, "),
    "head: few rows": (cut("head", slice(9)), "head has the shape [9, 97]"),
    "norm: a scalar": (cut("norm", 0), "norm has the shape []"),
    "codes: few layers": (cut(f"{UP}.int8", slice(0)), "layers.up.int8 has the shape [0, "),
    "codes: few columns": (cut(f"{UP}.int4", slice(None), slice(None), slice(3)), "up.int4 has"),
    "scale: few layers": (cut(f"{Q}.scale", slice(2)), "layers.q.scale has the shape [2, 1, "),
    "scale: no groups": (cut(f"{Q}.scale", slice(None), slice(0)), "q.scale has 0 groups"),
    "scale: a vector": (cut(f"{Q}.scale", 0, 0), "layers.q.scale has the shape"),
    "widths: few": (cut(f"{Q}.widths", slice(2)), "layers.q.widths has the shape [2]"),
    "widths: 5": (filled(5, f"{Q}.widths"), "layers.q.widths are [5, 5, 5]"),
    "widths: -1": (filled(-1, f"{Q}.widths"), "layers.q.widths are [-1, -1, -1]"),
    "widths: others": (filled(8, f"{Q}.widths"), "layers.q.int8 has the shape [1, "),
    "widths: floats": (typed(f"{Q}.widths", np.float32), "layers.q.widths has the dtype float32"),
    "codes: of uint8": (typed(f"{UP}.int4", np.uint8), "layers.up.int4 has the dtype uint8"),
    "values: float64": (
        typed(f"{UP}.weight", np.float64),
        "layers.up.weight has the dtype float64",
    ),
    "embed: integers": (typed("embed", np.int32), "embed has the dtype int32"),
    "norm: float64": (typed("norm", np.float64), "norm is in float64, which needs JAX_ENABLE_X64"),
    **{f"no {name}": (gone(name), f"{name} is missing") for name in ("embed", "head", "norm")},
    "no k_norm": (gone("layers.k_norm"), "layers.k_norm is missing"),
    "no scale": (gone(f"{Q}.scale"), "layers.q.weight is missing"),
    "no widths": (gone(f"{Q}.widths"), "layers.q.widths is missing"),
    "no codes": (gone(f"{UP}.int4"), "layers.up.int4 is missing"),
    "no values": (gone(f"{UP}.weight"), "layers.up.weight is missing"),
    "more": (lambda _: {"more": np.zeros(3)}, "holds more, which no network has"),
    "codes too many": (lambda t: {f"{Q}.weight": t["head"]}, "holds layers.q.weight, which no"),
    "escape codes": (lambda _: {"\x1b[31m": np.zeros(3)}, r"holds '\x1b[31m', which no"),
    "clips: nan": (filled(np.nan, "clips.o"), "clips.o holds numbers that are not finite"),
    "shifts: short": (cut("shifts.o", slice(None), slice(3)), "shifts.o has the shape [3, 3]"),
    "a rotation": (filled(0, "rotations.key.matrix"), "rotations.key.matrix is not orthogonal"),
    "signs": (filled(0.5, "rotations.down.signs"), "down.signs holds other numbers than 1"),
    "scales": (lambda _: {"scales.qkv": np.zeros((3, 48))}, "holds scales.qkv, which no"),
    "no rotation": (gone("rotations.key.matrix"), "its tensors are not those of"),
    "no factors": (gone("rotations.down.factor0"), "down comes without the factors of its"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_are_wrong(tmp_path, good, name):
    change, words = TENSORS[name]
    tensors = good[0] | change(good[0])
    left = {name: x for name, x in tensors.items() if x is not None}
    write(path := tmp_path / "network.safetensors", left, good[1])
    refused(path, words)


def inside(key, **changes):
    return lambda header: {key: header[key] | changes}


def config(**changes):
    return inside("config", **changes)


HEADERS = {
    "config: a list": (lambda _: {"config": []}, "header.config: "),
    "config: text": (config(hidden_size="48"), "header.config.hidden_size: "),
    "config: a fraction": (config(hidden_size=48.0), "header.config.hidden_size: "),
    "config: unknown": (config(is_causal=False), "header.config.is_causal: "),
    "config: hidden": (config(hidden_size=64), "has the shape [3, 48], not [3, 64]"),
    "config: layers": (config(num_hidden_layers=10**12), "has the shape [3, 48], not [10000000000"),
    "config: no layers": (config(num_hidden_layers=0), "num_hidden_layers is 0, which is no posit"),
    "config: negative": (config(vocab_size=-97), "vocab_size is -97, which is no positive number"),
    "config: kv heads": (config(num_key_value_heads=3), "num_key_value_heads is that of no model"),
    "config: head_dim": (config(head_dim=13), "head_dim is that of no model"),
    "config: eps": (config(rms_norm_eps=float("nan")), "rms_norm_eps is nan, which is no positive"),
    "config: theta": (config(rope_theta=0.0), "rope_theta is 0.0, which is no positive number"),
    "config: tied": (config(tie_word_embeddings=True), "holds head, which no network has"),
    "config: tied text": (config(tie_word_embeddings="false"), "config.tie_word_embeddings: "),
    "config: windows": (config(sliding_window=[4]), "sliding_window is that of no model"),
    "config: architecture": (config(architecture="gpt2"), "architecture is that of no model"),
    "config: another": (config(architecture="llama"), "_norm, which no network has"),
    "config: bos": (config(bos_token_id=97), "bos_token_id is that of no model"),
    "config: eos": (config(eos_token_ids=[-1]), "eos_token_ids is that of no model"),
    "config: rope": (config(rope_scaling={"kind": "yarn", "factor": 2.0}), "kind is that of no mo"),
    "config: factor": (config(rope_scaling={"kind": "linear", "factor": 0.0}), "factor is 0.0"),
    "scheme: text": (lambda _: {"scheme": "x"}, "header.scheme: "),
    "scheme: bits": (inside("scheme", weights={"bits": 1}), "bits: 1 is outside 2 to 16"),
    "scheme: unknown": (inside("scheme", evil=3), "header.scheme.evil: "),
    "scheme: clip": (inside("scheme", keys={"clip": float("nan")}), "clip: nan is outside 0 to 1"),
    "dtypes: none": (lambda _: {"dtypes": {}}, "says None of the dtype of layers.q"),
    "dtypes: a list": (lambda _: {"dtypes": []}, "header.dtypes: "),
    "dtypes: integers": (inside("dtypes", q="int8"), "says 'int8' of the dtype of layers.q"),
    "dtypes: no text": (inside("dtypes", q=[]), "header.dtypes.q: "),
    "online: kind": (inside("online", kind="?"), "header.online.kind: "),
    "online: forms": (inside("online", forms=[]), "header.online.forms: "),
    "online: a form": (inside("online", forms={"key": {}, "down": {}}), "is of no form"),
    "online: unknown": (inside("online", evil=1), "header.online.evil: "),
    "online: residual": (
        inside("online", forms={"residual": {"form": "dense"}}),
        "no rotation res",
    ),
    "about: null": (lambda _: {"about": None}, "damaged network file"),
    "about: digest": (inside("about", digest=3), "metadata.digest: "),
    "about: row": (inside("about", row=[]), "metadata.row: "),
    "about: bits": (inside("about", weight_bits="4"), "metadata.weight_bits: "),
    "unknown": (lambda _: {"evil": 3}, "header.evil: "),
    "no JSON": (lambda _: {"about": Text("{")}, "about in its header: not valid JSON"),
    "deep": (lambda _: {"about": Text("[" * 10**5)}, "about in its header: not valid JSON"),
    "a rotation file": (lambda _: {"format": "qrot rotations 4"}, "not a network file of qrot"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_that_are_wrong(tmp_path, good, name):
    change, words = HEADERS[name]
    write(path := tmp_path / "network.safetensors", good[0], good[1] | change(good[1]))
    refused(path, words)
    if name.startswith(("about", "no JSON", "deep", "a rotation")):
        refused(path, words, read=read_about)


@pytest.mark.parametrize("missing", ["config", "scheme", "dtypes", "online", "about"])
def test_headers_that_lack_something(tmp_path, good, missing):
    left = {key: x for key, x in good[1].items() if key != missing}
    write(path := tmp_path / "network.safetensors", good[0], left)
    refused(path, f"header.{missing}: Field required")


def test_values_beyond_the_dtype(tmp_path, good):
    """Integers times their scale, which bfloat16 cannot hold."""
    tensors, header = good
    scale = np.full_like(tensors[f"{Q}.scale"], 3.4e38 / 7)
    changes = {f"{Q}.scale": scale, f"{Q}.int4": np.full_like(tensors[f"{Q}.int4"], 0x77)}
    dtypes = {**header["dtypes"], "q": "bfloat16"}
    write(path := tmp_path / "n", tensors | changes, header | {"dtypes": dtypes})
    stored = open_tensor_file(path)[0]
    assert stored[f"{Q}.scale"].dtype != ml_dtypes.bfloat16
    refused(path)


def test_a_network_of_other_sizes_than_its_model(tmp_path, good):
    write(path := tmp_path / "network.safetensors", *good)
    own = load_network(path)[0].config
    refused(path, "has vocab_size 97, where the model has 96", model=replace(own, vocab_size=96))
    refused(path, "has architecture qwen3", model=replace(own, architecture="llama"))
    refused(path, "wider than the model", model=replace(own, hidden_size=40))


def test_none_is_exported_or_run(config, tmp_path, monkeypatch, capsys):
    """Before a run folder is there."""
    run(replace(config, methods=("no_rotation",)), quiet())
    path = Path(config.out) / "network.safetensors"
    tensors, header = read(path)
    write(path, tensors | {"norm": np.nan * tensors["norm"]}, header)
    assert export(monkeypatch, config.out, "--out", tmp_path / "out", "--format", "torch") == 2
    error = capsys.readouterr().err
    assert "norm holds numbers that are not finite" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()
    again = replace(config, methods=("saved",), saved=str(path), out=f"{config.out}-again")
    with pytest.raises(InputError, match="norm holds numbers that are not finite"):
        run(again, quiet())
    about = {key: x for key, x in header["about"].items() if key != "weight_bits"}
    write(path, tensors, header | {"about": about})
    with pytest.raises(InputError, match="says no weight_bits"):
        run(again, quiet())
    other = {**header["about"], "digest": "0" * 16}
    other.pop("fingerprint", None)  # which goes before the digest where it is there
    write(path, tensors, header | {"about": other})
    with pytest.raises(InputError, match="not to this model"):
        run(again, quiet())
    assert not Path(again.out).exists()


PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_every_mutation_is_read_or_one_sentence(tmp_path_factory, good, data):
    path = tmp_path_factory.getbasetemp() / "mutated network.safetensors"
    tensors, header = dict(good[0]), json.loads(json.dumps(good[1]))
    name = data.draw(st.sampled_from(sorted(tensors)))
    kind = data.draw(st.sampled_from(["value", "dtype", "shape", "drop", "key", "section"]))
    if kind == "value":
        x = np.array(tensors[name])
        drawn = data.draw(st.floats(width=16) if x.dtype.kind == "f" else st.integers(-128, 127))
        x.reshape(-1)[data.draw(st.integers(0, x.size - 1))] = drawn
        tensors[name] = x
    elif kind == "dtype":
        dtype = data.draw(st.sampled_from(["int8", "float16", "float64", "bool", "int32"]))
        tensors[name] = tensors[name].astype(dtype)
    elif kind == "shape":
        tensors[name] = tensors[name].reshape(-1)[: data.draw(st.integers(0, 99))]
    elif kind == "drop":
        tensors.pop(name)
    else:
        section = data.draw(st.sampled_from(sorted(header)))
        inner = header[section]
        if kind == "key" or not isinstance(inner, dict):
            header[section] = data.draw(PLAIN)
        else:
            inner[data.draw(st.sampled_from([*sorted(inner), "evil"]))] = data.draw(PLAIN)
    write(path, tensors, header)
    try:
        load_network(path)
    except InputError as error:
        sentence = str(error)
    else:
        return
    assert sentence.startswith(f"{path}: ")
    assert sentence.isprintable()
