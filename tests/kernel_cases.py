"""Kernels at the sizes of real models, to be lowered and compiled without a device; their tests'
own tools."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from qrot.grid import Grid
from qrot.hadamard.factors import hadamard_dense
from qrot.integers import Quantised
from qrot.kernels.fwht import fwht
from qrot.kernels.kv4 import empty_heads

F32, BF16, F16, I8, I32 = jnp.float32, jnp.bfloat16, jnp.float16, jnp.int8, jnp.int32
SHAPE = jax.ShapeDtypeStruct
ULP = {F32: 2.0**-23, BF16: 2.0**-8, F16: 2.0**-11}
TPU = {"implementation": "pallas_tpu"}
RACES = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)


def normal(*shape, dtype=F32, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def gpu_interpreter():
    pytest.importorskip("absl")
    from jax.experimental.pallas import mosaic_gpu

    if hasattr(mosaic_gpu, "InterpretGPUParams"):
        return mosaic_gpu.InterpretGPUParams()
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams()


def no_races(run):
    """With `RACES`: jax 0.12 raises, 0.10.2 keeps it to itself."""
    jax.block_until_ready(run())
    assert not getattr(interpret_pallas_call.races, "races_found", False)


def same_as_dense(x, block, implementation):
    """The transform, both ways, against the dense product in float64."""
    n, exact = x.shape[-1], np.asarray(x, np.float64)
    dense = hadamard_dense(n, block)
    for transpose, matrix in [(False, dense), (True, dense.T)]:
        found = fwht(x, block=block, transpose=transpose, implementation=implementation)
        assert (found.shape, found.dtype) == (x.shape, x.dtype)
        expected = exact @ matrix
        atol = (4 if x.dtype == F32 else 1) * np.abs(expected).max() * ULP[x.dtype.type]
        np.testing.assert_allclose(np.asarray(found, np.float64), expected, atol=atol)


def _fwht(kernel, rows, n, dtype, block=None):
    return partial(_no_options, kernel.fwht, block), (SHAPE((rows, n), dtype),)


def _no_options(function, block, x):
    return function(x, block, False)


def _rotated(kernel, rows, n, dtype, block, grid):
    return (
        lambda x, signs, shift: kernel.rotate_quantize(x, grid, block, 0.9, signs, shift),
        (SHAPE((rows, n), dtype), SHAPE((n,), F32), SHAPE((n,), F32)),
    )


def _product(kernel, tokens, groups, size, out, x, dtype, packed, options):
    """x: the dtype of the activations; 8-bit ones are asymmetric."""
    weight = SHAPE((groups, size // (1 + packed), out), I8)
    values = SHAPE((tokens, groups * size), x)
    beside = SHAPE((tokens, 1), F32), SHAPE((tokens, 1), I8)
    scales = SHAPE((groups, out), F32), SHAPE((groups, out), I32)
    return (
        lambda x, beside, weight, scales: kernel(
            Quantised(x, *beside) if x.dtype == I8 else x, weight, *scales, dtype, **options
        ),
        (values, beside, weight, scales),
    )


def _attend(kernel, batch, length, heads, kv_heads, head_dim, grid, dtype):
    """To one of the four layers of a cache."""

    def empty(*places):  # no container of shapes: its fields are checked
        return empty_heads((*places, kv_heads, head_dim), grid)

    tree = jax.tree.structure(empty(1))
    held = jax.eval_shape(lambda: jax.tree.leaves(empty(4, batch, length)))

    def attend(q, k, v, window, first, layer):
        keys, values = (jax.tree.unflatten(tree, x) for x in (k, v))
        return kernel.attend(q, keys, values, window, first=first, layer=layer)

    query, scalar = SHAPE((batch, 1, heads, head_dim), dtype), SHAPE((), I32)
    return attend, (query, held, held, scalar, scalar, scalar)


def tpu_cases():
    """name -> (function, shapes) for `pallas_tpu`."""
    from qrot.kernels.pallas_tpu import fwht, kv4, matmul, rotate_quantize

    cases = {}
    for n, block in [
        *[(n, None) for n in (64, 128, 576, 1536, 3584, 4096, 4864, 11008, 14336, 16384, 18944)],
        *[(896, 28), (512, 64), (1536, 192), (8192, 1024)],
    ]:
        for dtype in (F32, BF16):
            cases[f"fwht {n} in blocks of {block}, {dtype.__name__}"] = _fwht(
                fwht, 300, n, dtype, block
            )
    cases["fwht of 5 rows"] = _fwht(fwht, 5, 1024, F32)
    for n, block, grid in [
        (576, None, Grid(4, "symmetric_half")),
        (1536, None, Grid(4, "asymmetric")),
        (4096, None, Grid(8, "asymmetric", "group", 128, 0.9)),
        (11008, None, Grid(4, "asymmetric")),
        (512, 64, Grid(8)),
    ]:
        for dtype in (F32, BF16):
            cases[f"rotate_quantize {n}, {dtype.__name__}"] = _rotated(
                rotate_quantize, 300, n, dtype, block, grid
            )
    for packed in (False, True):
        for tokens, groups, size, out in [
            (512, 1, 4096, 4096),
            (1, 1, 576, 200),
            (16, 32, 128, 1536),
            (5, 12, 48, 576),
            (16, 1, 11008, 4096),
        ]:
            for x, dtype in [(I8, BF16), (F32, F32), (BF16, BF16)]:
                name = f"int{4 if packed else 8}_matmul [{tokens}, {groups} x {size}, {out}]"
                if size == 10944 and x == F32:
                    continue  # refused
                cases[f"{name} of {x.__name__}"] = _product(
                    matmul.product, tokens, groups, size, out, x, dtype, packed, {"packed": packed}
                )
    for dtype in (F32, BF16):
        for shape in [
            (2, 300, 9, 3, 64, Grid(4, "asymmetric")),
            (4, 4096, 32, 8, 128, Grid(4, "asymmetric")),
            (2, 200, 4, 1, 64, Grid(8, granularity="token")),
        ]:
            cases[f"kv4 {shape[:-1]}, {dtype.__name__}"] = _attend(kv4, *shape, dtype)
    return cases


def gpu_cases():
    """name -> (function, shapes) for `mosaic_gpu`, which needs absl-py."""
    pytest.importorskip("absl")
    from qrot.kernels.mosaic_gpu import fwht, int4_matmul, kv4, matmul, rotate_quantize

    cases = {}
    for dtype, shape in (
        [
            (BF16, (4, 4096, 32, 8, 128, Grid(4, "asymmetric"))),
            (F32, (2, 300, 9, 3, 64, Grid(4, "asymmetric"))),
            (F16, (1, 200, 4, 1, 64, Grid(8, granularity="token"))),
            (BF16, (1, 1000, 14, 2, 128, Grid(8, "asymmetric"))),
            (BF16, (1, 1000, 8, 1, 256, Grid(4))),
        ]
        if kv4.LOWERS
        else []
    ):
        cases[f"kv4 {shape[:-1]}, {dtype.__name__}"] = _attend(kv4, *shape, dtype)
    for n, block in [
        (128, None),
        (1536, None),
        (4096, None),
        (5120, None),
        (8192, None),
        (256, 64),
    ]:
        for dtype in (BF16, F16):
            name = f"fwht {n} in blocks of {block}, {dtype.__name__}"
            cases[name] = _fwht(fwht, 1000, n, dtype, block)
    for dtype in (F32, BF16):
        cases[f"int8_matmul to {dtype.__name__}"] = _product(
            matmul.int8_matmul, 1000, 1, 4096, 4096, I8, dtype, False, {}
        )
    for tokens, groups, size, out in [
        (1, 1, 4096, 4096),
        (5, 32, 128, 4096),
        (30, 86, 128, 4096),
        (16, 64, 32, 2048),
        (16, 1, 11008, 4096),
        (1000, 32, 128, 4096),
        (300, 1, 1536, 1536),
    ]:
        for x, dtype in [(I8, BF16), (F16, F16), (F32, F32)]:
            name = f"int4_matmul [{tokens}, {groups} x {size}, {out}] of {x.__name__}"
            cases[name] = _product(
                lambda x, weight, scale, _, dtype: int4_matmul.int4_matmul(
                    x, weight, scale, dtype
                ),
                tokens, groups, size, out, x, dtype, True, {},
            )  # fmt: skip
    for n, block, grid in [
        (128, None, Grid(8)),
        (1536, None, Grid(4, "asymmetric")),
        (4096, None, Grid(4, "symmetric_half")),
        (4096, None, Grid(8, "asymmetric", "group", 128)),
        (8192, 64, Grid(8, "asymmetric")),
    ]:
        for dtype in (BF16, F16):
            cases[f"rotate_quantize {n} to {grid}, {dtype.__name__}"] = _rotated(
                rotate_quantize, 1000, n, dtype, block, grid
            )
    cases["rotate_quantize, no signs, no shift"] = (
        lambda x: rotate_quantize.rotate_quantize(x, Grid(4), None, 1.0, None, None),
        (SHAPE((1000, 4096), BF16),),
    )
    return cases
