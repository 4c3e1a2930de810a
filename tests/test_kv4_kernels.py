"""Attention to a packed cache, interpreted on the CPU: the kernels against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_kernels import BF16, F32, RACES, TPU, ULP, no_races, normal

from qrot.errors import InputError
from qrot.grid import Grid, dequantise, quantise
from qrot.kernels.dispatch import emulated
from qrot.kernels.kv4 import append, attend, empty_heads
from qrot.model.decode import decode_step, empty_cache
from qrot.model.fuse import fold_norms, fuse
from qrot.quantize.pack import pack
from qrot.quantize.rtn import rtn
from qrot.rotation.random import random_rotations
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


@pytest.mark.parametrize("layer", [None, 1])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("case", CACHES)
def test_attention_to_a_packed_cache(case, dtype, layer):
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
    with emulated("pallas_tpu"):
        found = attend(q, keys, values, limit, **at, **TPU)
    assert found.dtype == dtype
    size = np.abs(expected).max()
    atol = size * (3e-6 if dtype == F32 else 2 * ULP[BF16])
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, atol=atol)


def test_no_races():
    held = [cache(290, 2, 300, 2, 4, Grid(4, "asymmetric"), i)[0] for i in range(2)]
    with emulated("pallas_tpu", RACES):
        no_races(lambda: attend(normal(2, 1, 4, 4), *held, first=jnp.asarray(290), **TPU))


def test_what_is_refused():
    values, first = normal(2, 3, 2, 8), jnp.asarray(0)
    groups = empty_heads((2, 3, 2, 8), Grid(4, granularity="group", group=4))
    held = empty_heads((2, 3, 2, 8), Grid(4))
    for q, keys, words in [
        (normal(2, 2, 2, 8), held, "one new token"),
        (normal(2, 1, 2, 8), values, "both be integers"),
        (normal(2, 1, 2, 8), groups, "groups within a head"),
    ]:
        with emulated("pallas_tpu"):
            found = attend(q, keys, values, first=first)
            expected = attend(q, keys, values, first=first, implementation="xla")
            np.testing.assert_array_equal(found, expected)
            with pytest.raises(InputError, match=words):
                attend(q, keys, held, first=first, **TPU)


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
