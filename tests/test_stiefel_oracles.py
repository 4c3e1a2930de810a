"""The optimisers on the orthogonal group against SpinQuant's step and geoopt's."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import minimise, orthogonal, procrustes, skew

from qrot.learn.stiefel import cayley_sgd, orthogonality_error, reorthonormalise


def spinquant_step(p, g, rate):
    """One step of SpinQuant's optimiser, transcribed in numpy without its occasional QR.

    It transposes: p is our R as well, but the step is written for X = p^T.
    """
    u = p / np.maximum(np.linalg.norm(p, axis=1, keepdims=True), 1e-8)
    v = -g.T
    mx = v @ u
    xmx = u @ mx
    w = mx - 0.5 * (u.T @ xmx)
    w = w - w.T
    alpha = min(1.0 / (np.abs(w).sum(0).max() + 1e-8), rate)
    x = u.T
    y = x + alpha * v
    for _ in range(5):
        y = x + alpha * w @ ((x + y) / 2)
    return y.T


@pytest.mark.parametrize("rate", [0.02, 1.5])  # held by the rate, held by the norm
def test_the_fixed_point_is_spinquants_step(rate):
    rng = np.random.default_rng(23)
    p = orthogonal(rng, 16, 16)
    with jax.enable_x64(True):
        transform = cayley_sgd(rate, retraction="fixed_point")
        # A tangent gradient: there both fixed points start from the same matrix.
        g = p @ skew(rng, 16, 16)
        updates, _ = transform.update(jnp.asarray(g), transform.init(p), jnp.asarray(p))
        reference = reorthonormalise(jnp.asarray(spinquant_step(p, g, rate)), 2)
        np.testing.assert_allclose(p + updates, reference, atol=1e-12)


def test_a_large_normal_part_of_the_gradient_does_no_harm():
    # G = R S with S symmetric has no direction on the group; SpinQuant's start R - alpha G of the
    # fixed point would leave it.
    rng = np.random.default_rng(9)
    rotation = jnp.asarray(orthogonal(rng, 16, 16), jnp.float32)
    lie = skew(rng, 16, 16)
    gradient = jnp.asarray(rotation @ (lie + 1e3 * (np.eye(16) + lie @ lie.T)), jnp.float32)
    transform = cayley_sgd(10.0, retraction="fixed_point")
    updates, _ = transform.update(gradient, transform.init(rotation), rotation)
    assert orthogonality_error(rotation + updates) < 1e-5
    theirs = spinquant_step(np.asarray(rotation), np.asarray(gradient), 10.0)
    assert orthogonality_error(jnp.asarray(theirs)) > 0.01


def test_a_descent_with_the_fixed_point_is_spinquants():
    start, _, _, _ = procrustes(np.random.default_rng(24), 16, -1)
    rng = np.random.default_rng(25)
    a, b = rng.standard_normal((48, 16)), rng.standard_normal((48, 16))

    def clipped_gradient(r):
        g = a.T @ (a @ r - b)
        return g / np.linalg.norm(g)

    with jax.enable_x64(True):
        transform = cayley_sgd(0.5, retraction="fixed_point")
        ours = theirs = np.asarray(start, np.float64)
        state = transform.init(jnp.asarray(ours))
        for _ in range(30):
            g = jnp.asarray(clipped_gradient(ours))
            updates, state = transform.update(g, state, jnp.asarray(ours))
            ours = np.asarray(ours + updates)
            theirs = spinquant_step(theirs, clipped_gradient(theirs), 0.5)
        assert np.abs(ours - np.asarray(start)).max() > 0.3
        # Theirs drifts off the group by what five iterations leave of the normal part of G.
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.fixture
def one_torch_thread():
    # Torch's threads wait actively, and for matrices this small do nothing but get in JAX's way.
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield torch
    torch.set_num_threads(threads)


def test_geoopt_takes_the_same_step_and_finds_the_same_optimum(one_torch_thread):
    torch = one_torch_thread
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the import deprecates is not ours
        geoopt = pytest.importorskip("geoopt")
    rng = np.random.default_rng(26)
    a = rng.standard_normal((30, 6))
    b = a @ orthogonal(rng, 6, 6) + 0.1 * rng.standard_normal((30, 6))
    start = orthogonal(rng, 6, 6)

    def descend(manifold, rate, steps):
        r = geoopt.ManifoldParameter(torch.tensor(start), manifold=manifold)
        optimiser = geoopt.optim.RiemannianSGD([r], lr=rate)
        for _ in range(steps):
            optimiser.zero_grad()
            ((torch.tensor(a) @ r - torch.tensor(b)) ** 2).sum().backward()
            optimiser.step()
        return r.detach().numpy()

    with jax.enable_x64(True):

        def loss(r):
            return jnp.sum((a @ r - b) ** 2)

        def ours(rate, steps):
            return np.asarray(minimise(cayley_sgd(rate), loss, jnp.asarray(start), steps)[0])

        # The canonical metric doubles the gradient, and its Cayley step doubles it again.
        canonical = descend(geoopt.CanonicalStiefel(), 2.5e-4, 5)
        np.testing.assert_allclose(ours(1e-3, 5), canonical, atol=1e-10)
        # The Euclidean metric has our gradient, with a QR retraction: equal to second order.
        direction = (descend(geoopt.EuclideanStiefel(), 1e-7, 1) - start) / 1e-7
        np.testing.assert_allclose((ours(1e-7, 1) - start) / 1e-7, direction, atol=1e-3)
        optimum = descend(geoopt.EuclideanStiefel(), 5e-3, 200)
        np.testing.assert_allclose(ours(5e-3, 200), optimum, atol=1e-5)
