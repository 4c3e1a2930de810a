"""Rotations: orthogonal, reproducible, invertible, and kept whole in a file."""

import json
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rotation_files import identity
from safetensors.numpy import save_file

from qrot.errors import InputError
from qrot.hadamard.factors import hadamard_dense, hadamard_factors, hadamard_matrix
from qrot.rotation.forms import Blocks, Dense, Hadamard, Kronecker, rotate, unrotate
from qrot.rotation.random import RotationSites, random_rotations, stream
from qrot.rotation.store import FORMAT, load_rotations, save_rotations
from qrot.rotation.transform import Online, Transform


@dataclass(frozen=True)
class Sizes:
    hidden_size: int = 48
    intermediate_size: int = 56
    num_hidden_layers: int = 3
    head_dim: int = 12
    num_attention_heads: int = 4
    num_key_value_heads: int = 2


SIZES = Sizes()
WHERE = ("residual", "value", "key", "down")
BLOCKS = RotationSites(residual=12, value=4, key=4, down=28)
SITES = {"whole": RotationSites(), "blocks": BLOCKS}
kinds = pytest.mark.parametrize("kind", ["hadamard", "orthogonal", "identity"])
whole_and_blocks = pytest.mark.parametrize("sites", SITES)


def each(rotations):
    """Every rotation of a model, the value rotations layer by layer."""
    values = rotations.get("value")
    layers = [] if values is None else [at(values, i) for i in range(values.stack[0])]
    return [*(r for name, r in rotations.items() if name != "value"), *layers]


def at(rotation, i):
    return jax.tree.map(lambda x: x[i], rotation)


# Random rotations


@whole_and_blocks
@kinds
def test_they_are_orthogonal(kind, sites):
    rotations = random_rotations(SIZES, 0, kind=kind, sites=SITES[sites])
    shapes = [rotation.dense().shape for rotation in each(rotations)]
    assert shapes == [(48, 48), (12, 12), (56, 56), *[(12, 12)] * 3]
    for rotation in each(rotations):
        matrix = rotation.dense()
        np.testing.assert_allclose(matrix @ matrix.T, np.eye(len(matrix)), atol=1e-6)
    assert {x.dtype for x in jax.tree.leaves(rotations)} == {np.dtype(np.float32)}
    assert isinstance(rotations["residual"], Dense if sites == "whole" else Blocks)
    assert isinstance(rotations["key"], Hadamard)
    assert isinstance(rotations["down"], Hadamard)


@kinds
def test_kinds_are_what_they_say(kind):
    rotations = random_rotations(SIZES, 0, kind=kind)
    for matrix in (rotations["residual"].dense(), rotations["value"].dense()[2]):
        n = len(matrix)
        flat = np.allclose(np.abs(matrix) * np.sqrt(n), 1, atol=1e-5)
        assert flat == (kind == "hadamard")
        assert np.array_equal(matrix, np.eye(n)) == (kind == "identity")


@kinds
def test_seeds(kind):
    once, again, other = (random_rotations(SIZES, seed, kind=kind) for seed in (3, 3, 4))
    for where in WHERE:
        a, b, c = (rotations[where].dense() for rotations in (once, again, other))
        np.testing.assert_array_equal(a, b)
        fixed = kind == "identity" and where in ("residual", "value")
        assert np.array_equal(a, c) == fixed
    layers = once["value"].dense()
    assert np.array_equal(layers[0], layers[1]) == (kind == "identity")


def test_haar_is_not_biased_by_the_signs_of_qr():
    """E[trace R] = 0; LAPACK's own R has a diagonal of one sign."""
    many = [random_rotations(Sizes(4, 4, 1, 4), seed, kind="orthogonal") for seed in range(200)]
    traces = [np.trace(rotations["residual"].dense()) for rotations in many]
    assert abs(np.mean(traces)) < 4 / np.sqrt(200)  # the variance of a trace is 1


@pytest.mark.parametrize("off", WHERE)
def test_sites_are_switched_off(off):
    rotations = random_rotations(SIZES, 0, sites=replace(RotationSites(), **{off: False}))
    assert rotations.keys() == set(WHERE) - {off}


