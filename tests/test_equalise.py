"""Cross-layer equalisation: the paper's formula, equal ranges, and the same function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrot.grid import Grid
from qrot.model.forward import forward
from qrot.network import fold, fuse
from qrot.quantize.equalise import equalise
from qrot.quantize.rtn import rtn
from qrot.rotation.transform import Transform
from qrot.scheme import Scheme

pytestmark = pytest.mark.usefixtures("quick_compile")
TOKENS = np.random.default_rng(7).integers(0, 97, (2, 16), np.int32)
FEW = ("llama-mha", "llama-biases", "qwen3-biases")


@jax.jit
def _logits(network):
    return forward(network, jnp.asarray(TOKENS))


def logits(network):
    """Of the weights that it has, with nothing else rounded."""
    return _logits(network.replace(scheme=Scheme()))


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


def equalised(network):
    return fuse(network, equalise(network))


def weights(network, name):
    return np.asarray(network.params.layers.linear(name).weight)


def ranges(network):
    """Of the channels between up and down, and between v and o: r1, r2 of each pair."""
    config = network.config
    up, down, v, o = (np.abs(weights(network, name)) for name in ("up", "down", "v", "o"))
    shape = (len(v), config.num_key_value_heads, config.head_dim)
    queries = config.num_attention_heads // config.num_key_value_heads
    read = np.zeros(shape)
    for head in range(config.num_attention_heads):  # one query head after the other
        rows = o[:, head * config.head_dim : (head + 1) * config.head_dim]
        read[:, head // queries] = np.maximum(read[:, head // queries], rows.max(2))
    return [(up.max(1), down.max(2)), (v.max(1).reshape(shape), read)]


@pytest.mark.parametrize("name", FEW)
def test_ranges_meet_and_the_function_stays(variant, name):
    network = fold(variant(name, "float64").network)
    found = equalised(network)
    before, after = logits(network), logits(found)
    np.testing.assert_allclose(after, before, atol=1e-12 * np.abs(before).max())

    pairs = zip(ranges(network), ranges(found), strict=True)
    for (r1, r2), (first, second) in pairs:
        assert np.abs(r1 / r2 - 1).max() > 0.1
        np.testing.assert_allclose(first, np.sqrt(r1 * r2), rtol=1e-12)
        np.testing.assert_allclose(second, np.sqrt(r1 * r2), rtol=1e-12)
    for same in ("q", "k", "gate"):
        np.testing.assert_array_equal(weights(found, same), weights(network, same))
    again = equalise(found)
    assert {*again.scales} == {"down", "values"}
    assert not jax.tree.leaves(again.replace(scales={}))
    for logs in again.scales.values():
        np.testing.assert_allclose(logs, 0, atol=1e-12)


def test_the_papers_formula(variant):
    network = fold(variant("llama-mha", "float64").network)
    found = equalised(network)
    for first, second in (("up", "down"), ("v", "o")):
        w1, w2, new1, new2 = (
            weights(each, name)[1] for each in (network, found) for name in (first, second)
        )
        r1, r2 = 2 * np.abs(w1).max(0), 2 * np.abs(w2).max(1)  # of symmetric grids
        s = np.sqrt(r1 * r2) / r2
        np.testing.assert_allclose(new1, w1 / s, rtol=1e-12)
        np.testing.assert_allclose(new2, s[:, None] * w2, rtol=1e-12)


def unequal(network):
    """The same network with badly scaled pairs."""
    draw, config = np.random.default_rng(3), network.config
    shape = (3, config.num_key_value_heads, config.head_dim)
    logs = {
        "down": jnp.asarray(2 * draw.standard_normal((3, config.intermediate_size))),
        "values": jnp.asarray(2 * draw.standard_normal(shape)),
    }
    return fuse(network, Transform(scales=logs))


@pytest.mark.parametrize("name", FEW)
def test_however_the_pairs_were_scaled_the_result_is_the_same(variant, name):
    network = fold(variant(name, "float64").network)
    both = equalised(network), equalised(unequal(network))
    for a, b in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-14)


def test_one_scale_for_a_weight_loses_far_less_after_it(variant):
    network = unequal(fold(variant("llama-biases", "float64").network))
    scheme = Scheme(weights=Grid(8, granularity="tensor"))
    before = logits(network)
    lost = [
        float(jnp.square(logits(rtn(each.replace(scheme=scheme))) - before).mean())
        for each in (network, equalised(network))
    ]
    assert lost[1] < 0.1 * lost[0]


def test_channels_that_are_off_are_left_alone(variant):
    network = fold(variant("llama-biases", "float64").network)
    layers = network.params.layers
    up = jnp.asarray(layers.up.weight).at[:, :, 3].set(0)
    down = jnp.asarray(layers.down.weight).at[:, 4].set(0)
    layers = layers.replace(up=layers.up.replace(weight=up), down=layers.down.replace(weight=down))
    found = equalise(network.replace(params=network.params.replace(layers=layers))).scales["down"]
    assert (found[:, 3:5] == 0).all()
    assert (found[:, 5:] != 0).all()
