"""The bases in which activations are rounded: rotation and scale of each site, there and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from qrot.rotation.rotations import Rotations, Scales, over_heads, per_head, rotate, unrotate


class Site(NamedTuple):
    """What to do at one site of one layer. x A is what its grid sees, A being R f or f R."""

    go: Callable[[Array], Array]  # x -> x A
    back: Callable[[Array], Array]  # y -> y A^-1
    dual: Callable[[Array], Array]  # g -> g A^-T: gradients, and queries where keys are scaled


def layer_sites(rotations: Rotations, scales: Scales | None, head_dim: int) -> dict[str, Site]:
    """The sites of one layer by name.

    rotations, scales: of that layer. Of fused rotations only the online ones act, and no scale.
    Inputs are vectors [..., n]; at keys and values [..., heads, head_dim].
    """
    scales = scales or Scales()
    residual, value, key, down = rotations.residual, rotations.value, rotations.key, rotations.down
    if rotations.fused:
        residual, value, scales = None, None, Scales()

    def rotated_first(rotation, log) -> Site:
        def go(x, log=log):
            return scale(rotate(x, rotation), log)

        return Site(
            go, lambda y: unrotate(unscale(y, log), rotation), lambda g: go(g, negative(log))
        )

    def scaled_first(rotation, log) -> Site:
        def go(x, log=log):
            return rotate(scale(x, log), rotation)

        return Site(
            go, lambda y: unscale(unrotate(y, rotation), log), lambda g: go(g, negative(log))
        )

    def flat_heads(turn, x, log):
        return turn(x, value, log, head_dim)

    def value_heads(turn, x, log):
        return turn(x.reshape(*x.shape[:-2], -1), value, log, head_dim).reshape(x.shape)

    def of_values(shape) -> Site:
        log = scales.values
        return Site(
            lambda x: shape(rotate_heads, x, log),
            lambda y: shape(unrotate_heads, y, log),
            lambda g: shape(rotate_heads, g, negative(log)),
        )

    def key_heads(turn, x):
        return per_head(turn, x.reshape(*x.shape[:-2], -1), key, head_dim).reshape(x.shape)

    def scale_keys(x, log):
        return x if log is None else scale(x, pairs(log, x.shape[-2]))

    return {
        "qkv": rotated_first(residual, scales.qkv),
        "keys": Site(
            lambda x: key_heads(rotate, scale_keys(x, scales.keys)),
            lambda y: scale_keys(key_heads(unrotate, y), negative(scales.keys)),
            lambda g: key_heads(rotate, scale_keys(g, negative(scales.keys))),
        ),
        "values": of_values(value_heads),
        "o": of_values(flat_heads),
        "gate_up": rotated_first(residual, scales.gate_up),
        "down": scaled_first(down, scales.down),
    }


def scale(x: Float[Array, "*batch n"], log) -> Float[Array, "*batch n"]:
    """x times e^log; x itself where log is None."""
    return x if log is None else x * jnp.exp(log).astype(x.dtype)


def unscale(x: Float[Array, "*batch n"], log) -> Float[Array, "*batch n"]:
    """The inverse of `scale`."""
    return scale(x, negative(log))


def negative(log: Any) -> Any:
    """The logarithms of the inverse factors; None for None."""
    return None if log is None else -log


def pairs(log: Float[Array, "kv_heads pairs"], heads: int) -> Float[Array, "heads head_dim"]:
    """`Scales.keys` of one layer for each head and channel."""
    return over_heads(jnp.tile(log, (1, 2)), heads)


def rotate_heads(
    x: Float[Array, "*batch n"], rotation, log, head_dim: int
) -> Float[Array, "*batch n"]:
    """To the basis in which the values of one layer, and what attention makes of them, are rounded.

    log: `Scales.values` of that layer, or None.
    """
    x = per_head(rotate, x, rotation, head_dim)
    return x if log is None else scale(x, over_heads(log, x.shape[-1] // head_dim).ravel())


def unrotate_heads(
    x: Float[Array, "*batch n"], rotation, log, head_dim: int
) -> Float[Array, "*batch n"]:
    """The inverse of `rotate_heads`."""
    if log is not None:
        x = unscale(x, over_heads(log, x.shape[-1] // head_dim).ravel())
    return per_head(unrotate, x, rotation, head_dim)