@pytest.mark.parametrize("off", WHERE)
@kinds
def test_a_site_that_is_off_leaves_the_others_as_they_are(kind, off):
    """Each draws from a stream of its own, so that differences between runs are paired."""
    whole = random_rotations(SIZES, 3, kind=kind)
    for other in (False, 4):
        some = random_rotations(SIZES, 3, kind=kind, sites=RotationSites(**{off: other}))
        for where in WHERE:
            if where != off:
                np.testing.assert_array_equal(some[where].dense(), whole[where].dense())


def test_streams_are_apart_from_each_other_and_from_that_of_the_seed():
    keys = [(), (0,), (0, 0), ("a",), ("b",), ("a", 0), (0, "a"), ("a", "b")]
    draws = [np.random.default_rng(5), *(stream(5, *key) for key in keys), stream(6, "a")]
    first = {tuple(draw.integers(0, 2**32, 4)) for draw in draws}
    assert len(first) == len(draws)
    np.testing.assert_array_equal(stream(5, "a", 1).random(3), stream(5, "a", 1).random(3))


@pytest.mark.parametrize(
    ("sizes", "sites", "message"),
    [
        (SIZES, {"residual": 7}, "rotations.residual: a block of 7 does not divide 48"),
        (SIZES, {"down": 5}, "rotations.down: a block of 5 does not divide 56"),
        (SIZES, {"value": -4}, "rotations.value: .* of -4"),
        (Sizes(hidden_size=54), {}, "54"),
        (Sizes(intermediate_size=54), {}, "54"),
        (SIZES, {"key": 6}, "6"),
    ],
)
def test_sizes_that_cannot_be_rotated(sizes, sites, message):
    with pytest.raises(InputError, match=message):
        random_rotations(sizes, 0, sites=RotationSites(**sites))


# Applying them


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@whole_and_blocks
@pytest.mark.parametrize("kind", ["hadamard", "orthogonal"])
def test_rotate_multiplies_by_the_matrix_and_unrotate_goes_back(kind, sites, dtype):
    rotations = random_rotations(SIZES, 1, kind=kind, sites=SITES[sites])
    tolerance = 1e-5 if dtype == jnp.float32 else 0.05
    for rotation in each(rotations):
        matrix = rotation.dense()
        assert not np.allclose(matrix, matrix.T, atol=1e-3)
        x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, len(matrix))), dtype)
        there, back = rotate(x, rotation), unrotate(x, rotation)
        assert there.dtype == back.dtype == dtype
        wide = np.asarray(x, np.float64)
        np.testing.assert_allclose(np.asarray(there, np.float64), wide @ matrix, atol=tolerance)
        np.testing.assert_allclose(np.asarray(back, np.float64), wide @ matrix.T, atol=tolerance)
        again = np.asarray(unrotate(there, rotation), np.float64)
        np.testing.assert_allclose(again, wide, atol=tolerance)


def test_none_is_no_rotation():
    x = jnp.ones(3)
    assert rotate(x, None) is x
    assert unrotate(x, None) is x


def test_a_gradient_flows_to_the_rotation():
    r = random_rotations(SIZES, 0)["residual"]
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 48)), jnp.float32)
    gradient = jax.grad(lambda r: (rotate(x, r) ** 3).sum())(r).matrix
    np.testing.assert_allclose(gradient, x.T @ (3 * (x @ r.matrix) ** 2), rtol=1e-3, atol=1e-3)


# Files

META = {"model": "tiny", "digest": "0123456789abcdef", "seed": 3, "scheme": {"bits": [4, None]}}


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype == jnp.float32
        np.testing.assert_array_equal(x, y)


@whole_and_blocks
def test_a_file_gives_back_what_was_saved(tmp_path, sites):
    path = tmp_path / "rotations.safetensors"
    transform = Transform(random_rotations(SIZES, 5, sites=SITES[sites]))
    save_rotations(path, transform, META)
    loaded, metadata = load_rotations(path, identity=identity(META["digest"]))
    same(loaded, transform)
    assert metadata == META
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_file_keeps_what_is_beside_and_what_is_off(tmp_path):
    path = tmp_path / "rotations.safetensors"
    rotations = random_rotations(SIZES, 5, sites=RotationSites(value=False, down=28))
    # A transposed array is not contiguous in memory.
    rotations["residual"] = Dense(np.asarray(rotations["residual"].matrix).T)
    transform = Transform(
        rotations,
        scales={"keys": jnp.ones((3, 2, 4))},
        shifts={"qkv": jnp.ones((3, 48)), "down": jnp.zeros((3, 56))},
        clips={"qkv": jnp.asarray([1.0, 0.9, 0.8]), "values": jnp.ones(3)},
    )
    save_rotations(path, transform, META)
    same(load_rotations(path)[0], transform)


