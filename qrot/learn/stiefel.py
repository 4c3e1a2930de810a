"""Optimisers that stay on the orthogonal group, as optax transforms.

A leaf of the parameters is one orthogonal matrix R or a stack of them, `[..., n, n]`, in float32
or float64; a leaf that is None stays None. Every transform returns R_new - R, so that
`optax.apply_updates` holds, and composes with `optax.chain` (clip the gradient *before* it),
`optax.inject_hyperparams`, `jit` and `scan`. A stack is as many independent problems: norms and
bounds are taken matrix by matrix.

All of them share one step. With G = dL/dR,

    A  = (R^T G - G^T R) / 2        the gradient in the Lie algebra: skew, and dL = <A, K> for R e^K
    D  = inner(A)                   momentum, Adam, ...: any optax transform on skew matrices
    R' = R Cayley(alpha D),         Cayley(B) = (I - B/2) (I + B/2)^-1 = I - B + B^2/2 - ...

The factor stands on the right. For plain gradient descent the side does not matter, as
Cayley(R A R^T) R = R Cayley(A), but it does once D remembers earlier steps. In x -> x R the rotated
activations are multiplied by the factor, x R' = (x R) Cayley(alpha D), so that the entry (i, j) of
A and of its moments is the plane of the rotated channels i and j, the ones that the quantiser
sees, and moments need no transport. It is also what SpinQuant's transposed code computes.

`det R` never changes: a start with determinant -1 (half of all random Hadamard matrices) stays in
that component.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

Number = float | Array  # an array where optax.inject_hyperparams supplies it
Rate = Number | Callable[[Any], Any]

# TF32 or bfloat16 products, the default on accelerators, would leave the group at once.
_matmul = partial(jnp.matmul, precision="highest")


def _skew(x: Array) -> Array:
    return (x - x.mT) / 2


def orthogonality_error(rotation: Float[Array, "*stack n n"]) -> Float[Array, ""]:
    """Return max |R^T R - I| over all entries and all matrices of the stack."""
    gram = _matmul(rotation.mT, rotation)
    return jnp.max(jnp.abs(gram - jnp.eye(gram.shape[-1], dtype=gram.dtype)))


def reorthonormalise(
    rotation: Float[Array, "*stack n n"], steps: int = 1
) -> Float[Array, "*stack n n"]:
    """Pull nearly orthogonal matrices back: R <- R (3 I - R^T R) / 2, a Newton-Schulz step.

    An error e becomes 3/4 e^2, towards the nearest orthogonal matrix (Björck and Bowie 1971, "An
    iterative algorithm for computing the best estimate of an orthogonal matrix").

    Args:
        rotation: with singular values below sqrt(3).
        steps: to take.
    """
    for _ in range(steps):
        rotation = 1.5 * rotation - 0.5 * _matmul(rotation, _matmul(rotation.mT, rotation))
    return rotation


def from_skew(
    skew: Float[Array, "*stack n n"], base: Float[Array, "*stack n n"]
) -> Float[Array, "*stack n n"]:
    """Return R = R0 (I - S)(I + S)^-1 for the base R0 and the skew part S of `skew`.

    A parametrisation for any optimiser: start at zeros (R = R0) and differentiate through it.
    Reaches every R in the component of R0 for which R0^T R has no eigenvalue -1 (Cayley 1846).

    Args:
        skew: of which only the skew part counts, so that an optimiser need not keep its updates
            skew.
        base: R0.
    """
    s = _skew(skew)
    # (I - S)(I + S)^-1 = 2 (I + S)^-1 - I, and (I + S)^T = I - S: one solve, no product.
    minus = jnp.eye(s.shape[-1], dtype=s.dtype) - s
    return 2 * jnp.linalg.solve(minus, jnp.broadcast_to(base, s.shape).mT).mT - base


def to_skew(
    rotation: Float[Array, "*stack n n"], base: Float[Array, "*stack n n"]
) -> Float[Array, "*stack n n"]:
    """Return the skew S with R = R0 (I - S)(I + S)^-1, the inverse of `from_skew`.

    Args:
        rotation: R.
        base: R0.

    Returns:
        S; not finite, or huge, where R0^T R has an eigenvalue at or near -1 (a half turn), as it
        has whenever the determinants of R and R0 differ.
    """
    # The Cayley transform is its own inverse.
    return _skew(cayley(_matmul(base.mT, rotation)))


def cayley(matrix: Float[Array, "*stack n n"]) -> Float[Array, "*stack n n"]:
    """Return (I - X)(I + X)^-1: a rotation for a skew X, and a skew matrix for a rotation X."""
    eye = jnp.eye(matrix.shape[-1], dtype=matrix.dtype)
    return 2 * jnp.linalg.inv(eye + matrix) - eye


def _retract_cayley(r: Array, b: Array) -> Array:
    # The parametrisation at S = B/2. The solve leaves rounding; a step keeps it from adding up.
    return reorthonormalise(from_skew(b / 2, r))


def _retract_fixed_point(r: Array, b: Array) -> Array:
    # P = R - (R + P) B/2 contracts by |B|/2. The reference starts from R - alpha G. The part of G
    # normal to the group can be any size and is not in the bound on the step, so that five
    # iterations may not remove it; the tangent start R - B has the same limit and no such part.
    rb = _matmul(r, b)
    p = r - rb
    for _ in range(5):
        p = r - (rb + _matmul(p, b)) / 2
    # At the bound |B| = 1 the iteration leaves up to 1e-2: two steps take it to rounding.
    return reorthonormalise(p, 2)


_RETRACTIONS = {"cayley": _retract_cayley, "fixed_point": _retract_fixed_point}


class StiefelState(NamedTuple):
    """State of a transform on the group.

    Attributes:
        steps: done.
        inner: state of the inner transform.
    """

    steps: Array
    inner: Any


def _check(params: Any) -> None:
    if params is None:
        raise ValueError("A transform on the orthogonal group needs params in its update.")
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path) or "the rotation"
        if leaf.ndim < 2 or leaf.shape[-1] != leaf.shape[-2]:
            raise ValueError(f"{name} has shape {leaf.shape}, not [..., n, n].")
        if leaf.dtype not in (jnp.float32, jnp.float64):
            raise TypeError(f"{name} is {leaf.dtype}: rotations are learned in float32 or float64.")


def _lie_gradient(r: Array, g: Array) -> Array:
    return _skew(_matmul(r.mT, g.astype(r.dtype)))


def _origin(params: Any) -> Any:
    # Where an inner transform finds itself: at every step R = R Cayley(0).
    return jax.tree.map(jnp.zeros_like, params)


def _in_turn(step: Callable[[Array, Array], Array], params: Any, directions: Any) -> Any:
    """`step` of each leaf, none before the one in front of it is done.

    On two CPU cores two factorisations of stacks at once wait for each other for ever: each holds a
    thread while its parts wait for one (jaxlib 0.10). A barrier would not do, since XLA takes it
    out; min(|x|, 0), which is 0, cannot be known before x.
    """
    leaves, structure = jax.tree.flatten(params)
    done: list[Array] = []
    for r, d in zip(leaves, jax.tree.leaves(directions), strict=True):
        if done:
            d = d + jnp.minimum(jnp.abs(done[-1].ravel()[0]), 0).astype(d.dtype)
        done.append(step(r, d))
    return jax.tree.unflatten(structure, done)


def _on_group(
    inner: optax.GradientTransformation,
    learning_rate: Rate,
    retraction: str = "cayley",
    max_norm: Any = None,
) -> optax.GradientTransformation:
    """Let `inner` turn Lie gradients into directions D, and step by R Cayley(alpha D).

    alpha is the learning rate, or where `max_norm` is given min(learning rate, max_norm / |D|_1)
    for each matrix; |D|_1, the largest column sum, is an upper bound of the spectral norm.
    """
    if retraction not in _RETRACTIONS:
        raise ValueError(f"retraction is {retraction!r}, not one of {sorted(_RETRACTIONS)}.")
    retract = _RETRACTIONS[retraction]

    def init(params):
        _check(params)
        return StiefelState(jnp.zeros([], jnp.int32), inner.init(_origin(params)))

    def update(updates, state, params=None):
        _check(params)
        rate = learning_rate(state.steps) if callable(learning_rate) else learning_rate
        gradients = jax.tree.map(_lie_gradient, params, updates)
        directions, inner_state = inner.update(gradients, state.inner, _origin(params))

        def step(r, d):
            d = _skew(d.astype(r.dtype))  # exactly, whatever rounding the inner transform left
            alpha = jnp.asarray(rate, r.dtype)
            if max_norm is not None:
                norm = jnp.max(jnp.sum(jnp.abs(d), -2, keepdims=True), -1, keepdims=True)
                alpha = jnp.minimum(alpha, max_norm / (norm + 1e-8))
            return retract(r, alpha * d) - r

        return _in_turn(step, params, directions), StiefelState(state.steps + 1, inner_state)

    return optax.GradientTransformation(init, update)


def cayley_sgd(
    learning_rate: Rate,
    momentum: Number = 0.0,
    *,
    retraction: str = "cayley",
    max_norm: Number = 1.0,
) -> optax.GradientTransformation:
    """Cayley SGD, the optimiser of SpinQuant.

    M <- momentum M + A,  alpha = min(learning_rate, max_norm / |M|_1),  R <- R Cayley(alpha M)

    Li, Li and Todorovic 2020, "Efficient Riemannian optimization on the Stiefel manifold via the
    Cayley transform"; Liu et al. 2024, "SpinQuant". SpinQuant's rate of 1.5 presumes gradients
    clipped to a global norm of 1: chain `optax.clip_by_global_norm` before it. Without, the bound
    alone sets the step and the schedule has no effect. Momentum lives in the Lie algebra. (In
    SpinQuant's code the buffer is never written, so that its momentum does nothing.)

    Args:
        learning_rate: a number or an optax schedule.
        momentum: decay of the heavy ball.
        retraction: "cayley" solves exactly (the faster on CPU at n = 576); "fixed_point" is
            SpinQuant's five iterations, products only, and needs max_norm <= 1.
        max_norm: upper bound of alpha |M|_1, hence of a step's angle in radians.
    """
    return _on_group(optax.trace(momentum), learning_rate, retraction, max_norm)


def cayley_adam(
    learning_rate: Rate, b1: Number = 0.9, b2: Number = 0.99, eps: Number = 1e-8
) -> optax.GradientTransformation:
    """Adam with both moments in the Lie algebra, elementwise, and the exact Cayley step.

    M <- b1 M + (1 - b1) A,  V <- b2 V + (1 - b2) A^2,  R <- R Cayley(lr M^ / (sqrt(V^) + eps))

    Kingma and Ba 2015, "Adam"; the step as in Li, Li and Todorovic 2020, who keep one second
    moment a matrix where this keeps one a plane. The learning rate is about the angle, in radians,
    that each plane of two rotated channels turns in a step; the size of the gradient cancels, so
    that the step needs no bound.

    Args:
        learning_rate: a number or an optax schedule.
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: added to the root of the second moment.
    """
    return _on_group(optax.scale_by_adam(b1, b2, eps), learning_rate)


def _orthogonalise(a: Array) -> Array:
    """Map the singular values of a skew matrix to about 1 (0.7 to 1.2) and keep it skew.

    Five steps of the odd quintic X <- 3.4445 X - 4.7750 X X^T X + 2.0315 (X X^T)^2 X of Muon, in
    which X X^T = -X^2 as X is skew.
    """
    tiny = jnp.finfo(a.dtype).tiny
    # By the largest entry first, so that the squares in the norm cannot under- or overflow.
    x = a / jnp.maximum(jnp.max(jnp.abs(a), (-2, -1), keepdims=True), tiny)
    x = x / jnp.maximum(jnp.linalg.norm(x, axis=(-2, -1), keepdims=True), 1.0)
    for _ in range(5):
        square = _matmul(x, x)
        x = 3.4445 * x + _matmul(4.7750 * square + 2.0315 * _matmul(square, square), x)
        x = _skew(x)
    return x


def cayley_muon(learning_rate: Rate, momentum: Number = 0.8) -> optax.GradientTransformation:
    """Muon on the group: every plane of the direction turns by the same angle. The fewest steps.

    M <- momentum M + A,  D = (M_nesterov) (-M_nesterov^2)^(-1/2),  R <- R Cayley(learning_rate D)

    Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks", here for a skew
    M, whose polar factor D is skew again with singular values of about 1. A step is steepest
    descent under a bound on the spectral norm, and the learning rate about the angle in radians of
    every plane. Neither the gradient's size nor its conditioning matters. It does not slow
    down by itself near an optimum: use a schedule that ends at 0.

    Args:
        learning_rate: a number or an optax schedule.
        momentum: decay of the heavy ball.
    """
    orthogonalise = optax.stateless(lambda updates, _: jax.tree.map(_orthogonalise, updates))
    return _on_group(
        optax.chain(optax.trace(momentum, nesterov=True), orthogonalise), learning_rate
    )


def with_skew(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Let any optax optimiser learn S in R = R0 (I - S)(I + S)^-1, with R0 the current R.

    The base moves along: at each step the optimiser sees S = 0 and dL/dS = -2 A, and its update is
    the S of the step. So S never grows to the half turn that a fixed base cannot reach, and the
    wrapped transform acts on R itself. Decaying S means nothing here and does nothing. Adam in it
    is `cayley_adam` at twice the learning rate.

    Args:
        optimizer: of the entries of S.
    """
    # R (I - S)(I + S)^-1 = R Cayley(2 S).
    return _on_group(optax.chain(optax.scale(-2.0), optimizer, optax.scale(2.0)), 1.0)


class QRState(NamedTuple):
    """State of `qr_optimizer`.

    As the latent Z = R T itself is not stored, params that the caller replaces (a rollback to the
    best R) stay consistent with it.

    Attributes:
        triangle: T, upper triangular with a positive diagonal.
        inner: state of the inner transform.
    """

    triangle: Any
    inner: Any


def _signed_qr(z: Array) -> tuple[Array, Array]:
    """Return Q, T with Z = Q T and diag(T) >= 0: the choice that makes Q a smooth function of Z."""
    q, t = jnp.linalg.qr(z)
    sign = jnp.where(jnp.diagonal(t, axis1=-2, axis2=-1) < 0, -1, 1).astype(z.dtype)
    return q * sign[..., None, :], t * sign[..., :, None]


def qr_parametrisation(latent: Float[Array, "*stack n n"]) -> Float[Array, "*stack n n"]:
    """Return the R of Z = R T, T upper triangular with a positive diagonal (DartQuant's QR-Orth).

    Shao et al. 2025, "DartQuant".

    Args:
        latent: Z; differentiable where it is invertible.
    """
    return _signed_qr(latent)[0]


def qr_optimizer(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Let any optax optimiser learn the latent Z of R = qr(Z).Q; starts at Z = R.

    With M = R^T G, the gradient is dL/dZ = R tril(M - M^T, -1) T^-T, from Z = R T and no second
    factorisation. Shao et al. 2025, "DartQuant", "QR-Orth". It is orthogonal to Z column by
    column: Z grows, and the more so the larger the steps, which slows later steps down.

    Args:
        inner: of the entries of Z.
    """

    def init(params):
        _check(params)
        triangle = jax.tree.map(lambda r: jnp.eye(r.shape[-1], dtype=r.dtype) + 0 * r, params)
        return QRState(triangle, inner.init(params))

    def latent_gradient(r, g, t):
        lower = jnp.tril(2 * _lie_gradient(r, g), -1)
        return jax.lax.linalg.triangular_solve(
            t, _matmul(r, lower), left_side=False, lower=False, transpose_a=True
        )

    def update(updates, state, params=None):
        _check(params)
        latent = jax.tree.map(_matmul, params, state.triangle)
        gradient = jax.tree.map(latent_gradient, params, updates, state.triangle)
        change, inner_state = inner.update(gradient, state.inner, latent)
        factors = jax.tree.map(lambda z, d: _signed_qr(z + d.astype(z.dtype)), latent, change)
        updates = jax.tree.map(lambda r, qt: qt[0] - r, params, factors)
        triangle = jax.tree.map(lambda _, qt: qt[1], params, factors)
        return updates, QRState(triangle, inner_state)

    return optax.GradientTransformation(init, update)


def qr_sgd(learning_rate: Rate, momentum: Number = 0.9) -> optax.GradientTransformation:
    """`qr_optimizer` around SGD with momentum: what DartQuant uses."""
    return qr_optimizer(optax.sgd(learning_rate, momentum))


def qr_adam(
    learning_rate: Rate, b1: Number = 0.9, b2: Number = 0.99, eps: Number = 1e-8
) -> optax.GradientTransformation:
    """`qr_optimizer` around Adam."""
    return qr_optimizer(optax.adam(learning_rate, b1, b2, eps))


OPTIMISERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "cayley_sgd": cayley_sgd,
    "cayley_adam": cayley_adam,
    "cayley_muon": cayley_muon,
    "qr_sgd": qr_sgd,
    "qr_adam": qr_adam,
}
