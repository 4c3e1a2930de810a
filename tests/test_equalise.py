"""Cross-layer equalisation: the paper's formula, equal ranges, and the same function."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrot.grid import Grid
from qrot.model.forward import forward
from qrot.network import fold_norms, fuse
from qrot.quantize.equalise import equalise
from qrot.quantize.rtn import rtn
from qrot.rotation.forms import Rotations, Scales
from qrot.scheme import Scheme

pytestmark = pytest.mark.usefixtures("quick_compile")
TOKENS = np.random.default_rng(7).integers(0, 97, (2, 16), np.int32)
FEW = ("llama-mha", "llama-biases", "qwen3-biases")


@partial(jax.jit, static_argnames="config")
def logits(params, config):
    return forward(params, jnp.asarray(TOKENS), config)


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


def equalised(model):
    scales = equalise(model.params, model.config)
    return fuse(model.params, Rotations(), model.config, None, scales)[0]


def ranges(params, config):
    """Of the channels between up and down, and between v and o: r1, r2 of each pair."""
    up, down, v, o = (
        np.abs(np.asarray(getattr(params.layers, name).weight)) for name in ("up", "down", "v", "o")
    )
    shape = (len(v), config.num_key_value_heads, config.head_dim)
    queries = config.num_attention_heads // config.num_key_value_heads
    read = np.zeros(shape)
    for head in range(config.num_attention_heads):  # one query head after the other
        rows = o[:, head * config.head_dim : (head + 1) * config.head_dim]
        read[:, head // queries] = np.maximum(read[:, head // queries], rows.max(2))
    return [(up.max(1), down.max(2)), (v.max(1).reshape(shape), read)]


@pytest.mark.parametrize("name", FEW)
def test_ranges_meet_and_the_function_stays(variant, name):
    model = fold_norms(variant(name, "float64"))
    params = equalised(model)
    before, after = logits(model.params, model.config), logits(params, model.config)
    np.testing.assert_allclose(after, before, atol=1e-12 * np.abs(before).max())

    pairs = zip(ranges(model.params, model.config), ranges(params, model.config), strict=True)
    for (r1, r2), (first, second) in pairs:
        assert np.abs(r1 / r2 - 1).max() > 0.1
        np.testing.assert_allclose(first, np.sqrt(r1 * r2), rtol=1e-12)
        np.testing.assert_allclose(second, np.sqrt(r1 * r2), rtol=1e-12)
    for same in ("q", "k", "gate"):
        a, b = (getattr(p.layers, same).weight for p in (params, model.params))
        np.testing.assert_array_equal(a, b)
    again = equalise(params, model.config)
    for logs in (again.down, again.values):
        np.testing.assert_allclose(logs, 0, atol=1e-12)
    assert (again.qkv, again.gate_up, again.keys) == (None, None, None)


def test_the_papers_formula(variant):
    model = fold_norms(variant("llama-mha", "float64"))
    params = equalised(model)
    for first, second in (("up", "down"), ("v", "o")):
        w1, w2, new1, new2 = (
            np.asarray(getattr(p.layers, n).weight[1])
            for p in (model.params, params)
            for n in (first, second)
        )
        r1, r2 = 2 * np.abs(w1).max(0), 2 * np.abs(w2).max(1)  # of symmetric grids
        s = np.sqrt(r1 * r2) / r2
        np.testing.assert_allclose(new1, w1 / s, rtol=1e-12)
        np.testing.assert_allclose(new2, s[:, None] * w2, rtol=1e-12)


def unequal(model):
    """The same network with badly scaled pairs."""
    draw, config = np.random.default_rng(3), model.config
    shape = (3, config.num_key_value_heads, config.head_dim)
    logs = Scales(
        down=jnp.asarray(2 * draw.standard_normal((3, config.intermediate_size))),
        values=jnp.asarray(2 * draw.standard_normal(shape)),
    )
    return model.replace(params=fuse(model.params, Rotations(), config, None, logs)[0])


@pytest.mark.parametrize("name", FEW)
def test_however_the_pairs_were_scaled_the_result_is_the_same(variant, name):
    model = fold_norms(variant(name, "float64"))
    both = equalised(model), equalised(unequal(model))
    for a, b in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-14)


def test_one_scale_for_a_weight_loses_far_less_after_it(variant):
    model = unequal(fold_norms(variant("llama-biases", "float64")))
    scheme = Scheme(weights=Grid(8, granularity="tensor"))
    before = logits(model.params, model.config)
    lost = [
        float(jnp.square(logits(rtn(params, scheme), model.config) - before).mean())
        for params in (model.params, equalised(model))
    ]
    assert lost[1] < 0.1 * lost[0]


def test_channels_that_are_off_are_left_alone(variant):
    model = fold_norms(variant("llama-biases", "float64"))
    layers = model.params.layers
    up, down = layers.up.weight.at[:, :, 3].set(0), layers.down.weight.at[:, 4].set(0)
    layers = layers.replace(up=layers.up.replace(weight=up), down=layers.down.replace(weight=down))
    scales = equalise(model.params.replace(layers=layers), model.config)
    assert (scales.down[:, 3:5] == 0).all()
    assert (scales.down[:, 5:] != 0).all()