def test_a_file_keeps_online_rotations_that_were_learned(tmp_path):
    path = tmp_path / "rotations.safetensors"
    key = Dense(jnp.asarray(orthogonal(3, 2, 8, 8)))
    transform = Transform({"key": key, "down": kronecker()})
    save_rotations(path, transform, META)
    same(load_rotations(path)[0], transform)


def test_a_file_holds_what_is_online_of_a_fused_network(tmp_path):
    path = tmp_path / "rotations.safetensors"
    rotations = {"down": Hadamard(jnp.ones(56), 28)}
    online = Online(rotations, {"o": jnp.ones((3, 48))}, {"o": jnp.ones(3)})
    save_rotations(path, online, META)
    same(load_rotations(path)[0], Transform(rotations, {}, online.shifts, online.clips))


def orthogonal(*shape):
    return np.linalg.qr(np.random.default_rng(0).normal(size=shape))[0].astype(np.float32)


def kronecker():
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (3, 56))
    parts = (np.float32(signs), orthogonal(3, 7, 7), orthogonal(3, 8, 8))
    return Kronecker(*map(jnp.asarray, parts))


# Files of before: name, tensor; what it has become; its block, where it was a Hadamard rotation.
OLDER = {
    "whole": ({"residual": (48, 48), "value": (3, 12, 12)}, (Dense, Dense)),
    "blocks": ({"residual": (4, 12, 12), "value": (3, 3, 4, 4)}, (Blocks, Blocks)),
    "by head": ({"value": (3, 2, 1, 12, 12), "key": (3, 2, 1, 12, 12)}, (Dense, Dense)),
    "blocks by head": ({"value": (3, 2, 3, 4, 4), "down": (3, 14, 4, 4)}, (Blocks, Blocks)),
}


def write_older(path, tensors, blocks, version):
    """As qrot wrote formats 2 and 3: a matrix has no name of its own."""
    header = {"format": f"qrot rotations {version}", "blocks": blocks, **META}
    metadata = {key: json.dumps(value) for key, value in header.items()}
    wide = {
        n: np.asarray(x, x.dtype if x.dtype == np.int8 else np.float32) for n, x in tensors.items()
    }
    save_file({name: np.ascontiguousarray(x) for name, x in wide.items()}, path, metadata)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("name", OLDER)
def test_a_file_of_before_is_read(tmp_path, name, version):
    path, scale = tmp_path / "older.safetensors", np.ones((3, 2, 6))
    shapes, kinds = OLDER[name]
    arrays = {where: orthogonal(*shape) for where, shape in shapes.items()}
    beside = {"shifts.qkv": np.ones((3, 48)), "clips.o": np.ones(3), "scales.keys": scale}
    named = {f"rotations.{where}": x for where, x in arrays.items()}
    write_older(path, named | beside, {}, version)
    transform, metadata = load_rotations(path, sizes=SIZES, identity=identity(META["digest"]))
    assert metadata == META
    assert list(transform.shifts) == ["qkv"]
    assert list(transform.clips) == ["o"]
    assert list(transform.scales) == ["keys"]
    for (where, x), kind in zip(arrays.items(), kinds, strict=True):
        rotation = transform.rotations[where]
        assert isinstance(rotation, kind)
        (found,) = jax.tree.leaves(rotation)
        np.testing.assert_array_equal(found, x.squeeze(2) if name == "by head" else x)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("block", [None, 28])
