"""Kernels for TPU, interpreted on the CPU against the references; what all have in common."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from kernel_cases import (
    BF16,
    F16,
    F32,
    RACES,
    TPU,
    ULP,
    gpu_cases,
    gpu_interpreter,
    no_races,
    normal,
    same_as_dense,
    tpu_cases,
)

from qrot.errors import InputError
from qrot.grid import Grid
from qrot.hadamard.factors import hadamard_dense
from qrot.integers import Quantised, dequantise, quantise
from qrot.kernels.dispatch import choose, device_of, emulated
from qrot.kernels.fwht import fwht
from qrot.kernels.matmul import int4_matmul, int8_matmul
from qrot.kernels.pack import pack_int4
from qrot.kernels.rotate_quantize import rotate_quantize

pytestmark = pytest.mark.usefixtures("quick_compile")


# (n, block): one product, K = 36 and 172 in it; slabs with K = 12, 20, 28; slabs that rows of H
# share, K = 28, 44 and 172; blocks within a slab, over slabs, and each with butterflies.
SIZES = [(64, None), (576, None), (172, None), (512, None), (1536, None), (2560, None)]
SIZES += [(3584, None), (1408, None), (1792, None), (384, 12), (256, 64), (1024, 512)]


@pytest.mark.parametrize(
    ("n", "block", "dtype"),
    [(*size, F32) for size in SIZES] + [(*size, BF16) for size in SIZES[1::3]],
)
def test_fwht_on_tpu(n, block, dtype):
    with emulated("pallas_tpu"):
        same_as_dense(normal(2, 5, n, dtype=dtype), block, "pallas_tpu")


def test_fwht_on_tpu_with_a_large_core_and_many_rows():
    with emulated("pallas_tpu"):
        same_as_dense(normal(1, 5504), None, "pallas_tpu")
        same_as_dense(normal(3, 200, 128), None, "pallas_tpu")  # two blocks of rows, one not full


@pytest.mark.parametrize("implementation", ["pallas_tpu", "mosaic_gpu"])
def test_the_derivative_is_by_the_transpose(implementation):
    x, n = normal(3, 1536, dtype=BF16), 1536
    dense = hadamard_dense(n)
    assert not np.array_equal(dense, dense.T)
    interpret = True if implementation == "pallas_tpu" else gpu_interpreter()
    with emulated(implementation, interpret):
        _, pull = jax.vjp(lambda x: fwht(x, implementation=implementation), x)
        found = pull(x)[0]
    expected = np.asarray(x, np.float64) @ dense.T
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, atol=0.02)


def whole_numbers(*shape, seed):
    """float32 whose transform is exact in any order of its sums: n is a power of 4."""
    return jnp.asarray(np.random.default_rng(seed).integers(-99, 100, shape), F32)


@pytest.mark.parametrize(
    ("grid", "block"),
    [
        (Grid(8), None),
        (Grid(4, "symmetric_half"), 256),
        (Grid(4, "asymmetric", clip=0.8), 64),
        (Grid(8, "asymmetric", "group", 512), None),
    ],
)
def test_rotate_quantize_on_tpu(grid, block):
    x, n = whole_numbers(3, 7, 1024, seed=1), 1024
    draw = np.random.default_rng(2)
    signs = jnp.asarray(draw.choice([-1.0, 1.0], n), F32)
    shift = jnp.asarray(draw.integers(-9, 10, n), F32)
    dense = hadamard_dense(n, block)
    moved = (np.asarray(x, np.float64) * np.asarray(signs)) @ dense - np.asarray(shift)
    expected = quantise(jnp.asarray(moved, F32), grid)
    with emulated("pallas_tpu"):
        found = rotate_quantize(x, grid, block=block, signs=signs, shift=shift, **TPU)
        plain = rotate_quantize(x, grid, block=block, clip=jnp.float32(0.5), **TPU)
    reference = rotate_quantize(x, grid, block=block, signs=signs, shift=shift)
    for one in (found, reference):
        np.testing.assert_array_equal(one.codes, expected.codes)
        np.testing.assert_allclose(one.scale, expected.scale, rtol=1e-6)
        assert (one.zero is None) == (expected.zero is None)
        if one.zero is not None:
            np.testing.assert_array_equal(one.zero, expected.zero)
        np.testing.assert_array_equal(one.shift, shift)
        assert [leaf.dtype for leaf in jax.tree.leaves(one)] == [
            leaf.dtype for leaf in jax.tree.leaves(reference)
        ]
    unmoved = quantise(jnp.asarray(np.asarray(x, np.float64) @ dense, F32), grid, clip=0.5)
    np.testing.assert_array_equal(plain.codes, unmoved.codes)


def test_rotate_quantize_of_half_precision():
    x = normal(40, 512, dtype=BF16)
    with emulated("pallas_tpu"):
        found = rotate_quantize(x, Grid(4, "asymmetric"), **TPU)
    reference = rotate_quantize(x, Grid(4, "asymmetric"))
    assert np.mean(np.asarray(found.codes) != np.asarray(reference.codes)) < 0.01
    np.testing.assert_allclose(found.scale, reference.scale, rtol=2e-2)


# tokens, groups, inputs of a group, outputs: odd ones, many groups a block, many blocks a group.
PRODUCTS = [(5, 1, 576, 200), (40, 3, 64, 640), (1, 1, 4352, 130)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shape", PRODUCTS)
def test_products_on_tpu(shape, packed):
    tokens, groups, size, out = shape
    draw = np.random.default_rng(3)
    weight = draw.integers(*((-8, 8) if packed else (-128, 128)), (groups, size, out))
    scale = draw.uniform(0.5, 1, (groups, out)).astype(np.float32)
    codes = jnp.asarray(weight, jnp.int8)
    held = pack_int4(codes, axis=1) if packed else codes
    product = int4_matmul if packed else int8_matmul
    sums = codes.sum(1, dtype=jnp.int32)
    values = normal(tokens, groups * size)
    wide = (weight * scale.astype(np.float64)[:, None]).reshape(-1, out)
    for x in [
        quantise(values, Grid(8, "asymmetric")),
        quantise(values, Grid(4, "symmetric", "tensor")),
        values,
        values.astype(BF16),
    ]:
        integers = isinstance(x, Quantised)
        dtype = F32 if integers else x.dtype
        with emulated("pallas_tpu"):
            found = product(x, held, jnp.asarray(scale), sums, dtype=dtype, **TPU)
        exact = np.asarray(dequantise(x) if integers else x, np.float64) @ wide
        assert found.dtype == dtype
        error = np.abs(np.asarray(found, np.float64) - exact).max() / np.abs(exact).max()
        assert error < (2e-6 if dtype == F32 else ULP[BF16])


def test_no_races():
    """Two cores; blocks that follow each other on the axis of the sum share what they add up."""
    x = quantise(normal(8, 4352), Grid(8, "asymmetric"))
    weight = jnp.ones((1, 4352, 640), jnp.int8)
    grid = Grid(4, "asymmetric")
    with emulated("pallas_tpu", RACES):
        for run in [
            lambda: fwht(normal(130, 1536), **TPU),
            lambda: rotate_quantize(normal(600, 256), grid, **TPU),
            lambda: int8_matmul(x, weight, jnp.ones((1, 640)), weight.sum(1, dtype=jnp.int32)),
        ]:
            no_races(run)


def test_what_is_not_available():
    x = normal(2, 512)
    for named, words in [
        ("triton", "'triton' is none of xla, pallas_tpu, mosaic_gpu"),
        ("pallas_tpu", "'pallas_tpu' of fwht is not available: the device is a CPU"),
        ("mosaic_gpu", "'mosaic_gpu' of fwht is not available: the device is a CPU"),
    ]:
        with pytest.raises(InputError, match=words):
            fwht(x, implementation=named)


def test_what_a_kernel_cannot_do_falls_back_unless_it_is_named():
    weight, scale = jnp.ones((1, 16, 8), jnp.int8), jnp.ones((1, 8))
    calls = {
        "float16": lambda **o: fwht(normal(2, 512, dtype=F16), **o),
        "sums of at most 256": lambda **o: fwht(normal(1, 2880), **o),
        "takes two passes": lambda **o: rotate_quantize(
            normal(2, 256), Grid(4, granularity="tensor"), **o
        ),
        "groups of 32": lambda **o: rotate_quantize(
            normal(2, 256), Grid(4, "symmetric", "group", 32), **o
        ),
        "not float16": lambda **o: int8_matmul(normal(2, 16), weight, scale, dtype=F16, **o),
    }
    with emulated("pallas_tpu"):
        for words, call in calls.items():
            expected, found = call(implementation="xla"), call()
            for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5)
            with pytest.raises(InputError, match=words):
                call(**TPU)


def test_a_block_that_does_not_divide_is_no_kernel():
    with emulated("pallas_tpu"):
        for call in (fwht, lambda x, block: rotate_quantize(x, Grid(4), block=block)):
            for block in (1536, 0):
                with pytest.raises(InputError, match=f"block={block} does not divide"):
                    call(normal(2, 2048), block=block)


class Device:
    def __init__(self, platform, capability=""):
        self.platform, self.compute_capability = platform, capability


def test_none_follows_the_device(monkeypatch):
    kernels = {"pallas_tpu": lambda: None, "mosaic_gpu": lambda: None}
    here = []
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: here)

    def chosen(implementation=None, refusals=kernels):
        """For arguments of which tracing says nothing."""
        found = []
        jax.make_jaxpr(lambda x: found.append(choose("it", implementation, refusals, x)))(1.0)
        return found[0]

    here[:] = [Device("cpu")]
    assert chosen() == "xla"
    here[:] = [Device("tpu")]
    assert chosen() == "pallas_tpu"
    assert chosen("xla") == "xla"
    pytest.importorskip("absl")
    here[:] = [Device("gpu", "9.0")]
    assert chosen() == "mosaic_gpu"
    assert chosen(refusals={"mosaic_gpu": lambda: "too odd"}) == "xla"
    with pytest.raises(InputError, match="not available: too odd"):
        chosen("mosaic_gpu", {"mosaic_gpu": lambda: "too odd"})
    for other in ("8.0", "10.0"):
        here[:] = [Device("gpu", other)]
        assert chosen() == "xla"


def test_the_device_is_that_of_the_arguments(monkeypatch):
    """On a machine whose default device is a TPU, what is on the CPU stays there."""
    cpu, tpu = jax.devices("cpu")[0], Device("tpu")
    x = normal(2, 4)
    monkeypatch.setattr(
        jax, "local_devices", lambda backend=None: [tpu if backend is None else cpu]
    )
    assert device_of(x) == device_of({"a": (None, x)}) == cpu
    assert device_of(jax.device_put(x, cpu)) == cpu
    assert device_of(None) is device_of(np.ones(3)) is tpu
    found = []
    kernels = {"pallas_tpu": lambda: None}

    def look(y, z=None):
        found.append(choose("it", None, kernels, (y, z)))
        return y

    look(x)  # concrete
    jax.make_jaxpr(look)(x)  # nothing is known of where it will run
    jax.make_jaxpr(lambda y: look(y, x))(x)  # but beside a constant that is here
    with jax.default_device(cpu):
        jax.make_jaxpr(look)(x)
    with jax.set_mesh(jax.make_mesh((1,), ("a",), devices=[cpu])):
        jax.make_jaxpr(look)(x)
    assert found == ["xla", "pallas_tpu", "xla", "xla", "xla"]


def test_nothing_asks_for_the_default_backend(monkeypatch):
    def refuse():
        raise AssertionError("the default backend is not where the arguments are")

    monkeypatch.setattr(jax, "default_backend", refuse)
    x = quantise(normal(1, 16), Grid(8))
    fwht(normal(2, 512))
    int8_matmul(x, jnp.ones((1, 16, 8), jnp.int8), jnp.ones((1, 8)))


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_kernels_lower_without_a_device(platform):
    cases = tpu_cases() if platform == "tpu" else gpu_cases()
    target = {"tpu": "tpu_custom_call", "cuda": "mosaic_gpu_v2"}[platform]
    for function, shapes in list(cases.values())[:: 6 if platform == "tpu" else 5]:
        exported = export.export(
            jax.jit(function),
            platforms=[platform],
            disabled_checks=[export.DisabledSafetyCheck.custom_call(target)],
        )(*shapes)
        assert target in exported.mlir_module()
