"""Next-token cross-entropy of the quantised network (SpinQuant, 2024)."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from qrot.evaluate.losses import token_nll
from qrot.learn.objective import Objective
from qrot.learn.quantised import quantised_logits
from qrot.model.params import Network
from qrot.rotation.transform import Transform


def cross_entropy(
    transform: Transform,
    network: Network,
    tokens: Int[Array, "batch length"],
    *,
    remat: bool = False,
) -> Float[Array, ""]:
    """Cross-entropy of the quantised network's predictions, in nats a token.

    Liu et al.: SpinQuant, 2024, arXiv 2405.16406. Arguments as for `quantised_logits`.
    """
    logits = quantised_logits(transform, network, tokens, remat=remat)
    return token_nll(logits, tokens).mean()


RECORD = Objective(
    "cross_entropy", cross_entropy, "tokens", "cross-entropy (nats per token)", remat=True
)
