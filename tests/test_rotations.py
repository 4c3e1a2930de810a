"""Rotations: orthogonal, reproducible, invertible, and kept whole in a file."""

import json
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from qrot.errors import InputError
from qrot.rotation.random import RotationSites, random_rotations
from qrot.rotation.forms import (
    Clips,
    Hadamard,
    Kronecker,
    Learned,
    Rotations,
    Scales,
    Shifts,
    as_matrix,
    rotate,
    unrotate,
)
from qrot.rotation.store import load_rotations, save_rotations


@dataclass(frozen=True)
class Sizes:
    hidden_size: int = 48
    intermediate_size: int = 56
    num_hidden_layers: int = 3
    head_dim: int = 12


SIZES = Sizes()
WHERE = ("residual", "value", "key", "down")
BLOCKS = RotationSites(residual=12, value=4, key=4, down=28)
SITES = {"whole": RotationSites(), "blocks": BLOCKS}
kinds = pytest.mark.parametrize("kind", ["hadamard", "orthogonal", "identity"])
whole_and_blocks = pytest.mark.parametrize("sites", SITES)


def full(rotation):
    """As one dense matrix [..., n, n], whatever the form."""
    matrix = as_matrix(rotation)
    if isinstance(rotation, Hadamard) or matrix.ndim == 2:
        return matrix
    return block_diagonal(matrix)


def block_diagonal(blocks):
    count, b, _ = blocks.shape
    result = np.zeros((count * b, count * b))
    for i, block in enumerate(blocks):
        result[i * b : (i + 1) * b, i * b : (i + 1) * b] = block
    return result


def forms(rotations):
    """Every rotation of a model, the value rotations layer by layer."""
    values = [] if rotations.value is None else list(rotations.value)
    single = (rotations.residual, rotations.key, rotations.down)
    return [r for r in (*single, *values) if r is not None]


# Random rotations


@whole_and_blocks
@kinds
def test_they_are_orthogonal(kind, sites):
    rotations = random_rotations(SIZES, 0, kind=kind, sites=SITES[sites])
    shapes = [full(rotation).shape for rotation in forms(rotations)]
    assert shapes == [(48, 48), (12, 12), (56, 56), *[(12, 12)] * 3]
    for rotation in forms(rotations):
        matrix = full(rotation)
        np.testing.assert_allclose(matrix @ matrix.T, np.eye(len(matrix)), atol=1e-6)
    assert rotations.residual.dtype == rotations.value.dtype == jnp.float32
    assert isinstance(rotations.key, Hadamard)
    assert isinstance(rotations.down, Hadamard)


@kinds
def test_kinds_are_what_they_say(kind):
    rotations = random_rotations(SIZES, 0, kind=kind)
    for matrix in (full(rotations.residual), full(rotations.value[2])):
        n = len(matrix)
        flat = np.allclose(np.abs(matrix) * np.sqrt(n), 1, atol=1e-5)
        assert flat == (kind == "hadamard")
        assert np.array_equal(matrix, np.eye(n)) == (kind == "identity")


@kinds
def test_seeds(kind):
    once, again, other = (random_rotations(SIZES, seed, kind=kind) for seed in (3, 3, 4))
    for where in WHERE:
        a, b, c = (as_matrix(getattr(r, where)) for r in (once, again, other))
        np.testing.assert_array_equal(a, b)
        fixed = kind == "identity" and where in ("residual", "value")
        assert np.array_equal(a, c) == fixed
    layers = as_matrix(once.value)
    assert np.array_equal(layers[0], layers[1]) == (kind == "identity")


def test_haar_is_not_biased_by_the_signs_of_qr():
    """E[trace R] = 0; LAPACK's own R has a diagonal of one sign."""
    many = [random_rotations(Sizes(4, 4, 1, 4), seed, kind="orthogonal") for seed in range(200)]
    traces = [np.trace(as_matrix(rotations.residual)) for rotations in many]
    assert abs(np.mean(traces)) < 4 / np.sqrt(200)  # the variance of a trace is 1


