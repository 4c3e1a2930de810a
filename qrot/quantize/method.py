"""What a way to round weights is, and what all of them do alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from qrot.grid import Grid
from qrot.model.params import Layers, Network
from qrot.scheme import LayerScheme, Scheme, layer_schemes
from qrot.sites import INPUTS, PROJECTIONS, SITES

Advance = Callable[..., None]  # called after each part; `note=` says more of it
Rows = Int[np.ndarray, "count length"]


def no_check(network: Network, settings: Any) -> None:
    """The check of a method that refuses nothing beforehand."""


class WeightMethod(NamedTuple):
    """One way to round weights.

    Attributes:
        name: in configurations, as `weights.method`.
        settings: a frozen dataclass whose first field is `method`.
        round: (network, rows, settings, *, batch, advance) -> the network with the weights of its
            linear layers rounded to `network.scheme.weights`; embedding and head are left alone.
        label: for tables and progress.
        text: the windows that it reads: none, of the calibration text, or what the network itself
            has written (`generate_text`).
        compensates: whether it makes up for the errors of rounding by what the weights read, so
            that rotations for it are learned with weights left alone.
        check: (network, settings), raises InputError where the method cannot round this network.
        scales_inputs: whether it scales what the weights read by which channels of it are large.
            Rotations, which make all channels alike, and shifts, measured before, do not suit it.
        facts: settings -> what a row of results tells of them.
    """

    name: str
    settings: type
    round: Callable[..., Network]
    label: str
    text: Literal["none", "calibration", "generated"]
    compensates: bool = False
    check: Callable[[Network, Any], None] = no_check
    scales_inputs: bool = False
    facts: Callable[[Any], dict[str, Any]] = lambda settings: {}


def network_grids(network: Network) -> list[LayerScheme]:
    """The grids of each layer."""
    return layer_schemes(network.scheme, network.config.num_hidden_layers)


def rounded_sites(grids: list[LayerScheme]) -> list[tuple[str, ...]]:
    """Of each layer the sites with a weight to be rounded."""
    return [
        tuple(s for s in INPUTS if any(g.weights[n].on for n in SITES[s].readers)) for g in grids
    ]


def on_symmetric_grid(scheme: Scheme, layers: int) -> tuple[str, ...]:
    """The projections that have a `Linear.scale` once they are rounded: in any of the layers."""
    if scheme.weights.kind == "asymmetric":
        return ()
    grids = layer_schemes(scheme, layers)
    return tuple(n for n in PROJECTIONS if any(g.weights[n].on for g in grids))


def with_weights(
    layer: Layers,
    rounded: dict[str, tuple[Float[Array, "in out"], Float[Array, "groups out"] | None]],
) -> Layers:
    """A layer with other weights in some of its projections.

    Args:
        layer: one (no `layers` axis).
        rounded: by projection the weight, and its scales as `Linear` has them.
    """
    return layer.replace(
        **{n: layer.linear(n).replace(weight=w, scale=scale) for n, (w, scale) in rounded.items()}
    )


def with_unit_scales(layer: Layers, network: Network) -> Layers:
    """A layer before it is rounded: a scale of 1 in each projection that any layer has one in.

    Layers are stacked, so that one that is left at 16 bits has a scale, too, where others do.
    """
    scheme, count = network.scheme, network.config.num_hidden_layers
    linears = {name: layer.linear(name) for name in on_symmetric_grid(scheme, count)}
    return layer.replace(
        **{
            name: linear.replace(scale=unit_scale(linear.weight, scheme.weights))
            for name, linear in linears.items()
        }
    )


def unit_scale(weight: Float[Any, "in out"], grid: Grid) -> Float[Array, "groups out"]:
    """Scales of 1, as many as the grid has for this weight (one a group and output)."""
    groups = 1 if grid.group is None else weight.shape[0] // grid.group
    return jnp.ones((groups, weight.shape[1]), jnp.promote_types(weight.dtype, jnp.float32))
