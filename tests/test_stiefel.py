"""The optimisers on the orthogonal group, all on one suite of problems with known answers."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from qrot.learn.stiefel import (
    OPTIMISERS,
    cayley,
    cayley_adam,
    cayley_muon,
    cayley_sgd,
    from_skew,
    orthogonality_error,
    qr_adam,
    qr_optimizer,
    qr_parametrisation,
    qr_sgd,
    reorthonormalise,
    to_skew,
    with_skew,
)

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


# The parametrisations


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


# Oracles


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
