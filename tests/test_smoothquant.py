"""SmoothQuant: its formula, what it leaves as it was, and the alpha that the search takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qrot.calibrate.moments import outputs
from qrot.calibrate.walk import forwards
from qrot.errors import InputError
from qrot.grid import Grid
from qrot.model.forward import forward
from qrot.network import fold, fuse
from qrot.quantize.smoothquant import (
    ALPHAS,
    SMOOTHED,
    SmoothQuant,
    log_scales,
    relative_errors,
    smoothquant,
)
from qrot.scheme import Scheme
from qrot.sites import SITES

pytestmark = pytest.mark.usefixtures("quick_compile")
ROWS = np.random.default_rng(7).integers(0, 97, (3, 16), np.int32)
FEW = ("llama-biases", "qwen3-biases")
N = 12


def papers(largest, weights, alpha):
    """Equation 4 of the paper, with the clamps of the released code."""
    steepest = np.maximum(np.max([np.abs(w).max(1) for w in weights], axis=0), 1e-5)
    return np.maximum(largest**alpha / steepest ** (1 - alpha), 1e-5)


def problem(seed=0, tokens=40):
    """Inputs with channels of very unequal size, and two weights that read them."""
    draw = np.random.default_rng(seed)
    x = draw.standard_normal((tokens, N)) * np.exp(1.5 * draw.standard_normal(N))
    return x, [draw.standard_normal((N, n)) * np.exp(draw.standard_normal((N, 1))) for n in (5, 7)]


@given(st.integers(0, 2**31), st.floats(0, 1))
@settings(max_examples=30, deadline=None)
def test_the_papers_formula(seed, alpha):
    x, weights = problem(seed)
    largest = np.abs(x).max(0)
    with jax.enable_x64(True):
        found = log_scales(jnp.asarray(largest), [*map(jnp.asarray, weights)], alpha)
        factor = np.exp(np.asarray(found))
    np.testing.assert_allclose(1 / factor, papers(largest, weights, alpha), rtol=1e-12)
    for w in weights:
        np.testing.assert_allclose((x * factor) @ (w / factor[:, None]), x @ w, rtol=0, atol=1e-12
                                   * np.abs(x).max() * np.abs(w).max() * N)  # fmt: skip


@given(st.integers(0, 2**31))
@settings(max_examples=20, deadline=None)
def test_at_a_half_both_maxima_meet_at_their_geometric_mean(seed):
    x, weights = problem(seed)
    largest, steepest = np.abs(x).max(0), np.max([np.abs(w).max(1) for w in weights], axis=0)
    with jax.enable_x64(True):
        factor = np.exp(log_scales(jnp.asarray(largest), [*map(jnp.asarray, weights)], 0.5))
    mean = np.sqrt(largest * steepest)
    np.testing.assert_allclose(np.abs(x * factor).max(0), mean, rtol=1e-12)
    after = np.max([np.abs(w / factor[:, None]).max(1) for w in weights], axis=0)
    np.testing.assert_allclose(after, mean, rtol=1e-12)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_clamps(alpha):
    largest = np.array([0.0, 0.0, 3.0, 1e-12, 1e-12])
    weights = [np.array([[0.0], [2.0], [0.0], [1e9], [1e-7]])]
    with jax.enable_x64(True):
        found = 1 / np.exp(log_scales(jnp.asarray(largest), [jnp.asarray(weights[0])], alpha))
    assert np.isfinite(found).all()
    expected = {
        0.0: [1e5, 0.5, 1e5, 1e-5, 1e5],
        0.5: [1e-5, 1e-5, 3**0.5 / 1e-5**0.5, 1e-5, 1e-6 / 1e-5**0.5],
        1.0: [1e-5, 1e-5, 3.0, 1e-5, 1e-5],
    }[alpha]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@given(st.integers(0, 2**31), st.floats(0, 1))
@settings(max_examples=20, deadline=None)
def test_it_does_not_matter_where_the_norms_scale_is(seed, alpha):
    x, weights = problem(seed)
    norm = np.random.default_rng(seed).uniform(0.2, 3, N)
    largest = np.abs(x).max(0)
    with jax.enable_x64(True):
        before = log_scales(jnp.asarray(largest * norm), [*map(jnp.asarray, weights)], alpha)
        folded = [jnp.asarray(norm[:, None] * w) for w in weights]
        after = log_scales(jnp.asarray(largest), folded, alpha)
    np.testing.assert_allclose(np.asarray(before) + np.log(norm), after, atol=1e-12)


# Whole models


@jax.jit
def logits(network):
    return forward(network, jnp.asarray(ROWS))


def inputs(network):
    """Of each site what all tokens have there, [layers, tokens, width]."""
    found = []

    def look(place):
        (done,) = place.run(names=SMOOTHED, statistic=dict)
        found.append({site: np.asarray(x.reshape(-1, x.shape[-1])) for site, x in done[1].items()})
        return outputs(place)

    forwards(network, ROWS, look, batch=len(ROWS))
    return {site: np.stack([layer[site] for layer in found]) for site in SMOOTHED}


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def weights(network, name):
    return np.asarray(network.params.layers.linear(name).weight, np.float64)


def weights_of(network, layer, site):
    return [weights(network, name)[layer] for name in SITES[site].readers]


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("alpha", [0.5, 0.85])
def test_a_model_stays_the_same_function(variant, x64, name, alpha):
    network, done = fold(variant(name, "float64").network), []
    settings = SmoothQuant(alpha)
    transform, used = smoothquant(network, ROWS, settings, advance=lambda: done.append(1))
    assert (used, len(done)) == (alpha, 3)
    assert {*transform.scales} == {"qkv", "gate_up"}
    assert not jax.tree.leaves(transform.replace(scales={}))
    seen = inputs(network)
    for site in SMOOTHED:
        for i in range(3):
            largest = np.abs(seen[site][i]).max(0)
            expected = papers(largest, weights_of(network, i, site), alpha)
            np.testing.assert_allclose(np.exp(-transform.scales[site][i]), expected, rtol=1e-9)

    found = fuse(network, transform)
    assert not jax.tree.leaves(found.online)
    before, after = logits(network), logits(found)
    np.testing.assert_allclose(after, before, atol=1e-12 * np.abs(before).max())
    layers = found.params.layers
    assert np.abs(layers.attention_norm - 1).max() > 0.1
    for name in ("o", "down"):
        each = (jax.tree.leaves(x.params.layers.linear(name)) for x in (found, network))
        for a, b in zip(*each, strict=True):
            np.testing.assert_array_equal(a, b)
    for norm, site in ((layers.attention_norm, "qkv"), (layers.mlp_norm, "gate_up")):
        for i in range(3):
            pairs = zip(weights_of(found, i, site), weights_of(network, i, site), strict=True)
            for after, before in pairs:
                np.testing.assert_allclose(norm[i][:, None] * after, before, rtol=1e-12)


def rounded(x, bits, axis):
    scale = np.abs(x).max(axis, keepdims=True) / (2 ** (bits - 1) - 1)
    return np.rint(x / scale) * scale


def numpy_error(x, weights, largest, alpha, bits, weight_bits):
    s = papers(largest, weights, alpha)
    change = size = 0
    for w in weights:
        change += ((rounded(x / s, bits, 1) @ rounded(s[:, None] * w, weight_bits, 0) - x @ w) ** 2
                   ).sum()  # fmt: skip
        size += ((x @ w) ** 2).sum()
    return change / size


def test_the_error_that_is_searched_by(x64):
    x, weights = problem(3)
    largest = np.abs(x).max(0) * 1.5  # of more tokens than these
    found = relative_errors(
        jnp.asarray(x),
        tuple(map(jnp.asarray, weights)),
        jnp.asarray(largest),
        jnp.asarray(ALPHAS),
        Grid(6, granularity="token"),
        (Grid(5, granularity="channel"),) * 2,
    )
    expected = [numpy_error(x, weights, largest, a, 6, 5) for a in ALPHAS]
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    assert len(set(np.argsort(expected)[:3])) == 3


def test_search_takes_the_alpha_of_least_error_for_the_whole_model(variant, x64):
    network = fold(variant("llama-biases", "float64").network)
    scheme = Scheme(weights=Grid(5), activations=Grid(6))
    # 16 positions in each of the first 3 windows: all of them are looked at
    _, alpha = smoothquant(network.replace(scheme=scheme), ROWS, SmoothQuant("search"))
    seen = inputs(network)
    total = np.zeros(len(ALPHAS))
    for i in range(3):
        for site in SMOOTHED:
            x, here = seen[site][i], weights_of(network, i, site)
            largest = np.abs(x).max(0)
            total += [numpy_error(x, here, largest, a, 6, 5) for a in ALPHAS]
    assert alpha == ALPHAS[total.argmin()]
    assert np.ptp(total) > 0


def test_what_is_searched_depends_on_what_is_rounded(variant):
    network = fold(variant("llama-biases").network)
    channel = jnp.where(jnp.arange(48) == 5, 40.0, 1.0)
    layers = network.params.layers
    outliers = layers.replace(
        attention_norm=layers.attention_norm * channel, mlp_norm=layers.mlp_norm * channel
    )
    network = network.replace(params=network.params.replace(layers=outliers))

    def found(scheme):
        return smoothquant(network.replace(scheme=scheme), ROWS, SmoothQuant("search"))[1]

    assert found(Scheme()) == 0.5
    assert found(Scheme(activations=Grid(6))) > 0.6
    assert found(Scheme(weights=Grid(4, granularity="tensor"))) < 0.4


def test_settings_out_of_range_and_inputs_that_are_not_finite(variant):
    for alpha in (-0.1, 1.1):
        with pytest.raises(InputError, match=r"smoothquant\.alpha: "):
            SmoothQuant(alpha)
    network = fold(variant("llama-biases").network)
    params = network.params
    broken = network.replace(params=params.replace(embed=params.embed * np.inf))
    with pytest.raises(InputError, match="the input of qkv in layer 0 is not finite"):
        smoothquant(broken, ROWS)
