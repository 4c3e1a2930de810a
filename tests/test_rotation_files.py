"""Rotation files as they come: nearly orthogonal, damaged, not files at all, at every command."""

import os
import stat
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from exports import export
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rotation_files import META, SIZES, everything, orthogonal, read, signs, write
from runs import quiet
from safetensors.numpy import save_file

from qrot.errors import InputError
from qrot.model.io.load import load
from qrot.network import fuse
from qrot.rotation.forms import Dense
from qrot.rotation.store import FORMAT, load_rotations, save_rotations
from qrot.rotation.transform import Transform
from qrot.run.run import run

R, Q = "rotations.residual.matrix", orthogonal(48, 48)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Tensors and values of the header of a file that is as it has to be."""
    path = tmp_path_factory.mktemp("good") / "rotations.safetensors"
    save_rotations(path, everything(), META)
    return read(path)


# What is nearly right, and what is right in another dtype


@pytest.mark.parametrize("error", [1e-8, 3e-7, 1e-5])
def test_what_is_nearly_orthogonal_is_brought_there(tmp_path, good, error):
    tensors, header = good
    symmetric = np.random.default_rng(5).uniform(-1, 1, (48, 48))
    exact = np.linalg.qr(np.random.default_rng(6).normal(size=(48, 48)))[0]
    near = exact + error / 2 * (symmetric + symmetric.T) @ exact / 4
    before = np.abs(near @ near.T - np.eye(48)).max()
    assert error / 4 < before < 4 * error
    write(path := tmp_path / "r.safetensors", tensors | {R: near}, header)
    found = np.asarray(load_rotations(path)[0].rotations["residual"].matrix)
    wide = found.astype(np.float64)
    assert np.abs(wide @ wide.T - np.eye(48)).max() < 1e-6
    if before < 1e-6:
        np.testing.assert_array_equal(found, near.astype(np.float32))
    else:
        assert np.abs(wide - exact).max() < 2 * error


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_other_floating_dtypes_of_a_permutation_are_read(tmp_path, good, dtype):
    tensors, header = good
    turned = np.eye(48)[np.random.default_rng(0).permutation(48)]
    write(path := tmp_path / "r.safetensors", tensors | {R: turned.astype(dtype)}, header)
    found = load_rotations(path)[0].rotations["residual"].matrix
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, turned)


def test_what_is_put_on_a_network_has_its_shapes(variant):
    """Whoever reads a file without the sizes of the model learns it here."""
    network = variant("llama").network
    for wrong in (
        Transform({"residual": Dense(jnp.eye(32))}),
        Transform({"value": Dense(jnp.stack([jnp.eye(12)] * 7))}),
        Transform(scales={"qkv": jnp.zeros((3, 56))}),
        Transform(clips={"o": jnp.ones(2)}),
    ):
        with pytest.raises(InputError, match=r"(and there are|this model needs)"):
            fuse(network, wrong)


# Files


def test_files_that_are_none(tmp_path, good):
    write(path := tmp_path / "good.safetensors", *good)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    bad = tmp_path / "bad.safetensors"
    for wrong in (
        b"",
        b"hello",
        content[:-1],
        content[: length // 2],
        (2**62).to_bytes(8, "little") + b"{}",
        (10**8).to_bytes(8, "little") + b"{",
        content[:8] + content[8:].replace(b"F32", b"F99", 1),
    ):
        bad.write_bytes(wrong)
        with pytest.raises(InputError, match=r"bad\.safetensors: not a readable rotation file"):
            load_rotations(bad)
    save_file({R: Q}, bad)
    with pytest.raises(InputError, match="not a rotation file of qrot"):
        load_rotations(bad)
    os.mkfifo(fifo := tmp_path / "fifo")
    for absent in (fifo, tmp_path, tmp_path / "absent", tmp_path / "good.safetensors" / "x"):
        with pytest.raises(InputError, match="no such rotation file"):
            load_rotations(absent)
    with pytest.raises(InputError, match="cannot be read"):
        load_rotations(tmp_path / ("x" * 5000))


def test_files_have_the_mode_of_others_and_equal_bytes(tmp_path):
    """Metadata in another order of keys aside, equal contents are equal bytes."""
    paths = [tmp_path / f"{i}.safetensors" for i in range(3)]
    old = os.umask(0o027)
    try:
        for path in paths:
            save_rotations(path, everything(), META)
    finally:
        os.umask(old)
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o640}
    assert len({path.read_bytes() for path in paths}) == 1


# The command line, and runs


WRONG = {
    "nan": {R: Q * np.nan},
    "zeros": {R: 0 * Q},
    "three times": {R: 3 * Q},
    "half a sign": {"rotations.key.signs": signs(12) / 2},
    "another size": {R: orthogonal(32, 32)},
    "another layer": {"clips.o": np.ones(4)},
    "another name": {"rotations.evil": Q},
}


@pytest.mark.parametrize("name", WRONG)
def test_none_is_exported(made, monkeypatch, tmp_path, capsys, name):
    path = made("llama", transform=everything())
    tensors, header = read(path)
    write(path, tensors | WRONG[name], header)
    assert export(monkeypatch, path, "--out", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert error.startswith(f"qrot: {path}: ")
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_scheme_of_another_kind_is_not_exported(made, monkeypatch, tmp_path, capsys):
    path = made("llama", transform=everything())
    tensors, header = read(path)
    for scheme in ({"weights": {"bits": 9999}}, {"weights": {"bits": 0}}, {"evil": 3}):
        write(path, tensors, header | {"scheme": scheme})
        assert export(monkeypatch, path, "--out", tmp_path / "out") == 2
        assert capsys.readouterr().err.count("\n") == 1
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["nan", "another layer"])
def test_none_is_run(config, good, name):
    tensors, header = good
    digest = load(config.model).digest
    path = Path(config.out + ".safetensors")
    write(path, tensors | WRONG[name], header | {"digest": digest})
    with pytest.raises(InputError, match=r"\.safetensors: "):
        run(replace(config, methods=("saved",), saved=str(path)), quiet())
    assert not Path(config.out).exists()


# Mutations


def loaded(path):
    """What is in a file; (None, a sentence) where it is refused."""
    try:
        return load_rotations(path, sizes=SIZES)
    except InputError as error:
        sentence = str(error)
    assert sentence.startswith(f"{path}: ")
    assert "\n" not in sentence
    return None, sentence


def changed_array(draw, x):
    """An array with something else about it."""
    kind = draw(st.sampled_from(["dtype", "shape", "value", "factor", "part", "axis"]))
    if kind == "dtype":
        return x.astype(draw(st.sampled_from(["int8", "int64", "float16", "float64", "bool"])))
    if kind == "shape":
        return x.reshape(-1)[: draw(st.integers(0, x.size))]
    if kind == "part":
        return x[: draw(st.integers(0, len(x)))] if x.ndim else x
    if kind == "axis":
        return x[None] if draw(st.booleans()) else x[0] if x.ndim and len(x) else x
    if kind == "factor":
        return x * draw(st.sampled_from([0.0, 0.5, -1.0, 3.0, 1 + 1e-6, 1e38]))
    x = np.array(x, np.float64)
    if not x.size:
        return x
    x.reshape(-1)[draw(st.integers(0, x.size - 1))] = draw(st.floats())
    return x


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


def mutated(draw, tensors, header):
    """Tensors and values of a header of which one or two are changed."""
    tensors, header = dict(tensors), dict(header)
    for _ in range(draw(st.integers(1, 2))):
        name = draw(st.sampled_from(sorted(tensors)))
        kind = draw(st.sampled_from(["array", "drop", "rename", "header", "section"]))
        if kind == "array":
            with np.errstate(all="ignore"):
                tensors[name] = changed_array(draw, tensors[name])
        elif kind == "drop" and len(tensors) > 1:
            tensors.pop(name)
        elif kind == "rename":
            other = draw(st.sampled_from([*tensors, "rotations.key.matrix", "clips.qkv", "x", "."]))
            tensors[other] = tensors.pop(name)
        elif kind == "header":
            header[draw(st.sampled_from(sorted(header)))] = draw(PLAIN)
        elif isinstance(header["forms"], dict):
            own = draw(st.sampled_from(["form", "block", "evil"]))
            where = draw(st.sampled_from(["residual", "value", "key", "down"]))
            about = header["forms"].get(where)
            about = about if isinstance(about, dict) else {}
            header["forms"] = header["forms"] | {where: about | {own: draw(PLAIN)}}
    return tensors, header


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_every_mutation_is_read_or_one_sentence(tmp_path_factory, good, data):
    path = tmp_path_factory.getbasetemp() / "mutated.safetensors"
    tensors, header = mutated(data.draw, *good)
    write(path, tensors, header)
    found, metadata = loaded(path)
    if found is None:
        return
    assert header["format"] == FORMAT
    assert metadata["digest"]
    for rotation in found.rotations.values():
        matrix = rotation.dense()
        apart = matrix @ np.swapaxes(matrix, -1, -2) - np.eye(rotation.size)
        assert np.abs(apart).max() < 1e-5
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_every_byte_that_is_changed_is_read_or_one_sentence(tmp_path_factory, good, data):
    path = tmp_path_factory.getbasetemp() / "bytes.safetensors"
    write(path, *good)
    content = bytearray(path.read_bytes())
    within = st.integers(0, 8 + int.from_bytes(content[:8], "little"))
    for place in data.draw(st.lists(within, min_size=1, max_size=4)):
        content[place] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    loaded(path)
