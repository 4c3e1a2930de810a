"""The error of what each site's readers compute, on captured inputs."""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Float

from qrot.calibrate.capture import Captured
from qrot.grid import fake_quantise
from qrot.learn.objective import Objective
from qrot.learn.quantised import rounding
from qrot.learn.site_wise import LayerView, sum_layers
from qrot.model.params import Layers, Network
from qrot.rotation.forms import rotate
from qrot.rotation.transform import Transform
from qrot.sites import SITES, Site


def reconstruction(transform: Transform, network: Network, captured: Captured) -> Float[Array, ""]:
    """Mean over layers and sites of ||X W - Q(X A) Q(A^-1 W)||^2 / ||X W||^2.

    Sites: the inputs of q, k, v; of o; of gate, up; of down; and keys and values, for which W = I.
    First tokens are left out: theirs would be the only errors that count.

    Args:
        transform: what is put on the network.
        network: folded, with nothing online.
        captured: of it.
    """
    prepare = rounding(network)

    def one_layer(view: LayerView) -> Float[Array, ""]:
        total, rounded = jnp.zeros(()), None
        if prepare is not None:
            rounded, _ = prepare(view.layer, view.transform, view.grids)
        for name, site in SITES.items():
            if not view.grids.sites[name].on and (rounded is None or site.cached):
                continue
            x = view.inputs[name][captured.first :]
            y = _quantised(x, view, site, network.scheme.scale_gradient)
            pairs = _outputs(x, y, view, site, rounded)
            wrong = sum(jnp.square(a - b).sum() for a, b in pairs)
            total = total + wrong / sum(jnp.square(b).sum() for _, b in pairs)
        return total

    total = sum_layers(one_layer, transform, network, captured)
    return total / network.config.num_hidden_layers


def _quantised(x: Array, view: LayerView, site: Site, scale_gradient: bool) -> Array:
    """Inputs of a site on its grid, in its basis."""
    forward, mu = view.bases[site.name].forward, view.transform.shifts.get(site.name)
    y = fake_quantise(
        forward(x if mu is None else x - mu),
        view.grids.sites[site.name],
        clip=view.transform.clips.get(site.name),
        scale_gradient=scale_gradient,
    )
    return y if mu is None else y + forward(mu)


def _outputs(
    x: Array, y: Array, view: LayerView, site: Site, rounded: Layers | None
) -> list[tuple[Array, Array]]:
    """(What is computed of y, what should be of x) of each reader; of the cache, that itself.

    rounded: weights in the bases of their sites; None where they are left alone.
    """
    if site.cached or rounded is None:
        y = view.bases[site.name].inverse(y)
    if site.cached:
        return [(y, x)]
    exact = {name: x @ view.layer.linear(name).weight for name in site.readers}
    if rounded is None:
        return [(y @ view.layer.linear(name).weight, z) for name, z in exact.items()]
    residual = partial(rotate, rotation=view.transform.rotations.get("residual"))
    bases = {"v": view.bases["o"].forward, "o": residual, "down": residual}
    return [
        (y @ rounded.linear(name).weight, bases[name](z) if name in bases else z)
        for name, z in exact.items()
    ]


RECORD = Objective(
    "reconstruction",
    reconstruction,
    "captured",
    "reconstruction error (relative to the output's energy)",
)
