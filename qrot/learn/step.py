"""One step of learning: the gradient, and what each part of a transform makes of it."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from qrot.learn.objectives import OBJECTIVES
from qrot.learn.settings import Learn
from qrot.learn.stiefel import OPTIMISERS
from qrot.model.params import Network
from qrot.rotation.forms import orthogonal_parts
from qrot.rotation.transform import Transform

Scalar = Float[Array, ""]
_FIXED = "fixed"


def make_optimiser(settings: Learn, rate: float | Array) -> optax.GradientTransformation:
    """Rotations by the chosen optimiser, scales and clip ratios by Adam; the rest stays.

    Args:
        settings: of learning.
        rate: a learning rate, which may be traced; the state does not depend on it. The rates of
            scales and clip ratios follow the same schedule, whatever the scale of the optimiser's
            rates.
    """
    rotation = OPTIMISERS[settings.optimiser](rate)
    if settings.clip_norm is not None:
        rotation = optax.chain(optax.clip_by_global_norm(settings.clip_norm), rotation)
    relative = rate / settings.learning_rate
    return optax.partition(
        {
            "rotation": rotation,
            "clip": optax.adam(relative * settings.clip_rate),
            "scale": optax.adam(relative * settings.scale_rate),
            _FIXED: optax.set_to_zero(),
        },
        _labels,
    )


def _labels(transform: Transform) -> Any:
    """Of each array the name of what moves it."""
    trees = {"scales": "scale", "clips": "clip"}

    def label(path: tuple[Any, ...], _: Array) -> str:
        tree, name, *field = path
        if tree.name != "rotations":
            return trees.get(tree.name, _FIXED)
        orthogonal = field[0].name in orthogonal_parts(transform.rotations[name.key])
        return "rotation" if orthogonal else _FIXED

    return jax.tree_util.tree_map_with_path(label, transform)


@partial(jax.jit, static_argnames="settings")
def loss_of(transform: Transform, network: Network, batch: Any, settings: Learn) -> Scalar:
    """The loss of the objective, see `Objective.loss`."""
    objective = OBJECTIVES[settings.objective]
    options = {"remat": settings.remat} if objective.remat else {}
    return objective.loss(transform, network, batch, **options)


@partial(jax.jit, static_argnames="settings", donate_argnames="state")
def update(
    transform: Transform, state: Any, network: Network, batch: Any, rate: Any, settings: Learn
) -> tuple[Transform, Any, Scalar, Scalar]:
    """One step of gradient descent.

    Args:
        transform: what is learned.
        state: of the optimiser, which may be overwritten.
        network: folded, with the scheme that training sees.
        batch: that the objective asks for.
        rate: the learning rate.
        settings: of learning.

    Returns:
        Transform and state after the step, loss and norm of the gradient before it.
    """
    loss, gradient = _loss_and_gradient(transform, network, batch, settings)
    optimiser, learned = make_optimiser(settings, rate), cast(Any, transform)
    change, state = optimiser.update(gradient, state, learned)
    moving = jax.tree.map(
        lambda g, label: 0.0 if label == _FIXED else g, gradient, _labels(transform)
    )
    transform = cast(Transform, optax.apply_updates(learned, change))
    clips = jax.tree.map(lambda c: jnp.clip(c, settings.clip_floor, 1.0), transform.clips)
    return transform.replace(clips=clips), state, loss, optax.tree.norm(moving)


def _loss_and_gradient(transform: Transform, network: Network, batch: Any, settings: Learn):
    """Both as means over the parts of the batch, which are gone through one by one."""

    def one(part):
        return jax.value_and_grad(loss_of)(transform, network, part, settings)

    if settings.accumulate == 1:
        return one(batch)
    parts = batch.reshape(settings.accumulate, -1, batch.shape[1])
    zero = jax.tree.map(jnp.zeros_like, (jnp.zeros(()), transform))
    total, _ = jax.lax.scan(
        lambda total, part: (jax.tree.map(jnp.add, total, one(part)), None), zero, parts
    )
    return jax.tree.map(lambda x: x / settings.accumulate, total)
