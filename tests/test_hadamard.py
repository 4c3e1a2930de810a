"""Hadamard matrices of every order, and the fast transform against the dense product."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from hypothesis import given, settings
from hypothesis import strategies as st

from qrot.errors import InputError
from qrot.hadamard.constructions import supported
from qrot.hadamard.factors import hadamard_dense, hadamard_factors, hadamard_matrix
from qrot.kernels.fwht import fwht

UNKNOWN = {668, 716, 892}
# hidden and intermediate sizes of real models
MODEL_SIZES = [4864, 18944, 29568, 9728, 17408, 25600, 2880, 10944, 13696, 5632, 1536, 576, 896]
MODEL_SIZES += [172, 148, 76, 4096, 11008]
# Kronecker products, one factor alone, and odd parts whose matrices are not symmetric
SIZES = [1, 2, 12, 20, 28, 40, 64, 92, 172, 240, 576]


FWHT = jax.jit(fwht, static_argnames=("block", "transpose"))


def random(*shape, dtype=jnp.float32, seed=0):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


@pytest.mark.parametrize("start", range(4, 1025, 128))
def test_every_known_order_up_to_1024(start):
    for order in range(start, min(start + 128, 1025), 4):
        assert supported(order) == (order not in UNKNOWN)
        if order not in UNKNOWN:
            # Not through the module's own check.
            matrix = hadamard_matrix(order)
            assert matrix.dtype == np.int8
            assert matrix.shape == (order, order)
            assert np.all(np.abs(matrix) == 1)
            wide = matrix.astype(np.float32)
            assert np.array_equal(wide @ wide.T, np.diag(np.full(order, order, np.float32)))


# Above 1024, one by each stored table: T-sequences of length 5 times Williamson 61, and others.
@pytest.mark.parametrize("order", [1, 2, 1028, 1100, 1220, 1380, 1740])
def test_other_orders(order):
    matrix = hadamard_matrix(order).astype(np.float32)
    assert np.array_equal(matrix @ matrix.T, order * np.eye(order))


@pytest.mark.parametrize("order", [3, 6, 14, 22, 668, 1336, 0, -4])
def test_unsupported_orders(order):
    assert not supported(order)
    with pytest.raises(InputError):
        hadamard_matrix(order)


def test_matrix_is_cached_and_read_only():
    matrix = hadamard_matrix(28)
    assert matrix is hadamard_matrix(28)
    with pytest.raises(ValueError, match="read-only"):
        matrix[0, 0] = 0


@pytest.mark.parametrize("order", [2**k for k in range(11)])
def test_powers_of_two_are_sylvesters(order):
    np.testing.assert_array_equal(hadamard_matrix(order), scipy.linalg.hadamard(order))
    expected = scipy.linalg.hadamard(order) / np.sqrt(order)
    np.testing.assert_allclose(hadamard_dense(order), expected, rtol=1e-15)


@pytest.mark.parametrize("order", [12, 20, 28])
def test_some_orders_are_not_symmetric(order):
    assert not np.array_equal(hadamard_matrix(order), hadamard_matrix(order).T)


@pytest.mark.parametrize("n", MODEL_SIZES)
def test_model_sizes(n):
    factors = hadamard_factors(n)
    assert np.prod(factors) == n
    assert sum(factors) < 500
    x = random(2, n)
    y, back = jax.jit(lambda x: (y := fwht(x), fwht(y, transpose=True)))(x)
    np.testing.assert_allclose(np.linalg.norm(y, axis=1), np.linalg.norm(x, axis=1), rtol=1e-5)
    np.testing.assert_allclose(back, x, atol=1e-5)


@pytest.mark.parametrize(("n", "core"), [(1536, 12), (576, 36), (2432, 76)])
def test_the_cut_does_not_change_the_matrix(n, core):
    # H is H_K x Sylvester(n / K) for the smallest K, though the last K's factor may be larger.
    x = random(3, n)
    pairs = np.asarray(x, np.float64).reshape(3, core, n // core)
    sylvester = scipy.linalg.hadamard(n // core)
    expected = np.einsum("bij,ik,jl->bkl", pairs, hadamard_matrix(core), sylvester) / np.sqrt(n)
    np.testing.assert_allclose(fwht(x), expected.reshape(3, n), atol=2e-5)


@pytest.mark.parametrize("n", SIZES)
def test_equals_dense(n):
    x = random(3, 2, n)
    dense = hadamard_dense(n)
    np.testing.assert_allclose(dense @ dense.T, np.eye(n), atol=1e-12)
    y, transposed = jax.jit(lambda x: (fwht(x), fwht(x, transpose=True)))(x)
    assert y.shape == transposed.shape == x.shape
    np.testing.assert_allclose(y, np.asarray(x, np.float64) @ dense, atol=1e-5)
    np.testing.assert_allclose(transposed, np.asarray(x, np.float64) @ dense.T, atol=1e-5)


# Few shapes, since each is compiled; many values.
@settings(deadline=None, max_examples=40)
@given(
    n=st.sampled_from([2, 12, 20, 28, 64, 240]),
    shape=st.sampled_from([(1,), (2, 2), (0, 1)]),
    seed=st.integers(0, 2**31 - 1),
    scales=st.tuples(st.floats(-8, 8), st.floats(-8, 8)),
)
def test_inverse_norm_and_linearity(n, shape, seed, scales):
    *batch, blocks = shape
    values = np.random.default_rng(seed)
    x, z = (values.normal(size=(*batch, n * blocks)).astype(np.float32) for _ in range(2))

    def transform(x, transpose=False):
        return np.asarray(FWHT(x.astype(np.float32), block=n, transpose=transpose))

    y = transform(x)
    assert y.shape == x.shape
    np.testing.assert_allclose(transform(y, transpose=True), x, atol=1e-5)
    np.testing.assert_allclose(transform(transform(x, transpose=True)), x, atol=1e-5)
    norms = np.linalg.norm(x, axis=-1)
    np.testing.assert_allclose(np.linalg.norm(y, axis=-1), norms, rtol=1e-5)
    a, b = scales
    combined = transform(a * x + b * z)
    np.testing.assert_allclose(combined, a * y + b * transform(z), atol=1e-4)


@pytest.mark.parametrize("n", [12, 20, 28])
def test_transpose_is_another_transform(n):
    x = random(4, n)
    assert not np.allclose(fwht(x), fwht(x, transpose=True), atol=0.1)


@pytest.mark.parametrize(("n", "block"), [(96, 12), (60, 20), (1336, 8)])
def test_blocks(n, block):
    x = random(5, n)
    dense = hadamard_dense(n, block)
    assert np.count_nonzero(dense) == n * block
    np.testing.assert_allclose(dense[:block, :block], hadamard_dense(block))
    np.testing.assert_allclose(fwht(x, block=block), x @ dense, atol=1e-5)


@pytest.mark.parametrize("n", [20, 240])
def test_gradient(n):
    x, cotangent = random(3, n), random(3, n, seed=1)
    gradient = jax.grad(lambda x: jnp.sum(fwht(x) * cotangent))(x)
    np.testing.assert_allclose(gradient, cotangent @ hadamard_dense(n).T, atol=1e-5)
    np.testing.assert_allclose(gradient, fwht(cotangent, transpose=True), atol=1e-5)


def test_vmap_and_scan():
    x = random(4, 3, 40)
    np.testing.assert_allclose(jax.vmap(fwht)(x), fwht(x), atol=1e-6)
    scanned = jax.lax.scan(lambda carry, row: (carry, fwht(row)), 0, x)[1]
    np.testing.assert_allclose(scanned, fwht(x), atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 8e-3), ("float16", 1e-3)]
)
def test_dtypes(dtype, tolerance):
    x = random(8, 1536, dtype=dtype)
    y = fwht(x)
    assert y.dtype == dtype
    # One rounding of the result, and none in between.
    expected = np.asarray(x, np.float64) @ hadamard_dense(1536)
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, rtol=tolerance, atol=2e-6)


def test_float64():
    with jax.enable_x64(True):
        x = random(8, 1536, dtype=jnp.float64)
        y = fwht(x)
        assert y.dtype == jnp.float64
        np.testing.assert_allclose(y, x @ hadamard_dense(1536), atol=1e-13)


def test_no_large_constant_is_embedded():
    text = jax.jit(fwht).lower(jax.ShapeDtypeStruct((1, 16384), jnp.float32)).as_text()
    assert len(text) < 1_000_000


@pytest.mark.parametrize(
    ("n", "words"),
    [
        (14, "order 14.*multiple of 4.*block=2 "),
        (668, "order 668.*no construction.*block=4 "),
        (85504, "order 85504.*block=512 "),
        (9, "order 9.*no smaller block"),
        (0, "positive order, not 0"),
    ],
)
def test_error_names_the_largest_block(n, words):
    with pytest.raises(InputError, match=words):
        hadamard_factors(n)


def test_named_block_works():
    with pytest.raises(InputError, match="block=12 "):
        fwht(random(1, 2004))
    assert fwht(random(1, 2004), block=12).shape == (1, 2004)


def test_bad_arguments():
    x = random(2, 24)
    with pytest.raises(InputError, match="block=16 does not divide"):
        fwht(x, block=16)
    with pytest.raises(InputError, match="block=0"):
        hadamard_dense(24, 0)
    with pytest.raises(InputError, match="'pallas_tpu' of fwht is not available"):
        fwht(x, implementation="pallas_tpu")
    np.testing.assert_array_equal(fwht(x, implementation="xla"), fwht(x))


def test_one_large_value_is_spread_over_all():
    """1,024 normal values with one at 60: max|x| / |x| falls from 0.88 to 0.07."""
    before, after = [], []
    for seed in range(20):
        x = np.random.default_rng(seed).standard_normal(1024)
        x[seed] = 60
        with jax.enable_x64(True):
            y = np.asarray(FWHT(jnp.asarray(x)))
        np.testing.assert_allclose(np.linalg.norm(y), np.linalg.norm(x), rtol=1e-12)
        before.append(np.abs(x).max() / np.linalg.norm(x))
        after.append(np.abs(y).max() / np.linalg.norm(y))
    assert 0.85 < np.mean(before) < 0.90
    assert 0.06 < np.mean(after) < 0.10


@pytest.mark.parametrize("rows", [48, 61, 32])
def test_many_rows_are_taken_in_parts(monkeypatch, rows):
    module = sys.modules["qrot.kernels.fwht"]
    monkeypatch.setattr(module, "_CACHED", 320)
    assert module._rows_at_once(rows, 20) == {48: 16, 61: 61, 32: 16}[rows]
    x = np.random.default_rng(rows).normal(size=(2, rows // 2, 20) if rows % 2 == 0 else (rows, 20))
    jax.clear_caches()
    for transpose in (False, True):
        dense = hadamard_dense(20).T if transpose else hadamard_dense(20)
        found = fwht(jnp.asarray(x, jnp.float32), transpose=transpose)
        np.testing.assert_allclose(found, x @ dense, atol=1e-5)
        back = jax.grad(lambda v, t=transpose: (fwht(v, transpose=t) * x).sum())(jnp.asarray(x))
        np.testing.assert_allclose(back, x @ dense.T, atol=1e-5)
