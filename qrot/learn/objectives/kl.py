"""Divergence of the quantised network's predictions from those in full precision."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from qrot.evaluate.losses import divergence
from qrot.learn.objective import Objective
from qrot.learn.quantised import quantised_logits
from qrot.model.forward import forward
from qrot.model.params import Network
from qrot.rotation.transform import Transform
from qrot.scheme import Scheme

TOP = 100  # tokens of kl_top


def kl(
    transform: Transform,
    network: Network,
    tokens: Int[Array, "batch length"],
    *,
    top: int | None = None,
    remat: bool = False,
) -> Float[Array, ""]:
    """KL(p || q) of the quantised network's predictions q from the full-precision ones p, in nats.

    Mean over all positions. No label enters, so there is no text to adapt to but through p.

    Args:
        transform: as for `quantised_logits`.
        network: likewise.
        tokens: likewise.
        top: restrict both to so many of the likeliest tokens of p at each position, where each is
            normalised (OSTQuant, 2025, arXiv 2501.13987); None for all tokens.
        remat: as for `forward`.
    """
    exact = jax.lax.stop_gradient(forward(network.replace(scheme=Scheme()), tokens))
    logits = quantised_logits(transform, network, tokens, remat=remat)
    if top is not None:
        exact, index = jax.lax.top_k(exact, min(top, network.config.vocab_size))
        logits = jnp.take_along_axis(logits, index, axis=-1)
    return divergence(exact, logits)


KL = Objective("kl", kl, "tokens", "KL to full precision (nats per token)", remat=True)
KL_TOP = Objective(
    "kl_top",
    partial(kl, top=TOP),
    "tokens",
    "KL to full precision, top tokens (nats per token)",
    remat=True,
)
