"""SmoothQuant: its formula, what it leaves as it was, and the alpha that the search takes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qrot.errors import InputError
from qrot.grid import Grid
from qrot.model.forward import forward, forward_with_taps
from qrot.network import fold_norms, fuse
from qrot.quantize.smoothquant import (
    ALPHAS,
    SITES,
    SmoothQuant,
    log_scales,
    relative_errors,
    smoothquant,
)
from qrot.rotation.forms import Rotations
from qrot.scheme import READERS, Scheme

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


@partial(jax.jit, static_argnames="config")
def logits(params, config):
    return forward(params, jnp.asarray(ROWS), config)


@partial(jax.jit, static_argnames="config")
def inputs(params, config):
    _, seen = forward_with_taps(params, jnp.asarray(ROWS), config, taps=jnp.arange(ROWS.size))
    return seen


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def weights_of(params, layer, site):
    return [np.asarray(getattr(params.layers, n).weight[layer], np.float64) for n in READERS[site]]


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("alpha", [0.5, 0.85])
def test_a_model_stays_the_same_function(variant, x64, name, alpha):
    model = fold_norms(variant(name, "float64"))
    told = []
    scales, used = smoothquant(
        model.params, Scheme(), model.config, ROWS, settings=SmoothQuant(alpha),
        advance=lambda: told.append(1),
    )  # fmt: skip
    assert (used, len(told)) == (alpha, 3)
    assert (scales.down, scales.values, scales.keys) == (None, None, None)
    seen = inputs(model.params, model.config)
    for site in SITES:
        for i in range(3):
            largest = np.abs(np.asarray(seen[site][i])).max(0)
            expected = papers(largest, weights_of(model.params, i, site), alpha)
            np.testing.assert_allclose(np.exp(-getattr(scales, site)[i]), expected, rtol=1e-9)

    params, online, _ = fuse(model.params, Rotations(), model.config, None, scales)
    assert (online.key, online.down) == (None, None)
    before, after = logits(model.params, model.config), logits(params, model.config)
    np.testing.assert_allclose(after, before, atol=1e-12 * np.abs(before).max())
    assert np.abs(params.layers.attention_norm - 1).max() > 0.1
    for name in ("o", "down"):
        for a, b in zip(*(jax.tree.leaves(getattr(p.layers, name)) for p in (params, model.params)),
                        strict=True):  # fmt: skip
            np.testing.assert_array_equal(a, b)
    for norm, site in (("attention_norm", "qkv"), ("mlp_norm", "gate_up")):
        for i in range(3):
            product = getattr(params.layers, norm)[i][:, None]
            pairs = zip(weights_of(params, i, site), weights_of(model.params, i, site), strict=True)
            for after, before in pairs:
                np.testing.assert_allclose(product * after, before, rtol=1e-12)


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
    model = fold_norms(variant("llama-biases", "float64"))
    scheme = Scheme(weights=Grid(5), activations=Grid(6))
    # 16 positions in each of the first 3 windows: all of them are looked at
    _, alpha = smoothquant(model.params, scheme, model.config, ROWS, settings=SmoothQuant("search"))
    seen = inputs(model.params, model.config)
    total = np.zeros(len(ALPHAS))
    for i in range(3):
        for site in SITES:
            x, weights = np.asarray(seen[site][i]), weights_of(model.params, i, site)
            largest = np.abs(x).max(0)
            total += [numpy_error(x, weights, largest, a, 6, 5) for a in ALPHAS]
    assert alpha == ALPHAS[total.argmin()]
    assert np.ptp(total) > 0


def test_what_is_searched_depends_on_what_is_rounded(variant):
    model = fold_norms(variant("llama-biases"))
    channel = jnp.where(jnp.arange(48) == 5, 40.0, 1.0)
    layers = model.params.layers
    outliers = layers.replace(
        attention_norm=layers.attention_norm * channel, mlp_norm=layers.mlp_norm * channel
    )
    params = model.params.replace(layers=outliers)

    def found(scheme):
        search = SmoothQuant("search")
        return smoothquant(params, scheme, model.config, ROWS, settings=search)[1]

    assert found(Scheme()) == 0.5
    assert found(Scheme(activations=Grid(6))) > 0.6
    assert found(Scheme(weights=Grid(4, granularity="tensor"))) < 0.4


def test_settings_out_of_range_and_inputs_that_are_not_finite(variant):
    for alpha in (-0.1, 1.1):
        with pytest.raises(InputError, match=r"smoothquant\.alpha: "):
            SmoothQuant(alpha)
    model = fold_norms(variant("llama-biases"))
    broken = model.params.replace(embed=model.params.embed * np.inf)
    with pytest.raises(InputError, match="the input of qkv in layer 0 is not finite"):
        smoothquant(broken, Scheme(), model.config, ROWS)
