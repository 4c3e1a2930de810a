"""The optimisers on the orthogonal group by name, and problems to try them on."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from qrot.learn.stiefel import cayley_adam, cayley_muon, cayley_sgd, qr_adam, qr_sgd, with_skew

# name: (constructor of the learning rate, a rate for gradients clipped to norm 1)
CASES = {
    "cayley_sgd": (cayley_sgd, 1.5),
    "cayley_sgd_momentum": (lambda rate: cayley_sgd(rate, 0.9), 0.3),
    "cayley_sgd_fixed_point": (lambda rate: cayley_sgd(rate, retraction="fixed_point"), 1.5),
    "cayley_adam": (cayley_adam, 0.05),
    "cayley_muon": (cayley_muon, 0.2),
    "qr_sgd": (qr_sgd, 0.3),
    "qr_adam": (qr_adam, 0.05),
    "skew_adam": (lambda rate: with_skew(optax.adam(rate)), 0.025),
}

every_optimiser = pytest.mark.parametrize("name", CASES)


def make(name, steps=None):
    constructor, rate = CASES[name]
    return constructor(optax.cosine_decay_schedule(rate, steps) if steps else rate)


def orthogonal(rng, *shape, determinant=1):
    q = np.linalg.qr(rng.standard_normal(shape))[0]
    q[..., 0] *= determinant * np.sign(np.linalg.det(q))[..., None]
    return q


def skew(rng, *shape):
    a = rng.standard_normal(shape)
    return a - np.swapaxes(a, -1, -2)


def minimise(transform, loss, rotation, steps):
    """Run `steps` steps under jit and scan; return the last R and all losses."""

    @jax.jit
    def run(rotation):
        def step(carry, _):
            rotation, state = carry
            value, gradient = jax.value_and_grad(loss)(rotation)
            updates, state = transform.update(gradient, state, rotation)
            return (optax.apply_updates(rotation, updates), state), value

        carry, values = jax.lax.scan(step, (rotation, transform.init(rotation)), length=steps)
        return carry[0], values

    return run(rotation)


def procrustes(rng, n, determinant, noise=0.1, sizes=1.0):
    """Return a start, the loss |A R - B|^2 and its minimum over the start's component."""
    a = rng.standard_normal((3 * n, n)) * sizes
    b = a @ orthogonal(rng, n, n, determinant=determinant) + noise * rng.standard_normal(a.shape)
    u, _, vt = np.linalg.svd(a.T @ b)
    u[:, -1] *= determinant * np.sign(np.linalg.det(u @ vt))
    best = u @ vt
    a32, b32 = jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32)
    start = jnp.asarray(orthogonal(rng, n, n, determinant=determinant), jnp.float32)
    return start, (lambda r: jnp.sum((a32 @ r - b32) ** 2)), best, np.sum((a @ best - b) ** 2)


def clipped(transform):
    return optax.chain(optax.clip_by_global_norm(1.0), transform)
