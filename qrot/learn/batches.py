"""What a step trains on: windows of tokens, hidden states, or captured vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from qrot.calibrate.capture import Captured, capture, capture_hidden
from qrot.learn.objectives import OBJECTIVES
from qrot.learn.settings import Learn
from qrot.model.params import Model

TAPS = 256  # captured vectors a window


def make_batches(
    model: Model,
    rows: Int[np.ndarray, "count length"],
    held_out: Int[np.ndarray, "held length"],
    captured: Captured | None,
    settings: Learn,
    seed: int,
) -> tuple[Callable[[int], Any], list[Any]]:
    """(step -> what to train on, batches to judge by); by seed and step alone, to be resumable.

    captured: of `rows`, for objectives of captured vectors.
    """
    kind = OBJECTIVES[settings.objective].batch
    if kind == "captured":
        assert captured is not None
        needed = captured.gradients is not None
        judged, _ = capture(model, held_out, taps=TAPS, seed=seed, gradients=needed)
        return lambda step: drawn(captured, settings.batch, seed, step), [on_device(judged)]
    size = min(settings.batch, len(rows))
    size -= size % settings.accumulate
    parts = [slice(i, i + size) for i in range(0, len(held_out), size)]
    if kind == "tokens":
        return (
            lambda step: jnp.asarray(rows[_places(len(rows), size, seed, step)]),
            [jnp.asarray(held_out[part]) for part in parts],
        )
    states = capture_hidden(model, rows[: settings.windows])
    judged = capture_hidden(model, held_out)
    size = min(size, states.shape[1])
    return (
        lambda step: jnp.asarray(states[:, _places(states.shape[1], size, seed, step)]),
        [jnp.asarray(judged[:, part]) for part in parts],
    )


def drawn(captured: Captured, size: int, seed: int, step: int) -> Captured:
    """`size` of the vectors, first tokens among them in about their number, and their weights."""
    first, count = captured.first, len(captured.weight)
    heads = max(1, min(first, size * first // count))
    rest = max(1, min(size - heads, count - first))
    index = np.r_[
        _places(first, heads, seed, step), first + _places(count - first, rest, seed, step)
    ]
    share = captured.weight[:first].sum()
    weight = np.r_[np.full(heads, share / heads), np.full(rest, (1 - share) / rest)]
    inputs, gradients = jax.tree.map(
        lambda x: jnp.asarray(x[:, index]), (captured.inputs, captured.gradients)
    )
    return Captured(inputs, gradients, jnp.asarray(weight, jnp.float32), heads)


def on_device(captured: Captured) -> Captured:
    """All of it as arrays of the default device."""
    return jax.tree.map(jnp.asarray, captured)


def _places(count: int, size: int, seed: int, step: int) -> Int[np.ndarray, " size"]:
    """Which of `count` make up a step's batch: all once an epoch, by seed and step alone."""
    epoch, place = divmod(step * size, count - count % size)
    return np.random.default_rng((seed, epoch)).permutation(count)[place : place + size]
