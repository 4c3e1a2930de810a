"""The bases in which sites are quantised: a rotation and scales, there and back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from qrot.rotation.forms import Rotation, rotate, unrotate
from qrot.rotation.transform import Transform
from qrot.sites import SITES, Site

Map = Callable[[Array], Array]


class Basis(NamedTuple):
    """What happens to x at one site of one layer: its grid sees x A, A being R f or f R."""

    forward: Map  # x -> x A
    inverse: Map  # y -> y A^-1
    cotangent: Map  # g -> g A^-T: derivatives by x, and queries where keys are scaled


IDENTITY = Basis(*(lambda x: x,) * 3)


def site_basis(site: Site, transform: Transform, head_dim: int) -> Basis:
    """The basis of a site of one layer.

    Args:
        site: a row of `SITES`.
        transform: of that layer.
        head_dim: values of a head.

    Returns:
        Functions of vectors [..., width]; of keys and values [..., kv_heads, head_dim].
    """
    rotation = transform.rotations.get(site.rotation or "")
    log = transform.scales.get(site.scale or "")
    if log is not None and site.name == "keys":
        log = pairs(log)
    size = head_dim if site.per_head else None

    def scaled(x: Array, sign: int) -> Array:
        return x if log is None else scale_heads(x, sign * log, size)

    def forward(x: Array, sign: int = 1) -> Array:
        if site.scale_first:
            return per_head(rotate, scaled(x, sign), rotation, size)
        return scaled(per_head(rotate, x, rotation, size), sign)

    def inverse(y: Array) -> Array:
        if site.scale_first:
            return scaled(per_head(unrotate, y, rotation, size), -1)
        return per_head(unrotate, scaled(y, -1), rotation, size)

    found = Basis(forward, inverse, partial(forward, sign=-1))
    return Basis(*map(_of_split_heads, found)) if site.cached else found


def _of_split_heads(function: Map) -> Map:
    """A function of heads side by side as one of [..., heads, head_dim]."""
    return lambda x: function(x.reshape(*x.shape[:-2], -1)).reshape(x.shape)


def site_bases(transform: Transform, head_dim: int) -> dict[str, Basis]:
    """`site_basis` of every site of one layer, by name."""
    return {name: site_basis(site, transform, head_dim) for name, site in SITES.items()}


def per_head(
    function: Callable[[Array, Rotation | None], Array],
    x: Float[Array, "*batch n"],
    rotation: Rotation | None,
    head_dim: int | None,
) -> Float[Array, "*batch n"]:
    """A `function`, `rotate` or `unrotate`, of each run of head_dim values; of all if that is None.

    A rotation with a stack is one for each kv head, which serve as many query heads each as there
    are.
    """
    if rotation is None or head_dim is None:
        return function(x, rotation)
    heads = x.reshape(*x.shape[:-1], -1, head_dim)
    if not rotation.stack:
        return function(heads, rotation).reshape(x.shape)
    each = jax.tree.map(lambda r: over_heads(r, heads.shape[-2]), rotation)
    return jax.vmap(function, in_axes=(-2, 0), out_axes=-2)(heads, each).reshape(x.shape)


def scale_heads(
    x: Float[Array, "*batch n"], log: Float[Array, "..."], head_dim: int | None
) -> Float[Array, "*batch n"]:
    """x times e^log; with head_dim, log [kv_heads, head_dim] serves all heads that share one."""
    return scale(x, log if head_dim is None else flat_scales(log, x.shape[-1] // head_dim))


def flat_scales(log: Float[Array, "kv_heads head_dim"], heads: int) -> Float[Array, " n"]:
    """Scales of kv heads for the channels of so many heads side by side."""
    return over_heads(log, heads).ravel()


def over_heads(x: Float[Array, "kv_heads *n"], heads: int) -> Float[Array, "heads *n"]:
    """What belongs to kv heads (or to one for all), repeated for all the heads that share them."""
    return jnp.repeat(x, heads // x.shape[0], axis=0)


def pairs(log: Float[Array, "kv_heads pairs"]) -> Float[Array, "kv_heads head_dim"]:
    """The scales of keys for both channels of each pair that RoPE turns."""
    return jnp.tile(log, (1, 2))


def scale(x: Float[Array, "*batch n"], log: Float[Array, "..."]) -> Float[Array, "*batch n"]:
    """x times e^log."""
    return x * jnp.exp(log).astype(x.dtype)
