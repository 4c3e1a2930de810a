"""Two networks on a text, token by token."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax, rel_entr

from qrot.evaluate.divergence import compare, token_differences
from qrot.evaluate.perplexity import Windows, cut_windows
from qrot.model.io.load import load
from qrot.network import fold, logits

pytestmark = pytest.mark.usefixtures("quick_compile")


def drawn(seed, *shape):
    return np.random.default_rng(seed).normal(0, 3, shape)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_differences_of_tokens_are_those_of_float64(dtype):
    with jax.enable_x64(dtype == "float64"):
        exact, other = drawn(0, 3, 9, 31).astype(dtype), drawn(1, 3, 9, 31).astype(dtype)
        tokens = np.random.default_rng(2).integers(0, 31, (3, 9))
        found = token_differences(*map(jnp.asarray, (exact, other, tokens)))
        assert found.kl.dtype == dtype
    p, q = (log_softmax(x[:, :-1].astype(np.float64), axis=-1) for x in (exact, other))
    rtol = 1e-5 if dtype == "float32" else 1e-12
    np.testing.assert_allclose(found.kl, rel_entr(np.exp(p), np.exp(q)).sum(-1), rtol=rtol)
    for nll, log in ((found.exact_nll, p), (found.nll, q)):
        taken = np.take_along_axis(log, tokens[:, 1:, None], -1)[..., 0]
        np.testing.assert_allclose(nll, -taken, rtol=rtol)
    np.testing.assert_array_equal(found.flipped, p.argmax(-1) != q.argmax(-1))
    assert 0 < np.asarray(found.flipped).mean() < 1


@pytest.fixture(scope="module")
def networks(tiny):
    """A network and another one near it."""
    network = fold(load(str(tiny / "model")).network)
    params = network.params.replace(embed=network.params.embed + 0.05)
    return network, network.replace(params=params)


def test_what_overlaps_counts_once_and_batches_do_not_matter(networks):
    windows = Windows(12, 4, stride=5)
    rows = cut_windows(np.random.default_rng(0).integers(0, 97, 60).astype(np.int32), windows)
    exact, other = (jax.jit(partial(logits, network)) for network in networks)
    found = compare(exact, other, rows, windows, batch=3)
    each = token_differences(exact(jnp.asarray(rows)), other(jnp.asarray(rows)), jnp.asarray(rows))
    kl = np.concatenate([part[6 if i else 0 :] for i, part in enumerate(np.asarray(each.kl))])
    assert found.tokens == len(kl) == 11 + 3 * 5
    assert found.kl == pytest.approx(kl.mean(), rel=1e-5)
    assert found.kl_p99 == pytest.approx(np.quantile(kl, 0.99), rel=1e-5)
    assert found == pytest.approx(compare(exact, other, rows, windows, batch=1), rel=1e-4)


def test_a_network_is_not_apart_from_itself(networks):
    rows = np.random.default_rng(0).integers(0, 97, (3, 12)).astype(np.int32)
    same = jax.jit(partial(logits, networks[0]))
    found = compare(same, same, rows, Windows(12, 3))
    assert (found.kl, found.kl_p99, found.flips) == (0, 0, 0)
    assert found.nll == found.exact_nll
