"""Sums over the sites of all layers, on captured inputs: no pass through the network."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from qrot.calibrate.capture import Captured
from qrot.grid import Grid
from qrot.model.forward import runs_of_layers
from qrot.model.params import Layers, Network
from qrot.rotation.basis import Basis, site_bases
from qrot.rotation.transform import Transform, split_layers, with_shared
from qrot.scheme import LayerScheme
from qrot.sites import SITES

# Of a site of one layer: vectors less their shift, the derivatives there, the share of all tokens
# that each vector stands for, grid, basis and clip ratio.
SiteLoss = Callable[[Array, Any, Array, Grid, Basis, Array | None], Float[Array, ""]]


class LayerView(NamedTuple):
    """One layer: what was captured there, and all that acts on it.

    Attributes:
        layer: its weights.
        grids: of it.
        transform: what is put on it.
        bases: of its sites.
        inputs: by site, [vectors, width], of keys and values [vectors, kv_heads, head_dim].
        gradients: the same shapes, or None.
    """

    layer: Layers
    grids: LayerScheme
    transform: Transform
    bases: dict[str, Basis]
    inputs: dict[str, Array]
    gradients: dict[str, Array] | None


def sum_layers(
    one_layer: Callable[[LayerView], Float[Array, "..."]],
    transform: Transform,
    network: Network,
    captured: Captured,
    *,
    shape: tuple[int, ...] = (),
) -> Float[Array, "..."]:
    """Sum of a function of one layer over all of them, scanned.

    Args:
        one_layer: given a layer, with its vectors at least in float32.
        transform: what is put on the network.
        network: its layers and its scheme.
        captured: of it.
        shape: of what the function returns.
    """
    _, shared = split_layers(transform)

    def wide(tree):
        return jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), tree)

    def step(total, inputs, grids):
        layer, per_layer, _, vectors, gradients = inputs
        acting = with_shared(per_layer, shared)
        bases = site_bases(acting, network.config.head_dim)
        view = LayerView(layer, grids, acting, bases, wide(vectors), wide(gradients))
        return total + one_layer(view), None

    total = jnp.zeros(shape)
    acting = network.replace(online=transform)
    for grids, inputs in runs_of_layers(acting, captured.inputs, captured.gradients):
        total, _ = jax.lax.scan(partial(step, grids=grids), total, inputs)
    return total


def sum_sites(
    site_loss: SiteLoss, transform: Transform, network: Network, captured: Captured
) -> Float[Array, ""]:
    """Sum of a function of one site over all sites that are quantised, of all layers."""

    def one_layer(view: LayerView) -> Float[Array, ""]:
        return sum(_site_losses(site_loss, view, captured).values(), start=jnp.zeros(()))

    return sum_layers(one_layer, transform, network, captured)


def sums_by_site(
    site_loss: SiteLoss, transform: Transform, network: Network, captured: Captured
) -> dict[str, Float[Array, ""]]:
    """The sum over the layers for each site; 0 for one that is not quantised."""

    def one_layer(view: LayerView) -> Float[Array, " sites"]:
        losses = _site_losses(site_loss, view, captured)
        return jnp.stack([losses.get(name, jnp.zeros(())) for name in SITES])

    sums = sum_layers(one_layer, transform, network, captured, shape=(len(SITES),))
    return dict(zip(SITES, sums, strict=True))


def _site_losses(
    site_loss: SiteLoss, view: LayerView, captured: Captured
) -> dict[str, Float[Array, ""]]:
    """Those of the sites of one layer that are quantised."""
    losses = {}
    for name, basis in view.bases.items():
        if not (grid := view.grids.sites[name]).on:
            continue
        x, mu = view.inputs[name], view.transform.shifts.get(name)
        x = x if mu is None else x - mu
        g = None if view.gradients is None else view.gradients[name]
        clip = view.transform.clips.get(name)
        losses[name] = site_loss(x, g, jnp.asarray(captured.weight), grid, basis, clip)
    return losses


def unit_mean_square(y: Float[Array, "*batch n"]) -> Float[Array, "*batch n"]:
    """Vectors scaled to a mean square of 1."""
    return y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + 1e-12)
