"""Perplexity, with the protocol that it was measured by.

A perplexity means nothing without its protocol: which text, how joined, windows of what length at
what stride, BOS or not. Two numbers are comparable only if all of it is equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from qrot.errors import InputError
from qrot.evaluate.losses import token_nll


@dataclass(frozen=True)
class Windows:
    """How a text becomes rows of tokens: consecutive windows, the tail dropped.

    Attributes:
        length: tokens of a window.
        count: how many windows from the start of the text; None for all.
        stride: tokens between the starts of windows; None for `length`, so that windows do not
            overlap. Of an overlapping window only the last `stride` tokens are scored.
        bos: whether a BOS token stands before every window (the window then has length - 1 of
            text).
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    length: int = 512
    count: int | None = 16
    stride: int | None = None
    bos: bool = False

    def __post_init__(self):
        if self.length < 2:
            raise InputError(f"length: a window of {self.length} tokens predicts nothing")
        if self.count is not None and self.count < 1:
            raise InputError(f"count: {self.count} windows are none")
        text = self.length - self.bos
        if self.stride is not None and not 1 <= self.stride <= text:
            raise InputError(f"stride: {self.stride} is outside 1 to the text of a window, {text}")


def cut_windows(
    tokens: Int[np.ndarray, " tokens"], windows: Windows, *, bos_token_id: int | None = None
) -> Int[np.ndarray, "count length"]:
    """Cut a text into windows.

    Args:
        tokens: of the text.
        windows: how it is cut.
        bos_token_id: of the model; None where it has no BOS token.

    Raises:
        InputError: where the text is shorter than asked for, or BOS is asked of a model without.
    """
    text = windows.length - windows.bos
    stride = windows.stride or text
    available = (len(tokens) - text) // stride + 1 if len(tokens) >= text else 0
    count = available if windows.count is None else windows.count
    if count > available or available == 0:
        raise InputError(
            f"the text has {len(tokens)} tokens: {available} windows of {text}, not {count or 1}"
        )
    rows = np.stack([tokens[i * stride : i * stride + text] for i in range(count)])
    if windows.bos:
        if bos_token_id is None:
            raise InputError("bos: this model has no BOS token")
        rows = np.concatenate([np.full((count, 1), bos_token_id, rows.dtype), rows], axis=1)
    return rows


def spread_windows(
    tokens: Int[np.ndarray, " tokens"], length: int, count: int
) -> Int[np.ndarray, "count length"]:
    """Windows from all over a text, to calibrate on.

    Args:
        tokens: of the text.
        length: of a window, in tokens.
        count: of the windows.

    Raises:
        InputError: where the text is too short.
    """
    cut_windows(tokens, Windows(length, count))
    rows = cut_windows(tokens, Windows(length, None))
    return rows[np.linspace(0, len(rows) - 1, count).round().astype(int)]


def mean_nll(
    logits_of: Callable[[Int[Array, "batch length"]], Float[Array, "batch length vocab"]],
    rows: Int[np.ndarray, "count length"],
    windows: Windows,
    *,
    batch: int = 2,
    advance: Callable[[int], None] = lambda done: None,
) -> float:
    """Mean negative log-likelihood of the scored tokens, in nats; perplexity is exp of it.

    Args:
        logits_of: jit-compiled logits of a batch of rows.
        rows: tokens of the windows, from `cut_windows`.
        windows: how they were cut.
        batch: rows that run at once, at most all of them; the last batch is filled up.
        advance: called with the rows of each batch that is done.
    """
    total, scored = 0.0, 0

    def nll_of(tokens: Int[Array, "batch length"]) -> Float[Array, "batch length-1"]:
        return _token_nll(logits_of(tokens), tokens)

    for nll in scored_tokens(nll_of, rows, windows, batch=batch, advance=advance):
        total, scored = total + nll.sum(), scored + len(nll)
    return total / scored


def scored_tokens(
    values_of: Callable[[Int[Array, "batch length"]], Any],
    rows: Int[np.ndarray, "count length"],
    windows: Windows,
    *,
    batch: int = 2,
    advance: Callable[[int], None] = lambda done: None,
) -> Iterator[Any]:
    """What there is to say of each token that is scored, window by window.

    Args:
        values_of: of a batch of rows: an array [batch, length - 1] with a number for each token but
            the first, or a tree of such arrays.
        rows: tokens of the windows, from `cut_windows`.
        windows: how they were cut.
        batch: rows that run at once, at most all of them; the last batch is filled up.
        advance: called with the rows of each batch that is done.

    Yields:
        For each window the same tree of arrays [tokens that are scored], in float64 on the host.
    """
    scored_before = max(0, rows.shape[1] - 1 - windows.stride) if windows.stride else 0
    batch = min(batch, len(rows))
    for start in range(0, len(rows), batch):
        part = rows[start : start + batch]
        padded = jnp.asarray(np.concatenate([part, np.repeat(part[-1:], batch - len(part), 0)]))
        values = jax.tree.map(lambda x: np.asarray(x, np.float64), values_of(padded))
        for i in range(len(part)):
            # What overlaps was scored in the window before.
            own = i, slice(scored_before if start + i else 0, None)
            yield jax.tree.map(lambda x, own=own: x[own], values)
        advance(len(part))


_token_nll = jax.jit(token_nll)
