"""The network with a transform on it and everything on its grids; differentiable by the former."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Float, Int

from qrot.model.forward import Prepare, embedded, forward, project, run_layers
from qrot.model.params import Layers, Network
from qrot.quantize.rtn import fuse_and_round
from qrot.rotation.forms import rotate
from qrot.rotation.transform import Online, Transform
from qrot.scheme import LayerScheme


def quantised_logits(
    transform: Transform,
    network: Network,
    tokens: Int[Array, "batch length"],
    *,
    remat: bool = False,
) -> Float[Array, "batch length vocab"]:
    """Logits of the network with a transform on it, weights, activations and cache on their grids.

    With weights at 16 bits no weight is touched: each site computes Q(x A) A^-1. With fewer, each
    layer's weights are fused and rounded on their way through the scan.

    Args:
        transform: what is put on the network.
        network: folded, with nothing online.
        tokens: of texts of equal length.
        remat: as for `forward`.
    """
    acting = network.replace(online=transform)
    prepare = rounding(network)
    if prepare is None:
        return forward(acting, tokens, remat=remat)
    residual = transform.rotations.get("residual")
    hidden = rotate(embedded(network, tokens), residual)
    hidden = run_layers(acting, hidden, prepare=prepare, remat=remat)
    return project(network, hidden, residual)


def rounding(network: Network) -> Prepare | None:
    """`fuse_and_round` for this network's layers; None where its scheme rounds no weight."""
    if not network.scheme.rounds_weights:
        return None

    def prepare(layer: Layers, transform: Any, grids: LayerScheme) -> tuple[Layers, Online]:
        scale_gradient = network.scheme.scale_gradient
        return fuse_and_round(
            layer, transform, grids, config=network.config, scale_gradient=scale_gradient
        )

    return prepare
