"""How far the predictions of two networks are apart, token by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float64, Int

from qrot.evaluate.losses import token_nll

Logits = Callable[[Int[Array, "batch length"]], Float[Array, "batch length vocab"]]


class Agreement(NamedTuple):
    """Of two networks on the same tokens, each but the first of a window.

    Attributes:
        kl: Kullback-Leibler divergence KL(p || q) of the prediction of each token, in nats; p is
            that of the first network.
        flips: whether the likeliest token is another one.
        nll: negative log-likelihood of each token under the first network, in nats.
        other_nll: under the second.
    """

    kl: Float64[np.ndarray, " tokens"]
    flips: Bool[np.ndarray, " tokens"]
    nll: Float64[np.ndarray, " tokens"]
    other_nll: Float64[np.ndarray, " tokens"]


def agreement(
    exact: Logits,
    other: Logits,
    rows: Int[np.ndarray, "count length"],
    *,
    batch: int = 2,
    advance: Callable[[int], None] = lambda done: None,
) -> Agreement:
    """Compare the predictions of two networks.

    Args:
        exact: jit-compiled logits of the first.
        other: of the second.
        rows: tokens of windows, each scored but for its first token.
        batch: windows that run at once; the last batch is filled up.
        advance: called with the windows of each batch that is done.
    """
    parts = []
    for start in range(0, len(rows), batch):
        part = rows[start : start + batch]
        padded = jnp.asarray(np.concatenate([part, np.repeat(part[-1:], batch - len(part), 0)]))
        found = _apart(exact(padded), other(padded), padded)
        parts.append([np.asarray(x)[: len(part)].ravel() for x in found])
        advance(len(part))
    kl, flips, nll, other_nll = (np.concatenate(x) for x in zip(*parts, strict=True))
    return Agreement(
        kl.astype(np.float64), flips, nll.astype(np.float64), other_nll.astype(np.float64)
    )


@jax.jit
def _apart(
    exact: Float[Array, "batch length vocab"],
    other: Float[Array, "batch length vocab"],
    tokens: Int[Array, "batch length"],
) -> tuple[Array, Array, Array, Array]:
    wide = jnp.promote_types(exact.dtype, jnp.float32)
    log_p, log_q = (jax.nn.log_softmax(x[:, :-1].astype(wide), axis=-1) for x in (exact, other))
    # Rounding may make a divergence of nearly nothing negative.
    kl = jnp.maximum((jnp.exp(log_p) * (log_p - log_q)).sum(-1), 0)
    flips = log_p.argmax(-1) != log_q.argmax(-1)
    return kl, flips, token_nll(exact, tokens), token_nll(other, tokens)
