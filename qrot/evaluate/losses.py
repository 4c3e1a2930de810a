"""Losses of predictions: of the tokens that follow, and against other predictions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def token_nll(
    logits: Float[Array, "batch length vocab"], tokens: Int[Array, "batch length"]
) -> Float[Array, "batch length-1"]:
    """Negative log-likelihood in nats of each token but the first, given those before it.

    Args:
        logits: of the tokens, of any floating dtype.
        tokens: whose likelihood it is.

    Returns:
        Nats, at least in float32.
    """
    logits = logits[:, :-1].astype(jnp.promote_types(logits.dtype, jnp.float32))
    target = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - target


def divergence(
    exact: Float[Array, "batch length vocab"], logits: Float[Array, "batch length vocab"]
) -> Float[Array, ""]:
    """Kullback-Leibler divergence KL(p || q) in nats, the mean over all positions.

    Args:
        exact: logits of p.
        logits: of q, in whose dtype it is computed, at least in float32.
    """
    return token_divergence(exact, logits).mean()


def token_divergence(
    exact: Float[Array, "*batch vocab"], logits: Float[Array, "*batch vocab"]
) -> Float[Array, "*batch"]:
    """Kullback-Leibler divergence KL(p || q) in nats at each position; see `divergence`."""
    wide = jnp.promote_types(logits.dtype, jnp.float32)
    log_p, log_q = (jax.nn.log_softmax(x.astype(wide), axis=-1) for x in (exact, logits))
    return (jnp.exp(log_p) * (log_p - log_q)).sum(-1)
