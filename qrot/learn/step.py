"""One step of learning: the gradient, and what each part of a transform makes of it."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from qrot.learn.named import named_arrays, with_arrays
from qrot.learn.objectives import OBJECTIVES
from qrot.learn.settings import Learn
from qrot.learn.stiefel import OPTIMISERS
from qrot.model.params import Network
from qrot.rotation.forms import orthogonal_parts
from qrot.rotation.transform import Transform

Scalar = Float[Array, ""]
_FIXED = "fixed"


def optimiser_state(transform: Transform, settings: Learn) -> Any:
    """The optimiser's state before the first step."""
    return _optimiser(transform, settings, 1.0).init(named_arrays(transform))


def move(
    transform: Transform, gradient: Transform, state: Any, rate: Any, settings: Learn
) -> tuple[Transform, Any]:
    """A step: rotations by the chosen optimiser, scales and clip ratios by Adam; the rest stays.

    Args:
        transform: what is learned.
        gradient: of the loss by it.
        state: of the optimiser.
        rate: the learning rate, which may be traced. Those of scales and clip ratios follow the
            same schedule, whatever the scale of the optimiser's rates.
        settings: of learning.

    Returns:
        Transform and state after the step.
    """
    arrays = named_arrays(transform)
    change, state = _optimiser(transform, settings, rate).update(
        named_arrays(gradient), state, arrays
    )
    moved = with_arrays(transform, cast(Any, optax.apply_updates(arrays, change)))
    clips = {name: jnp.clip(c, settings.clip_floor, 1.0) for name, c in moved.clips.items()}
    return moved.replace(clips=clips), state


def _optimiser(transform: Transform, settings: Learn, rate: Any) -> optax.GradientTransformation:
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
        _labels(transform),
    )


def _labels(transform: Transform) -> dict[str, str]:
    """Of each array the name of what moves it."""
    orthogonal = {
        f"rotations.{name}.{part}"
        for name, rotation in transform.rotations.items()
        for part in orthogonal_parts(rotation)
    }
    trees = {"scales": "scale", "clips": "clip"}
    return {
        name: "rotation" if name in orthogonal else trees.get(name.split(".")[0], _FIXED)
        for name in named_arrays(transform)
    }


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
    labels = _labels(transform)
    moving = [g for name, g in named_arrays(gradient).items() if labels[name] != _FIXED]
    transform, state = move(transform, gradient, state, rate, settings)
    return transform, state, loss, optax.tree.norm(moving)


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
