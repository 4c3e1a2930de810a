"""Objectives of the whole quantised network, on rows of tokens."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from qrot.evaluate.perplexity import token_nll
from qrot.model.config import ModelConfig
from qrot.model.forward import forward
from qrot.network import rotate_shifts
from qrot.model.params import Params
from qrot.quantize.rtn import rotate_and_round
from qrot.rotation.forms import Learned
from qrot.scheme import Scheme


def cross_entropy(
    learned: Learned,
    params: Params,
    tokens: Int[Array, "batch length"],
    config: ModelConfig,
    scheme: Scheme,
    *,
    remat: bool = False,
) -> Float[Array, ""]:
    """Next-token cross-entropy of the quantised network, nats a token (SpinQuant, 2024)."""
    logits = quantised_logits(learned, params, tokens, config, scheme, remat=remat)
    return token_nll(logits, tokens).mean()


def kl(
    learned: Learned,
    params: Params,
    tokens: Int[Array, "batch length"],
    config: ModelConfig,
    scheme: Scheme,
    *,
    top: int | None = None,
    remat: bool = False,
) -> Float[Array, ""]:
    """KL(p || q) of the quantised network's predictions q from the full-precision ones p, nats.

    Mean over all positions. No label enters, so there is no text to adapt to but through p. With
    top, both are restricted to the `top` likeliest tokens of p at each position, and each is
    normalised there (OSTQuant, 2025).
    """
    exact = jax.lax.stop_gradient(forward(params, tokens, config))
    logits = quantised_logits(learned, params, tokens, config, scheme, remat=remat)
    if top is not None:
        exact, index = jax.lax.top_k(exact, min(top, config.vocab_size))
        logits = jnp.take_along_axis(logits, index, axis=-1)
    return divergence(exact, logits)


def divergence(
    exact: Float[Array, "batch length vocab"], logits: Float[Array, "batch length vocab"]
) -> Float[Array, ""]:
    """KL(p || q) in nats, the mean over all positions: p by the exact logits, q by the others."""
    wide = jnp.promote_types(logits.dtype, jnp.float32)
    log_p, log_q = (jax.nn.log_softmax(x.astype(wide), axis=-1) for x in (exact, logits))
    return (jnp.exp(log_p) * (log_p - log_q)).sum(-1).mean()


def quantised_logits(
    learned: Learned,
    params: Params,
    tokens: Int[Array, "batch length"],
    config: ModelConfig,
    scheme: Scheme,
    *,
    remat: bool = False,
) -> Float[Array, "batch length vocab"]:
    """Logits of the rotated, quantised network; params are folded, and not rotated.

    With weights at 16 bits no weight is touched: each site computes Q(x R) R^T. With fewer, each
    layer's weights are rotated and rounded on their way through the scan.
    """
    rotations, shifts, scales = learned.rotations, learned.shifts, learned.scales
    if scheme.rounds_weights:
        if shifts is not None:
            shifts = rotate_shifts(shifts, rotations, config, scales)
        rotations = rotations.replace(fused=True)

    prepare = partial(rotate_and_round, config=config, scheme=scheme)
    return forward(
        params,
        tokens,
        config,
        rotations=rotations,
        scheme=scheme,
        shifts=shifts,
        clips=learned.clips,
        scales=scales,
        prepare=prepare if scheme.rounds_weights else None,
        remat=remat,
    )
