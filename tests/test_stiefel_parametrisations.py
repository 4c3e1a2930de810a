"""Rotations from a skew matrix and from QR: the maps, and the optimisers that go through them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from problems import minimise, orthogonal, procrustes, skew

from qrot.learn.stiefel import (
    cayley,
    cayley_adam,
    from_skew,
    orthogonality_error,
    qr_optimizer,
    qr_parametrisation,
    to_skew,
    with_skew,
)


def test_skew_and_rotation_are_inverse():
    rng = np.random.default_rng(17)
    with jax.enable_x64(True):
        base = jnp.asarray(orthogonal(rng, 3, 12, 12, determinant=-1))
        s = jnp.asarray(0.3 * skew(rng, 3, 12, 12))
        rotation = from_skew(s, base)
        eye = jnp.eye(12)
        expected = base @ (eye - s) @ jnp.linalg.inv(eye + s)
        np.testing.assert_allclose(rotation, expected, atol=1e-12)
        np.testing.assert_allclose(base @ cayley(s), expected, atol=1e-12)
        assert orthogonality_error(rotation) < 1e-12
        np.testing.assert_allclose(to_skew(rotation, base), s, atol=1e-10)
        np.testing.assert_allclose(from_skew(s + s @ s.mT, base), rotation, atol=1e-12)


def test_skew_parametrisation_with_a_plain_optimiser():
    start, loss, _, minimum = procrustes(np.random.default_rng(18), 12, -1)
    s, losses = minimise(
        optax.adam(optax.cosine_decay_schedule(0.05, 400)),
        lambda s: loss(from_skew(s, start)),
        jnp.zeros_like(start),
        400,
    )
    # A fixed base stretches the space far from it: slower than the wrapper.
    assert loss(from_skew(s, start)) - minimum < 1e-2 * (losses[0] - minimum)


def test_adam_in_the_skew_wrapper_is_cayley_adam_at_twice_the_rate():
    start, loss, _, _ = procrustes(np.random.default_rng(19), 12, 1)
    wrapped, _ = minimise(with_skew(optax.adam(0.01, 0.9, 0.99)), loss, start, 20)
    direct, _ = minimise(cayley_adam(0.02), loss, start, 20)
    np.testing.assert_allclose(wrapped, direct, atol=1e-5)


def test_the_skew_wrapper_steps_along_the_gradient_in_s():
    rng = np.random.default_rng(20)
    with jax.enable_x64(True):
        base = jnp.asarray(orthogonal(rng, 3, 8, 8))
        gradient = jnp.asarray(rng.standard_normal((3, 8, 8)))
        s = -0.1 * jax.grad(lambda s: jnp.sum(gradient * from_skew(s, base)))(jnp.zeros((3, 8, 8)))
        transform = with_skew(optax.sgd(0.1))
        updates, _ = transform.update(gradient, transform.init(base), base)
        np.testing.assert_allclose(base + updates, from_skew(s, base), atol=1e-12)


def test_qr_has_a_positive_triangle_and_the_gradient_of_the_latent():
    rng = np.random.default_rng(21)
    with jax.enable_x64(True):
        latent = jnp.asarray(rng.standard_normal((3, 8, 8)))
        rotation = qr_parametrisation(latent)
        assert orthogonality_error(rotation) < 1e-12
        triangle = rotation.mT @ latent
        np.testing.assert_allclose(jnp.tril(triangle, -1), 0, atol=1e-12)
        assert (jnp.diagonal(triangle, axis1=1, axis2=2) > 0).all()

        # Two steps of the transform against two steps on Z through JAX's own derivative of QR.
        gradients = jnp.asarray(rng.standard_normal((2, 3, 8, 8)))
        transform = qr_optimizer(optax.sgd(0.05, 0.9))
        by_hand = optax.sgd(0.05, 0.9)
        z = rotation
        state, z_state = transform.init(rotation), by_hand.init(z)
        for gradient in gradients:
            updates, state = transform.update(gradient, state, rotation)
            rotation = rotation + updates
            (z_gradient,) = jax.vjp(qr_parametrisation, z)[1](gradient)
            change, z_state = by_hand.update(z_gradient, z_state)
            z = z + change
            np.testing.assert_allclose(rotation, qr_parametrisation(z), atol=1e-11)


def test_qr_follows_a_rotation_that_the_caller_put_back():
    rng = np.random.default_rng(22)
    best = jnp.asarray(orthogonal(rng, 8, 8), jnp.float32)
    gradient = jnp.asarray(rng.standard_normal((8, 8)), jnp.float32)
    transform = qr_optimizer(optax.sgd(0.1))
    _, state = transform.update(gradient, transform.init(best), best)
    updates, _ = transform.update(0 * gradient, state, best)
    np.testing.assert_allclose(updates, 0, atol=1e-6)
