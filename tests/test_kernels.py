"""Kernels for TPU, interpreted on the CPU against the references; what all have in common."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from kernel_cases import (
    BF16,
    F16,
    F32,
    ULP,
    gpu_cases,
    gpu_interpreter,
    normal,
    same_as_dense,
    tpu_cases,
)

from qrot.errors import InputError
from qrot.grid import Grid, Quantised, dequantise, quantise
from qrot.kernels.dispatch import choose, emulated
from qrot.kernels.fwht import fwht, hadamard_dense
from qrot.kernels.kv4 import append, attend, empty_heads
from qrot.kernels.matmul import int4_matmul, int8_matmul
from qrot.kernels.pack import pack_int4
from qrot.kernels.rotate_quantize import rotate_quantize
from qrot.model.decode import decode_step, empty_cache
from qrot.model.fuse import fold_norms, fuse
from qrot.quantize.pack import pack
from qrot.quantize.rtn import rtn
from qrot.rotation.random import random_rotations
from qrot.scheme import Scheme

pytestmark = pytest.mark.usefixtures("quick_compile")
TPU = {"implementation": "pallas_tpu"}
RACES = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)


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


# first token, window, batch, length, heads, kv heads, head_dim, and the grids of keys and values.
CACHES = [
    (70, None, 2, 300, 6, 3, 16, Grid(4, "asymmetric"), Grid(4)),
    (590, 0, 1, 600, 4, 1, 32, Grid(8, "asymmetric"), Grid(4, "asymmetric", "token")),
    (580, 200, 2, 600, 4, 4, 8, Grid(3), Grid(7, "asymmetric")),
    (0, 5, 1, 7, 2, 2, 4, Grid(4), Grid(4)),
]


def cache(first, batch, length, kv_heads, head_dim, grid, seed):
    new = quantise(normal(batch, first + 1, kv_heads, head_dim, seed=seed), grid)
    empty = empty_heads((batch, length, kv_heads, head_dim), grid)
    held = append(empty, new, (0, 0))
    # What stands where no token is yet must not matter.
    dirty = jax.tree.map(
        lambda x: x.at[:, first + 1 :].set(7 if x.dtype == jnp.int8 else np.nan), held
    )
    return dirty, np.asarray(dequantise(new), np.float64)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("case", CACHES)
def test_attention_to_a_packed_cache_on_tpu(case, dtype):
    first, window, batch, length, heads, kv_heads, head_dim, *grids = case
    q = normal(batch, 1, heads, head_dim, dtype=dtype, seed=5) * 3
    (keys, k), (values, v) = (
        cache(first, batch, length, kv_heads, head_dim, grid, seed=i)
        for i, grid in enumerate(grids)
    )
    k, v = (np.repeat(x, heads // kv_heads, axis=2) for x in (k, v))
    scores = np.einsum("bhd,bshd->bhs", np.asarray(q[:, 0], np.float64), k) / np.sqrt(head_dim)
    if window:
        scores[..., : max(0, first + 1 - window)] = -np.inf
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    expected = np.einsum("bhs,bshd->bhd", shares, v).reshape(batch, 1, -1)
    limit = None if window is None else jnp.asarray(window)
    with emulated("pallas_tpu"):
        found = attend(q, keys, values, limit, first=jnp.asarray(first), **TPU)
    assert found.dtype == dtype
    size = np.abs(expected).max()
    atol = size * (3e-6 if dtype == F32 else 2 * ULP[BF16])
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, atol=atol)


def test_no_races():
    """Two cores; blocks that follow each other on the axis of the sum share what they add up."""
    x = quantise(normal(8, 4352), Grid(8, "asymmetric"))
    weight = jnp.ones((1, 4352, 640), jnp.int8)
    grid = Grid(4, "asymmetric")
    held = [cache(290, 2, 300, 2, 4, grid, seed=i)[0] for i in range(2)]
    with emulated("pallas_tpu", RACES):
        for run in [
            lambda: fwht(normal(130, 1536), **TPU),
            lambda: rotate_quantize(normal(600, 256), grid, **TPU),
            lambda: int8_matmul(x, weight, jnp.ones((1, 640)), weight.sum(1, dtype=jnp.int32)),
            lambda: attend(normal(2, 1, 4, 4), *held, first=jnp.asarray(290), **TPU),
        ]:
            jax.block_until_ready(run())
            # jax 0.12 raises, 0.10.2 keeps it to itself
            assert not getattr(interpret_pallas_call.races, "races_found", False)


def test_a_model_on_the_kernels(variant):
    """The path that a user takes: tokens through packed weights and cache, as on a TPU."""
    model, grid = fold_norms(variant("llama")), Grid(4, "asymmetric")
    scheme = Scheme(Grid(4), Grid(8, "asymmetric"), grid, grid)
    rotations = random_rotations(model.config, seed=0)
    params, online, _ = fuse(model.params, rotations, model.config)
    params = pack(rtn(params, scheme), params, scheme)
    tokens = jnp.asarray([[5, 6], [8, 9]])

    @jax.jit
    def step(tokens, state):
        options = {"rotations": online, "scheme": scheme}
        return decode_step(params, tokens, state, model.config, **options)

    def logits():
        state = empty_cache(model.config, 2, 4, packed=scheme)
        for i in range(2):
            out, state = step(tokens[:, i : i + 1], state)
        return out

    expected = logits()
    with emulated("pallas_tpu"):
        step.clear_cache()  # it knows nothing of what is emulated
        state = empty_cache(model.config, 2, 4, packed=scheme)
        program = str(step.trace(tokens[:, :1], state).jaxpr)
        found = logits()
    for name in ("fwht", "int4_matmul", "kv4"):
        assert f"name={name}" in program
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())


def test_what_is_not_available():
    x = normal(2, 512)
    for named, words in [
        ("triton", "'triton' is none of xla, pallas_tpu, mosaic_gpu"),
        ("pallas_tpu", "'pallas_tpu' of fwht is not available: the default device is a CPU"),
        ("mosaic_gpu", "'mosaic_gpu' of fwht is not available: the default device is a CPU"),
    ]:
        with pytest.raises(InputError, match=words):
            fwht(x, implementation=named)


def test_what_a_kernel_cannot_do_falls_back_unless_it_is_named():
    weight, scale = jnp.ones((1, 16, 8), jnp.int8), jnp.ones((1, 8))
    values = normal(2, 3, 2, 8)
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
        "one new token": lambda **o: attend(
            normal(2, 2, 2, 8), values, values, first=jnp.asarray(0), **o
        ),
        "both be integers": lambda **o: attend(
            normal(2, 1, 2, 8), values, values, first=jnp.asarray(0), **o
        ),
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


def test_none_follows_the_device(monkeypatch):
    class Device:
        compute_capability = "9.0"

    kernels = {"pallas_tpu": lambda: None, "mosaic_gpu": lambda: None}
    assert choose("it", None, kernels) == "xla"
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert choose("it", None, kernels) == "pallas_tpu"
    assert choose("it", "xla", kernels) == "xla"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [Device])
    pytest.importorskip("absl")
    assert choose("it", None, kernels) == "mosaic_gpu"
    assert choose("it", None, {"mosaic_gpu": lambda: "too odd"}) == "xla"
    with pytest.raises(InputError, match="not available: too odd"):
        choose("it", "mosaic_gpu", {"mosaic_gpu": lambda: "too odd"})
    for other in ("8.0", "10.0"):
        Device.compute_capability = other
        assert choose("it", None, kernels) == "xla"


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
