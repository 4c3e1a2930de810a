"""How far the values at a site are from a uniform distribution (KurTail, 2025)."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from qrot.calibrate.capture import Captured
from qrot.learn.objective import Objective
from qrot.learn.site_wise import sum_sites, unit_mean_square
from qrot.model.params import Network
from qrot.rotation.transform import Transform

UNIFORM = 1.8  # kurtosis of the uniform distribution


def kurtosis(transform: Transform, network: Network, captured: Captured) -> Float[Array, ""]:
    """Mean distance of a token's kurtosis from that of a uniform distribution, summed over sites.

    Akhondzadeh et al.: KurTail, 2025, arXiv 2503.01483. Arguments as for `fisher`.
    """

    def site_loss(x, g, weight, grid, basis, clip) -> Float[Array, ""]:
        fourth = jnp.square(jnp.square(unit_mean_square(basis.forward(x)))).mean(-1)
        return weight @ jnp.abs(fourth - UNIFORM).reshape(len(x), -1).mean(-1)

    return sum_sites(site_loss, transform, network, captured)


RECORD = Objective(
    "kurtosis",
    kurtosis,
    "captured",
    "distance from a uniform kurtosis, sum of sites",
    scales=False,
)
