"""Attention to a packed cache, interpreted on the CPU: the kernels against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import BF16, F16, F32, RACES, TPU, ULP, gpu_interpreter, no_races, normal

from qrot.errors import InputError
from qrot.grid import Grid
from qrot.integers import dequantise, quantise
from qrot.kernels.dispatch import emulated
from qrot.kernels.kv4 import append, attend, empty_heads
from qrot.model.decode import decode_step, empty_cache
from qrot.network import fold, fuse
from qrot.quantize.pack import pack
from qrot.quantize.rtn import rtn
from qrot.rotation.random import random_rotations
from qrot.rotation.transform import Transform
from qrot.scheme import Scheme

pytestmark = pytest.mark.usefixtures("quick_compile")
LAYERS = 3

# first token, window, batch, length, heads, kv heads, head_dim, and the grids of keys and values.
CACHES = [
    (70, None, 2, 300, 6, 3, 16, Grid(4, "asymmetric"), Grid(4)),
    (590, 0, 1, 600, 4, 1, 32, Grid(8, "asymmetric"), Grid(4, "asymmetric", "token")),
    (580, 200, 2, 600, 4, 4, 8, Grid(3), Grid(7, "asymmetric")),
    (0, 5, 1, 7, 2, 2, 4, Grid(4), Grid(4)),
    (9, 3, 1, 40, 4, 2, 128, Grid(8, "asymmetric"), Grid(4, "asymmetric")),
]
# Odd numbers of heads, of which one program takes not all; runs of tokens that overlap at the end.
HOPPER_CACHES = [
    (70, None, 2, 100, 6, 3, 64, Grid(4, "asymmetric"), Grid(4)),
    (590, 200, 1, 600, 5, 1, 32, Grid(8, "asymmetric", "token"), Grid(4, "asymmetric", "token")),
    (63, 0, 1, 64, 2, 1, 256, Grid(3), Grid(4, "asymmetric")),
    (0, 5, 1, 300, 1, 1, 128, Grid(4), Grid(7, "asymmetric")),
]
RUNS = [
    ("pallas_tpu", case, *rest) for case in CACHES for rest in [(F32, None), (F32, 1), (BF16, 1)]
]
RUNS += [
    ("mosaic_gpu", case, *rest)
    for case, rest in zip(HOPPER_CACHES, [(F32, 1), (F32, None), (BF16, 1), (F16, 1)], strict=True)
]


def cache(first, batch, length, kv_heads, head_dim, grid, seed, layer=None):
    """A cache, of all layers where one is named, and in float64 what its tokens stand for."""
    new = quantise(normal(batch, first + 1, kv_heads, head_dim, seed=seed), grid)
    layers = () if layer is None else (LAYERS,)
    empty = empty_heads((*layers, batch, length, kv_heads, head_dim), grid)
    held = append(empty, new, (0, 0) if layer is None else (layer, 0, 0))
    # What stands where no token is yet, or in other layers, must not matter.
    own = np.zeros((*layers, batch, length), bool)
    own[(..., slice(first + 1)) if layer is None else (layer, ..., slice(first + 1))] = True

    def dirty(x):
        return jnp.where(own[..., None, None], x, 7 if x.dtype == jnp.int8 else np.nan)

    return jax.tree.map(dirty, held), np.asarray(dequantise(new), np.float64)


def interpreter(implementation):
    return True if implementation == "pallas_tpu" else gpu_interpreter()


@pytest.mark.parametrize(("implementation", "case", "dtype", "layer"), RUNS)
def test_attention_to_a_packed_cache(implementation, case, dtype, layer):
    first, window, batch, length, heads, kv_heads, head_dim, *grids = case
    q = normal(batch, 1, heads, head_dim, dtype=dtype, seed=5) * 3
    (keys, k), (values, v) = (
        cache(first, batch, length, kv_heads, head_dim, grid, i, layer)
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
    at = {"first": jnp.asarray(first), "layer": None if layer is None else jnp.asarray(layer)}
    with emulated(implementation, interpreter(implementation)):
        found = attend(q, keys, values, limit, implementation=implementation, **at)
    assert found.dtype == dtype
    size = np.abs(expected).max()
    atol = size * (3e-6 if dtype == F32 else 2 * ULP[dtype])
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, atol=atol)


def test_no_races():
    held = [cache(290, 2, 300, 2, 4, Grid(4, "asymmetric"), i)[0] for i in range(2)]
    with emulated("pallas_tpu", RACES):
        no_races(lambda: attend(normal(2, 1, 4, 4), *held, first=jnp.asarray(290), **TPU))


@pytest.mark.parametrize("implementation", ["pallas_tpu", "mosaic_gpu"])
def test_what_is_refused(implementation):
    interpret, first = interpreter(implementation), jnp.asarray(0)

    def held(length=64, head_dim=32, **options):
        return empty_heads((2, length, 2, head_dim), Grid(4, **options))

    q, values = normal(2, 1, 2, 32), normal(2, 64, 2, 32)
    cases = [
        (normal(2, 2, 2, 32), held(), "one new token"),
        (q, values, "both be integers"),
        (q, held(granularity="group", group=4), "groups within a head"),
    ]
    if implementation == "mosaic_gpu":
        cases += [
            (q, held(length=63), "fewer than 64"),
            (normal(2, 1, 2, 8), held(64, 8), "not of 8"),
        ]
    for q, keys, words in cases:
        with emulated(implementation, interpret):
            found = attend(q, keys, keys, first=first)
            expected = attend(q, keys, keys, first=first, implementation="xla")
            np.testing.assert_array_equal(found, expected)
            with pytest.raises(InputError, match=words):
                attend(q, keys, keys, first=first, implementation=implementation)


def logits_of(model, length, implementation):
    """Of the second token, through packed weights and cache: by XLA, emulated, and its program."""
    folded, grid = fold(model.network), Grid(4, "asymmetric")
    fused = fuse(folded, Transform(random_rotations(folded.config, seed=0)))
    scheme = Scheme(Grid(4), Grid(8, "asymmetric"), grid, grid)
    network = pack(rtn(fused.replace(scheme=scheme)))
    tokens = jnp.asarray([[5, 6], [8, 9]])

    @jax.jit
    def step(tokens, state):
        return decode_step(network, tokens, state)

    def logits():
        state = empty_cache(network, 2, length, packed=True)
        for i in range(2):
            out, state = step(tokens[:, i : i + 1], state)
        return out

    expected = logits()
    with emulated(implementation, interpreter(implementation)):
        step.clear_cache()  # it knows nothing of what is emulated
        state = empty_cache(network, 2, length, packed=True)
        program = str(step.trace(tokens[:, :1], state).jaxpr)
        found = logits()
    return expected, found, program


def test_a_model_on_the_kernels(variant):
    """The path that a user takes: tokens through packed weights and cache, as on a TPU."""
    expected, found, program = logits_of(variant("llama"), 4, "pallas_tpu")
    for name in ("fwht", "int4_matmul", "kv4"):
        assert f"name={name}" in program
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())


def test_a_model_on_hopper(variant, monkeypatch):
    interpreter("mosaic_gpu")  # which may skip
    from qrot.kernels.mosaic_gpu import kv4

    calls, attend = [], kv4.attend
    monkeypatch.setattr(kv4, "attend", lambda *a, **o: calls.append(o) or attend(*a, **o))
    model = variant("llama", head_dim=32, num_hidden_layers=2)
    expected, found, _ = logits_of(model, 64, "mosaic_gpu")
    assert calls
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())