@pytest.mark.parametrize("off", WHERE)
def test_sites_are_switched_off(off):
    rotations = random_rotations(SIZES, 0, sites=replace(RotationSites(), **{off: False}))
    assert [getattr(rotations, where) is None for where in WHERE] == [w == off for w in WHERE]


@pytest.mark.parametrize(
    ("sizes", "sites", "message"),
    [
        (SIZES, {"residual": 7}, "rotations.residual: a block of 7 does not divide 48"),
        (SIZES, {"down": 5}, "rotations.down: a block of 5 does not divide 56"),
        (SIZES, {"value": -4}, "rotations.value: a block of -4"),
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
    for rotation in forms(rotations):
        matrix = full(rotation)
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
    r = random_rotations(SIZES, 0).residual
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 48)), jnp.float32)
    gradient = jax.grad(lambda r: (rotate(x, r) ** 3).sum())(r)
    np.testing.assert_allclose(gradient, x.T @ (3 * (x @ r) ** 2), rtol=1e-3, atol=1e-3)


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
    rotations = random_rotations(SIZES, 5, sites=SITES[sites])
    save_rotations(path, Learned(rotations), META)
    learned, metadata = load_rotations(path, digest=META["digest"])
    same(learned, Learned(rotations))
    assert metadata == META
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_file_keeps_what_is_beside_and_what_is_off(tmp_path):
    path = tmp_path / "rotations.safetensors"
    rotations = random_rotations(SIZES, 5, sites=RotationSites(value=False, down=28))
    # A transposed array is not contiguous in memory.
    rotations = rotations.replace(residual=np.asarray(rotations.residual).T)
    learned = Learned(
        rotations,
        Shifts(qkv=jnp.ones((3, 48)), down=jnp.zeros((3, 56))),
        Clips(qkv=jnp.asarray([1.0, 0.9, 0.8]), values=jnp.ones(3)),
        Scales(keys=jnp.ones((3, 2, 4))),
    )
    save_rotations(path, learned, META)
    same(load_rotations(path)[0], learned)


def test_a_file_keeps_online_rotations_that_were_learned(tmp_path):
    path = tmp_path / "rotations.safetensors"
    draw = np.random.default_rng(0)
    arrays = [
        jnp.asarray(draw.normal(size=s), jnp.float32) for s in ((3, 56), (3, 7, 7), (3, 8, 8))
    ]
    learned = Learned(Rotations(key=jnp.ones((3, 2, 1, 8, 8)), down=Kronecker(*arrays)))
    save_rotations(path, learned, META)
    same(load_rotations(path)[0], learned)


def test_use_with_other_weights_warns(tmp_path):
    path = tmp_path / "rotations.safetensors"
    save_rotations(path, Learned(random_rotations(SIZES, 5)), META | {"trained_weight_bits": 16})
    load_rotations(path, weight_bits=16)
    with pytest.warns(
        UserWarning, match="learned with weights at 16 bits and is used .* at 4 bits"
    ):
        load_rotations(path, weight_bits=4)


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "rotations.safetensors"
    save_rotations(path, Learned(random_rotations(SIZES, 5)), META)
    return path


def test_a_file_for_another_model_is_refused(saved):
    with pytest.raises(InputError, match=r"fitted to tiny .0123456789abcdef., not to this model"):
        load_rotations(saved, digest="f" * 16)


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
        load_rotations(path, digest="f" * 16)


def test_rotations_are_a_pytree_with_named_leaves():
    rotations = Rotations(residual=jnp.eye(4), down=Hadamard(jnp.ones(8), 4))
    doubled = jax.tree.map(lambda x: 2 * x, rotations)
    assert doubled.down.block == 4
    np.testing.assert_array_equal(doubled.residual, 2 * np.eye(4))
