"""What rounding is expected to cost, by the Fisher information at every site."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from qrot.calibrate.capture import Captured
from qrot.grid import Grid, expected_error
from qrot.learn.objective import Objective
from qrot.learn.site_wise import sum_sites
from qrot.model.params import Network
from qrot.rotation.basis import Basis
from qrot.rotation.transform import Transform


def fisher(transform: Transform, network: Network, captured: Captured) -> Float[Array, ""]:
    """Nats a token that rounding activations and cache will cost, to second order.

    1/2 sum_i E[e_i^2] h_i^2: e is the rounding error in the basis that the grid sees (`qrot.grid.
    expected_error`), h the derivative there of the log-likelihood of the network's own predictions.
    Rounding errors of different values count as independent. Since KL(p || q) has the Fisher
    information as its second derivative, this estimates `kl` without running the network again.

    Args:
        transform: what is put on the network.
        network: with the scheme that rounds.
        captured: of it, with gradients.
    """
    return sum_sites(expected_cost, transform, network, captured)


def expected_cost(
    x: Float[Array, "tokens *width"],
    g: Float[Array, "tokens *width"],
    weight: Float[Array, " tokens"],
    grid: Grid,
    basis: Basis,
    clip: Float[Array, ""] | None = None,
) -> Float[Array, ""]:
    """`fisher` for one site of one layer.

    Args:
        x: inputs of the site.
        g: derivatives of the log-likelihood there.
        weight: the share of all tokens that each of them stands for.
        grid: of the site.
        basis: of the site.
        clip: ratio in place of the grid's own.
    """
    wrong = expected_error(basis.forward(x), grid, clip=clip)
    costs = (wrong * jnp.square(basis.cotangent(g))).reshape(len(x), -1).sum(-1)
    return weight @ costs / 2


RECORD = Objective(
    "fisher", fisher, "captured", "expected loss by rounding (nats per token)", gradients=True
)
