"""Kernels for Hopper GPUs, interpreted on the CPU against the references."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import BF16, F16, F32, ULP, gpu_interpreter, normal, same_as_dense

from qrot.errors import InputError
from qrot.grid import Grid
from qrot.integers import Quantised, dequantise, quantise
from qrot.kernels.dispatch import emulated
from qrot.kernels.fwht import fwht
from qrot.kernels.matmul import int4_matmul, int8_matmul
from qrot.kernels.pack import pack_int4
from qrot.kernels.rotate_quantize import rotate_quantize

pytestmark = pytest.mark.usefixtures("quick_compile")
GPU = {"implementation": "mosaic_gpu"}


@pytest.mark.parametrize(
    ("n", "block", "dtype"),
    [(1536, None, BF16), (1536, None, F16), (256, 64, F16), (2048, 1024, BF16)],
)
def test_fwht_on_hopper(n, block, dtype):
    with emulated("mosaic_gpu", gpu_interpreter()):
        same_as_dense(normal(2, 5, n, dtype=dtype), block, "mosaic_gpu")


# n, block, grid, signs, shift: rows of 128 each on its own; three tokens a tile of which 48 rows
# are used; groups of two rows of 128; blocks within such a row.
ROUNDED = [
    (128, None, Grid(8), True, True),
    (2048, None, Grid(4, "symmetric_half", clip=0.8), False, True),
    (1536, None, Grid(4, "asymmetric"), True, False),
    (1024, 512, Grid(8, "asymmetric", "group", 256), True, True),
    (768, 64, Grid(3, "asymmetric", "group", 128), False, False),
]


@pytest.mark.parametrize("case", ROUNDED)
def test_rotate_quantize_on_hopper(case):
    """To the bit what its own transform and `quantise` make of it, and close to the reference."""
    n, block, grid, flip, move = case
    dtype = F16 if n == 1024 else BF16
    x, draw = normal(2, 5, n, dtype=dtype, seed=n), np.random.default_rng(2)
    signs = jnp.asarray(draw.choice([-1.0, 1.0], n), F32) if flip else None
    shift = normal(n, seed=3) if move else None
    options = {"block": block, "signs": signs, "shift": shift}
    with emulated("mosaic_gpu", gpu_interpreter()):
        found = rotate_quantize(x, grid, **options, **GPU)
        turned = fwht(x if signs is None else x * signs.astype(dtype), block=block, **GPU)
    moved = turned if shift is None else turned - shift.astype(dtype)
    expected = quantise(moved, grid).replace(shift=shift)
    reference = rotate_quantize(x, grid, **options)
    assert jax.tree.structure(found) == jax.tree.structure(reference)
    for one, exact, other in zip(*map(jax.tree.leaves, (found, expected, reference)), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        np.testing.assert_array_equal(one, exact)
    assert np.mean(np.asarray(found.codes) != np.asarray(reference.codes)) < 0.03
    np.testing.assert_allclose(found.scale, reference.scale, rtol=2 * ULP[dtype])


def test_clipping_may_be_traced():
    x, grid = normal(3, 128, dtype=BF16), Grid(4, "asymmetric")

    def codes(ratio):
        return rotate_quantize(x, grid, clip=ratio).codes

    with emulated("mosaic_gpu", gpu_interpreter()):
        found = jax.jit(codes)(jnp.float32(0.5))
        turned = fwht(x, **GPU)
    np.testing.assert_array_equal(found, quantise(turned, grid, clip=0.5).codes)


@pytest.mark.parametrize("asymmetric", [False, True])
def test_int8_product_on_hopper(asymmetric):
    from jax.experimental import pallas

    interpreter = gpu_interpreter()
    if not hasattr(pallas.mosaic_gpu, "InterpretGPUParams"):
        pytest.skip("the interpreter of jax 0.10.2 has no transposed operands")
    draw = np.random.default_rng(4)
    weight = jnp.asarray(draw.integers(-128, 128, (1, 256, 128)), jnp.int8)
    scale = jnp.asarray(draw.uniform(0.5, 1, (1, 128)), F32)
    x = quantise(normal(130, 256), Grid(8, "asymmetric" if asymmetric else "symmetric"))
    sums = weight.sum(1, dtype=jnp.int32) if asymmetric else None
    with emulated("mosaic_gpu", interpreter):
        found = int8_matmul(x, weight, scale, sums, implementation="mosaic_gpu")
    expected = int8_matmul(x, weight, scale, sums, implementation="xla")
    np.testing.assert_allclose(found, expected, rtol=1e-6)


# tokens, groups, inputs of a group, outputs: nine steps shared among two thread blocks; a group is
# four steps; groups of 32, two and four of which are a step; two blocks of tokens and of outputs.
PRODUCTS = [(5, 1, 1152, 128), (1, 2, 512, 128), (17, 2, 32, 128), (3, 4, 32, 128)]
PRODUCTS += [(70, 2, 192, 256)]


@pytest.mark.parametrize("case", range(len(PRODUCTS)))
def test_int4_product_on_hopper(case):
    tokens, groups, size, out = PRODUCTS[case]
    draw = np.random.default_rng(3)
    codes = draw.integers(-8, 8, (groups, size, out))
    scale = draw.uniform(0.5, 1, (groups, out)).astype(np.float32)
    held = pack_int4(jnp.asarray(codes, jnp.int8), axis=1)
    wide = (codes * scale.astype(np.float64)[:, None]).reshape(-1, out)
    values = normal(tokens, groups * size)
    kinds = [
        (quantise(values, Grid(8, "asymmetric")), F32),
        (values, F32),
        (quantise(values, Grid(4, "symmetric", "tensor")), BF16),
        (values.astype(F16), F16),
        (values.astype(BF16), F32),
    ]
    x, dtype = kinds[case]
    with emulated("mosaic_gpu", gpu_interpreter()):
        found = int4_matmul(x, held, jnp.asarray(scale), None, dtype=dtype, **GPU)
    exact = np.asarray(dequantise(x) if isinstance(x, Quantised) else x, np.float64) @ wide
    assert (found.shape, found.dtype) == (exact.shape, dtype)
    error = np.abs(np.asarray(found, np.float64) - exact).max() / np.abs(exact).max()
    assert error < (5e-7 if dtype == F32 else ULP[dtype])


def test_int4_product_is_exact_on_hopper():
    """All nibbles by the largest codes: every digit of the sums is needed."""
    codes = jnp.tile(jnp.arange(-8, 8, dtype=jnp.int8)[:, None], (1, 128))[None]
    codes = jnp.concatenate([codes, jnp.full((1, 240, 128), -8, jnp.int8)], 1)
    x = Quantised(
        jnp.asarray(np.random.default_rng(0).choice([-128, 127, 126], (2, 256)), jnp.int8),
        jnp.ones((2, 1)),
        jnp.asarray([[-128], [127]], jnp.int8),
    )
    with emulated("mosaic_gpu", gpu_interpreter()):
        found = int4_matmul(x, pack_int4(codes, axis=1), jnp.ones((1, 128)), **GPU)
    steps = np.asarray(x.codes, np.int64) - np.asarray(x.zero, np.int64)
    np.testing.assert_array_equal(found, steps @ np.asarray(codes[0], np.int64))


def test_what_hopper_cannot_do_falls_back_unless_it_is_named():
    half = normal(2, 384, dtype=BF16)  # 128 s with a Hadamard matrix, but none of order s = 3
    packed, scale = jnp.ones((1, 64, 128), jnp.int8), jnp.ones((1, 128))
    values = normal(2, 128)
    calls = {
        "order 384": lambda **o: fwht(half, **o),
        "not float32": lambda **o: rotate_quantize(values, Grid(4), **o),
        "rows of 64": lambda **o: rotate_quantize(half[:, :64], Grid(4), **o),
        "takes two passes": lambda **o: rotate_quantize(
            half[:, :128], Grid(4, granularity="tensor"), **o
        ),
        "groups of 64": lambda **o: rotate_quantize(
            half[:, :128], Grid(4, "symmetric", "group", 64), **o
        ),
        "192 outputs": lambda **o: int4_matmul(
            values, jnp.ones((1, 64, 192), jnp.int8), jnp.ones((1, 192)), **o
        ),
        "groups of 24": lambda **o: int4_matmul(
            values[:, :24], packed[:, :12], scale, **o
        ),
        "4 tokens are fewer": lambda **o: int8_matmul(
            quantise(normal(4, 128), Grid(8)), jnp.ones((1, 128, 128), jnp.int8), scale, **o
        ),
    }  # fmt: skip
    with emulated("mosaic_gpu", gpu_interpreter()):
        for words, call in calls.items():
            with pytest.raises(InputError, match=words):
                call(**GPU)
            found, expected = call(), call(implementation="xla")
            for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
                np.testing.assert_allclose(
                    np.asarray(a, np.float32), np.asarray(b, np.float32), atol=1e-5, rtol=0.02
                )
