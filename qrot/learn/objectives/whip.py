"""How few of the values at a site are small (DartQuant, 2025)."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from qrot.calibrate.capture import Captured
from qrot.learn.objective import Objective
from qrot.learn.site_wise import sum_sites, unit_mean_square
from qrot.model.params import Network
from qrot.rotation.transform import Transform


def whip(transform: Transform, network: Network, captured: Captured) -> Float[Array, ""]:
    """Mean of exp(-|y|), y scaled to a mean square of 1: small if few y are. Summed over sites.

    Shao et al.: DartQuant, 2025, arXiv 2511.04063. Arguments as for `fisher`.
    """

    def site_loss(x, g, weight, grid, basis, clip) -> Float[Array, ""]:
        y = unit_mean_square(basis.forward(x))
        return weight @ jnp.exp(-jnp.abs(y)).reshape(len(x), -1).mean(-1)

    return sum_sites(site_loss, transform, network, captured)


RECORD = Objective("whip", whip, "captured", "mean of exp(-|y|), sum of sites", scales=False)
