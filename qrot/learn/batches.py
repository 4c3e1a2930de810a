"""What a step trains on, and what it is judged by: windows of tokens, hidden states, vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from qrot.calibrate.capture import Captured, capture, capture_hidden
from qrot.errors import InputError
from qrot.evaluate.perplexity import Windows, cut_windows
from qrot.learn.objectives import OBJECTIVES
from qrot.learn.settings import Learn
from qrot.model.params import Network
from qrot.rotation.random import stream

Tokens = Int[np.ndarray, "count length"]


class Batches(NamedTuple):
    """Batches of one run of learning.

    Attributes:
        of_step: what a step, counted from 0, trains on; by seed and step alone, to be resumable.
        held_out: what is judged by, each batch with the windows that it stands for.
    """

    of_step: Callable[[int], Any]
    held_out: list[tuple[Any, int]]


class Text(NamedTuple):
    """The windows of the calibration text: those to learn from, those to judge by."""

    rows: Tokens
    held_out: Tokens


def split_text(tokens: Int[np.ndarray, " tokens"], settings: Learn) -> Text:
    """Cut the calibration text; its first windows are held out.

    Raises:
        InputError: where too few windows are left to learn from.
    """
    rows = cut_windows(tokens, Windows(settings.length, None))
    count, left = len(rows), len(rows) - settings.held_out
    if left < 1:
        raise InputError(
            f"the calibration text has {count} windows of {settings.length} tokens, all "
            f"of them held out (learn.held_out: {settings.held_out})"
        )
    if left < settings.accumulate:
        raise InputError(
            f"learn.accumulate: {settings.accumulate} parts need as many windows, and of the "
            f"{count} windows of {settings.length} tokens that the calibration text has, "
            f"{settings.held_out} are held out"
        )
    return Text(rows[settings.held_out :], rows[: settings.held_out])


def make_batches(
    network: Network, text: Text, captured: Captured | None, settings: Learn, seed: int
) -> Batches:
    """The batches that the objective asks for.

    Args:
        network: folded, with nothing online.
        text: its windows.
        captured: of `text.rows`, for objectives of captured vectors.
        settings: of learning.
        seed: of what is drawn.
    """
    return _KINDS[OBJECTIVES[settings.objective].batch](network, text, captured, settings, seed)


def _tokens(network: Network, text: Text, captured, settings: Learn, seed: int) -> Batches:
    count, size = len(text.rows), _size(text, settings)
    return Batches(
        lambda step: jnp.asarray(text.rows[_places(count, size, step, seed, "windows")]),
        [(jnp.asarray(text.held_out[part]), n) for part, n in _parts(text, size)],
    )


def _hidden(network: Network, text: Text, captured, settings: Learn, seed: int) -> Batches:
    states = capture_hidden(network, text.rows[: settings.windows])
    judged = capture_hidden(network, text.held_out)
    count, size = states.shape[1], min(_size(text, settings), states.shape[1])
    return Batches(
        lambda step: jnp.asarray(states[:, _places(count, size, step, seed, "windows")]),
        [(jnp.asarray(judged[:, part]), n) for part, n in _parts(text, _size(text, settings))],
    )


def _captured(network: Network, text: Text, captured, settings: Learn, seed: int) -> Batches:
    judged, _ = capture(
        network,
        text.held_out,
        vectors=settings.vectors,
        seed=seed,
        gradients=captured.gradients is not None,
    )
    return Batches(
        lambda step: drawn(captured, settings.batch, seed, step),
        [(on_device(judged), len(text.held_out))],
    )


_KINDS = {"tokens": _tokens, "hidden": _hidden, "captured": _captured}


def _size(text: Text, settings: Learn) -> int:
    """Windows of a batch."""
    size = min(settings.batch, len(text.rows))
    return size - size % settings.accumulate


def _parts(text: Text, size: int) -> list[tuple[slice, int]]:
    """Batches of the windows that are held out, and how many each has."""
    count = len(text.held_out)
    return [(slice(i, i + size), min(size, count - i)) for i in range(0, count, size)]


def drawn(captured: Captured, size: int, seed: int, step: int) -> Captured:
    """Some of the vectors, first tokens among them in about their number, and their weights.

    Args:
        captured: all of them.
        size: how many.
        seed: of what is drawn.
        step: counted from 0.
    """
    first, count = captured.first, len(captured.weight)
    heads = max(1, min(first, size * first // count))
    rest = max(1, min(size - heads, count - first))
    index = np.r_[
        _places(first, heads, step, seed, "first vectors"),
        first + _places(count - first, rest, step, seed, "vectors"),
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


def _places(count: int, size: int, step: int, seed: int, what: str) -> Int[np.ndarray, " size"]:
    """Which of `count` make up a step's batch: all once an epoch, by seed and step alone."""
    epoch, place = divmod(step * size, count - count % size)
    return stream(seed, "batches", what, epoch).permutation(count)[place : place + size]
