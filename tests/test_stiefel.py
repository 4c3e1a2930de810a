"""The optimisers on the orthogonal group, all on one suite of problems with known answers."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import CASES, clipped, every_optimiser, make, minimise, orthogonal, procrustes

from qrot.learn.stiefel import (
    OPTIMISERS,
    cayley_adam,
    cayley_sgd,
    orthogonality_error,
    reorthonormalise,
)

# Problems with known answers


@every_optimiser
@pytest.mark.parametrize("determinant", [1, -1])
def test_procrustes_reaches_the_svd_optimum(name, determinant):
    rng = np.random.default_rng(1)
    start, loss, best, minimum = procrustes(rng, 16, determinant)
    end, losses = minimise(clipped(make(name, 400)), loss, start, 400)
    assert loss(end) - minimum < 1e-3 * (losses[0] - minimum)
    assert np.abs(np.asarray(end) - best).max() < 2e-2
    assert np.sign(np.linalg.det(np.asarray(end))) == determinant
    assert orthogonality_error(end) < 1e-5


@every_optimiser
def test_brockett_finds_the_eigenvectors_in_order(name):
    rng = np.random.default_rng(2)
    n = 5
    eigenvalues = np.arange(1.0, n + 1)
    vectors = orthogonal(rng, n, n)
    matrix = jnp.asarray(vectors @ np.diag(eigenvalues) @ vectors.T, jnp.float32)
    weights = jnp.arange(1.0, n + 1) / n

    def loss(r):
        return -jnp.sum((r * (matrix @ r)) @ weights)

    start = jnp.asarray(orthogonal(rng, n, n), jnp.float32)
    end, _ = minimise(clipped(make(name, 500)), loss, start, 500)
    np.testing.assert_allclose(jnp.sum(end * (matrix @ end), 0), eigenvalues, atol=0.05)
    np.testing.assert_allclose(np.abs(vectors.T @ end), np.eye(n), atol=0.05)


def test_muon_needs_fewer_steps_than_sgd_where_channels_differ_in_size():
    rng = np.random.default_rng(3)
    start, loss, _, minimum = procrustes(rng, 32, 1, sizes=np.exp(rng.standard_normal(32)))
    excess = {
        name: loss(minimise(clipped(make(name, 60)), loss, start, 60)[0]) - minimum
        for name in ("cayley_sgd", "cayley_muon")
    }
    assert excess["cayley_muon"] < 0.2 * excess["cayley_sgd"]


def test_momentum_changes_and_speeds_up_the_descent():
    start, loss, _, minimum = procrustes(np.random.default_rng(4), 16, 1)
    plain = loss(minimise(clipped(cayley_sgd(0.1)), loss, start, 60)[0])
    heavy = loss(minimise(clipped(cayley_sgd(0.1, 0.8)), loss, start, 60)[0])
    assert heavy - minimum < 0.5 * (plain - minimum)


# The group


@every_optimiser
def test_stays_orthogonal_over_1000_noisy_steps(name):
    transform = clipped(make(name))
    start = jnp.asarray(orthogonal(np.random.default_rng(5), 64, 64), jnp.float32)

    @jax.jit
    def worst(rotation):
        def step(carry, key):
            rotation, state = carry
            gradient = jax.random.normal(key, rotation.shape)
            updates, state = transform.update(gradient, state, rotation)
            rotation = optax.apply_updates(rotation, updates)
            return (rotation, state), orthogonality_error(rotation)

        keys = jax.random.split(jax.random.key(0), 1000)
        return jnp.max(jax.lax.scan(step, (rotation, transform.init(rotation)), keys)[1])

    assert worst(start) < 1e-5


@every_optimiser
def test_stays_orthogonal_at_the_width_of_a_model(name):
    rng = np.random.default_rng(6)
    start = jnp.asarray(orthogonal(rng, 576, 576), jnp.float32)
    target = jnp.asarray(orthogonal(rng, 576, 576), jnp.float32)
    end, losses = minimise(clipped(make(name)), lambda r: -jnp.sum(r * target), start, 3)
    assert orthogonality_error(end) < 1e-5
    assert losses[-1] < losses[0]


@every_optimiser
def test_a_gradient_a_million_times_too_large_does_no_harm(name):
    start, loss, _, _ = procrustes(np.random.default_rng(7), 16, 1)
    end, losses = minimise(make(name), lambda r: 1e6 * loss(r), start, 200)
    assert np.isfinite(losses).all()
    assert orthogonality_error(end) < 1e-5
    # SGD on the latent has no bound on its step: on the group, but anywhere on it.
    if name != "qr_sgd":
        assert losses[-1] < losses[0]
        assert losses.max() < 2 * losses[0]


@pytest.mark.parametrize("retraction", ["cayley", "fixed_point"])
def test_the_bound_holds_for_each_matrix_of_a_stack(retraction):
    rng = np.random.default_rng(8)
    rotation = jnp.asarray(orthogonal(rng, 3, 12, 12), jnp.float32)
    scale = np.array([1e-6, 1.0, 1e6])[:, None, None]
    gradient = jnp.asarray(rng.standard_normal((3, 12, 12)) * scale, jnp.float32)
    transform = cayley_sgd(1.0, retraction=retraction, max_norm=0.5)
    updates, _ = transform.update(gradient, transform.init(rotation), rotation)
    moved = np.linalg.norm(np.asarray(updates), 2, axis=(1, 2))
    assert moved[0] < 1e-4  # bound by the learning rate
    assert 0.05 < moved[1] < 0.5
    assert 0.05 < moved[2] < 0.5


def test_reorthonormalise_squares_the_error():
    rng = np.random.default_rng(10)
    near = jnp.asarray(orthogonal(rng, 4, 32, 32) + 1e-4 * rng.standard_normal((4, 32, 32)))
    before, after = orthogonality_error(near), orthogonality_error(reorthonormalise(near))
    assert before > 1e-4
    assert after < 2e-6
    assert orthogonality_error(reorthonormalise(near, 2)) < 1e-6


# Pytrees and the rest of optax


@every_optimiser
def test_a_stack_is_many_problems_and_none_stays_none(name):
    rng = np.random.default_rng(11)
    params = {
        "residual": jnp.asarray(orthogonal(rng, 9, 9), jnp.float32),
        "value": jnp.asarray(orthogonal(rng, 2, 3, 6, 6), jnp.float32),
        "down": None,
    }
    gradients = jax.tree.map(lambda r: jnp.asarray(rng.standard_normal(r.shape), r.dtype), params)
    transform = make(name)
    updates, state = jax.jit(transform.update)(gradients, transform.init(params), params)
    assert updates["down"] is None
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    assert orthogonality_error(params["value"] + updates["value"]) < 1e-5
    one = params["value"][1, 2]
    alone, _ = transform.update(gradients["value"][1, 2], transform.init(one), one)
    np.testing.assert_allclose(updates["value"][1, 2], alone, atol=2e-6)
    assert jax.tree.structure(state) == jax.tree.structure(transform.init(params))


@every_optimiser
def test_bfloat16_rotations_are_refused_and_gradients_are_not(name):
    rotation = jnp.asarray(orthogonal(np.random.default_rng(12), 8, 8), jnp.float32)
    gradient = jnp.asarray(np.random.default_rng(13).standard_normal((8, 8)), jnp.bfloat16)
    transform = make(name)
    with pytest.raises(TypeError, match=r"'residual'.*bfloat16"):
        transform.init({"residual": rotation.astype(jnp.bfloat16)})
    updates, _ = transform.update(gradient, transform.init(rotation), rotation)
    assert updates.dtype == jnp.float32
    assert orthogonality_error(rotation + updates) < 1e-5


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match=r"'value'.*\(3, 4, 5\)"):
        cayley_adam(0.1).init({"value": jnp.zeros((3, 4, 5))})
    with pytest.raises(ValueError, match="'polar'"):
        cayley_sgd(0.1, retraction="polar")
    for name in CASES:
        transform, rotation = make(name), jnp.eye(4)
        with pytest.raises(ValueError, match="needs params"):
            transform.update(rotation, transform.init(rotation))


@every_optimiser
def test_the_schedule_is_followed(name):
    constructor, rate = CASES[name]
    transform = constructor(optax.piecewise_constant_schedule(rate, {2: 0.0}))
    rng = np.random.default_rng(14)
    rotation = jnp.asarray(orthogonal(rng, 8, 8), jnp.float32)
    state, moved = transform.init(rotation), []
    for _ in range(4):
        gradient = jnp.asarray(rng.standard_normal((8, 8)), jnp.float32)
        updates, state = transform.update(gradient, state, rotation)
        rotation = rotation + updates
        moved.append(float(jnp.abs(updates).max()))
    assert min(moved[:2]) > 1e-3
    # The heavy ball of optax.sgd is in front of its learning rate as well, so zero is zero.
    assert max(moved[2:]) < 2e-6


@pytest.mark.parametrize("name", OPTIMISERS)
def test_injected_hyperparameters_under_jit_and_scan(name):
    start, loss, _, _ = procrustes(np.random.default_rng(15), 8, 1)
    constructor = optax.inject_hyperparams(OPTIMISERS[name])
    rate = optax.cosine_decay_schedule(CASES[name][1], 200)
    injected, losses = minimise(clipped(constructor(learning_rate=rate)), loss, start, 200)
    plain, _ = minimise(clipped(OPTIMISERS[name](rate)), loss, start, 200)
    np.testing.assert_allclose(injected, plain, atol=1e-4)
    assert losses[-1] < 0.2 * losses[0]


@every_optimiser
def test_the_state_survives_a_checkpoint(name):
    rng = np.random.default_rng(16)
    params = {"value": jnp.asarray(orthogonal(rng, 2, 6, 6), jnp.float32), "down": None}
    transform = make(name, 10)
    state = transform.init(params)
    for last in (False, True):
        gradients = jax.tree.map(
            lambda r: jnp.asarray(rng.standard_normal(r.shape), r.dtype), params
        )
        if last:
            leaves, structure = jax.tree.flatten(state)
            restored = jax.tree.unflatten(structure, [jnp.asarray(np.array(x)) for x in leaves])
            expected, _ = transform.update(gradients, state, params)
            actual, _ = transform.update(gradients, restored, params)
            np.testing.assert_array_equal(actual["value"], expected["value"])
        updates, state = transform.update(gradients, state, params)
        params = optax.apply_updates(params, updates)


def test_stacks_are_factorised_one_after_the_other():
    """Two at once hang on two CPU cores: in the program each must need what came before it."""
    draw = np.random.default_rng(0)
    params = {
        name: jnp.asarray(np.linalg.qr(draw.normal(size=(count, 8, 8)))[0], jnp.float32)
        for name, count in (("a", 3), ("b", 5), ("c", 4))
    }
    optimiser = cayley_sgd(0.1)
    update = jax.jit(optimiser.update)
    text = update.lower(params, optimiser.init(params), params).compile().as_text()
    entry = text[text.index("\nENTRY") :]
    needs = {
        line.split(" = ")[0].split()[-1]: set(re.findall(r"%[\w.-]+", line.split(" = ", 1)[1]))
        for line in entry.splitlines()
        if " = " in line
    }
    found = [line for line in entry.splitlines() if "lapack_sgetrf" in line]
    names = [line.split(" = ")[0].split()[-1] for line in found]
    assert len(names) == len(params), "another solver: look anew at what hangs"

    def reached(name):
        seen, left = set(), [name]
        while left:
            here = left.pop()
            left += [n for n in needs.get(here, ()) if n not in seen]
            seen |= needs.get(here, set())
        return seen

    before = sorted(sum(other in reached(name) for other in names) for name in names)
    assert before == [0, 1, 2]