def test_signs_of_a_file_of_before_are_read(tmp_path, block, version):
    path, signs = tmp_path / "older.safetensors", np.random.default_rng(0).choice([-1.0, 1.0], 56)
    factors = [hadamard_matrix(n) for n in hadamard_factors(block or 56)]
    online = kronecker()
    tensors = {f"rotations.key.{part}": x for part, x in vars(online).items()}
    tensors["rotations.down.signs"] = signs
    if version == 3:
        tensors |= {f"rotations.down.factor{i}": x for i, x in enumerate(factors)}
    write_older(path, tensors, {"down": block, "key": None}, version)
    transform, _ = load_rotations(path)
    same(transform, Transform({"down": Hadamard(jnp.float32(signs), block), "key": online}))
    np.testing.assert_allclose(
        transform.rotations["down"].dense(), signs[:, None] * hadamard_dense(56, block)
    )
    if version == 3:
        tensors["rotations.down.factor0"] = np.rot90(factors[0])
        write_older(path, tensors, {"down": block, "key": None}, version)
        with pytest.raises(InputError, match="made with other Hadamard matrices"):
            load_rotations(path)


def write_new(path, tensors, forms):
    header = {"format": FORMAT, "forms": forms, **META}
    save_file(tensors, path, {key: json.dumps(value) for key, value in header.items()})


@pytest.mark.parametrize(
    ("tensors", "forms", "sentence"),
    [
        ({"weight": 3}, {}, "holds weight, which no rotation file has"),
        ({"rotations.down.signs": 8}, {}, "its tensors are not those of no rotation"),
        ({"clips.o": 3}, {"down": {"form": "dense"}}, "its tensors are not those of down"),
        ({"rotations.key.signs": 8}, {"key": {"form": "dense"}}, "the rotation key is of no form"),
        ({"rotations.key.signs": 8}, {"key": {"form": "givens"}}, "the rotation key is of no form"),
        ({"rotations.key.signs": 8}, {"key": {"form": "hadamard"}}, "key is of no form"),
    ],
)
def test_a_file_whose_tensors_are_others_is_refused(tmp_path, tensors, forms, sentence):
    path = tmp_path / "odd.safetensors"
    write_new(path, {name: np.ones(n, np.float32) for name, n in tensors.items()}, forms)
    with pytest.raises(InputError, match=f"{path}: .*{sentence}"):
        load_rotations(path)


def test_use_with_other_weights_warns(tmp_path):
    path = tmp_path / "rotations.safetensors"
    save_rotations(path, Transform(random_rotations(SIZES, 5)), META | {"trained_weight_bits": 16})
    load_rotations(path, weight_bits=16)
    with pytest.warns(
        UserWarning, match="learned with weights at 16 bits and is used .* at 4 bits"
    ):
        load_rotations(path, weight_bits=4)


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "rotations.safetensors"
    save_rotations(path, Transform(random_rotations(SIZES, 5)), META)
    return path


def test_a_file_for_another_model_is_refused(saved):
    with pytest.raises(
        InputError, match=r"fitted to tiny, not to this model .0123456789abcdef is not ffff"
    ):
        load_rotations(saved, identity=identity("f" * 16))


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, -1])
def test_a_truncated_file_is_refused(saved, keep):
    data = saved.read_bytes()
    saved.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    with pytest.raises(InputError, match=r"rotations.safetensors: not a readable rotation file"):
        load_rotations(saved)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InputError, match="absent: no such rotation file"):
        load_rotations(tmp_path / "absent")
    with pytest.raises(InputError, match="no such rotation file"):
        load_rotations(tmp_path)


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        {"format": "pt"},
        {"format": json.dumps("qrot rotations 99")},
        {"format": json.dumps("qrot rotations 1")},  # without the rest
    ],
)
def test_a_foreign_file_is_refused(tmp_path, metadata):
    path = tmp_path / "model.safetensors"
    save_file({"weight": np.ones(3, np.float32)}, path, metadata)
    with pytest.raises(InputError, match=r"model.safetensors: not a"):
        load_rotations(path, identity=identity("f" * 16))


def test_a_transform_is_a_pytree_with_named_leaves():
    transform = Transform({"residual": Dense(jnp.eye(4)), "down": Hadamard(jnp.ones(8), 4)})
    doubled = jax.tree.map(lambda x: 2 * x, transform)
    assert doubled.rotations["down"].block == 4
    np.testing.assert_array_equal(doubled.rotations["residual"].matrix, 2 * np.eye(4))
