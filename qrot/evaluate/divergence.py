"""How far the predictions of one network are from those of another, token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from qrot.evaluate.losses import token_divergence, token_nll
from qrot.evaluate.perplexity import Windows, scored_tokens

Logits = Callable[[Int[Array, "batch length"]], Float[Array, "batch length vocab"]]


class TokenDifferences(NamedTuple):
    """Two predictions of each token but the first, in nats.

    Attributes:
        exact_nll: negative log-likelihood by the first network.
        nll: by the second.
        kl: divergence of the second from the first, KL(first || second).
        flipped: 1 where they have another most likely token, 0 elsewhere.
    """

    exact_nll: Float[Any, "*tokens"]
    nll: Float[Any, "*tokens"]
    kl: Float[Any, "*tokens"]
    flipped: Float[Any, "*tokens"]


class Divergence(NamedTuple):
    """Two networks on a text.

    Attributes:
        tokens: that are scored.
        exact_nll: nats a token of the first.
        nll: of the second.
        kl: mean divergence of the second from the first, in nats a token.
        kl_p99: its 99th percentile over tokens.
        flips: share of the tokens at which they have another most likely one.
    """

    tokens: int
    exact_nll: float
    nll: float
    kl: float
    kl_p99: float
    flips: float


def token_differences(
    exact: Float[Array, "batch length vocab"],
    logits: Float[Array, "batch length vocab"],
    tokens: Int[Array, "batch length"],
) -> TokenDifferences:
    """What two predictions of the same tokens differ in.

    Args:
        exact: logits of the network that is compared with.
        logits: of the other.
        tokens: that are predicted.

    Returns:
        Arrays of the shape [batch, length - 1], at least in float32.
    """
    before, after = exact[:, :-1], logits[:, :-1]
    kl = token_divergence(before, after)
    flipped = before.argmax(-1) != after.argmax(-1)
    nll = token_nll(exact, tokens), token_nll(logits, tokens)
    return TokenDifferences(*nll, kl, flipped.astype(kl.dtype))


def compare(
    exact_of: Logits,
    logits_of: Logits,
    rows: Int[np.ndarray, "count length"],
    windows: Windows,
    *,
    batch: int = 2,
    advance: Callable[[int], None] = lambda done: None,
) -> Divergence:
    """Compare two networks on a text, in one pass; the logits of one batch are there at a time.

    Args:
        exact_of: jit-compiled logits of the network that is compared with, of a batch of rows.
        logits_of: those of the other.
        rows: tokens of the windows.
        windows: how they were cut; what overlaps counts once.
        batch: rows that run at once.
        advance: called with the rows of each batch that is done.
    """
    return compare_all(exact_of, (logits_of,), rows, windows, batch=batch, advance=advance)[0]


def compare_all(
    exact_of: Logits,
    others: Sequence[Logits],
    rows: Int[np.ndarray, "count length"],
    windows: Windows,
    *,
    batch: int = 2,
    advance: Callable[[int], None] = lambda done: None,
) -> list[Divergence]:
    """Compare several networks with one, whose logits are computed once; arguments as `compare`."""

    def differences(tokens: Int[Array, "batch length"]) -> list[TokenDifferences]:
        exact = exact_of(tokens)
        return [_differences(exact, logits_of(tokens), tokens) for logits_of in others]

    found = scored_tokens(differences, rows, windows, batch=batch, advance=advance)
    return [_summary(parts) for parts in zip(*found, strict=True)]


def _summary(parts: Sequence[TokenDifferences]) -> Divergence:
    """Of all windows."""
    exact, nll, kl, flipped = (np.concatenate(part) for part in zip(*parts, strict=True))
    return Divergence(
        tokens=len(kl),
        exact_nll=float(exact.mean()),
        nll=float(nll.mean()),
        kl=float(kl.mean()),
        kl_p99=float(np.quantile(kl, 0.99)),
        flips=float(flipped.mean()),
    )


_differences = jax.jit(token_differences)
