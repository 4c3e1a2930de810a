"""What is put on a network: all of it as it is fitted, and what is left online once it is fused."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
from flax import struct
from jaxtyping import Float

from qrot.rotation.forms import Rotation, Values, is_rotation


class Transform(struct.PyTreeNode):
    """All that is put on a network without changing its function; what is not there is left alone.

    Attributes:
        rotations: by name. `residual` (R1): the residual stream, one for the model. `value` (R2):
            the value heads, by layer, or by layer and kv head. `key` (R3): queries and keys after
            the rotary embedding, and `down` (R4): the input of down_proj; one for all layers, or
            by layer (and kv head).
        scales: natural logarithms of factors f by channel (OSTQuant, 2025), by `Site.scale`: a
            grid sees (x R) f, or (x f) R where the site scales first, and the weights that read it
            are divided by f. qkv, gate_up: [layers, hidden]; down: [layers, intermediate]; keys:
            [layers, kv_heads, head_dim / 2], one a pair of channels that RoPE turns, or [layers, 1,
            head_dim / 2] where kv heads share a norm; values: [layers, kv_heads, head_dim].
        shifts: one constant vector mu a site that projections read, [layers, width]: quantise
            x - mu and add mu back, which in a deployed model is the bias mu W. In the basis of the
            network as it is.
        clips: clip ratios by site, in place of the grid's, [layers].
    """

    rotations: dict[str, Rotation] = struct.field(default_factory=dict)
    scales: dict[str, Float[Values, "..."]] = struct.field(default_factory=dict)
    shifts: dict[str, Float[Values, "*layers width"]] = struct.field(default_factory=dict)
    clips: dict[str, Float[Values, "*layers"]] = struct.field(default_factory=dict)


class Online(struct.PyTreeNode):
    """What of a `Transform` acts at run time once the weights hold the rest.

    Attributes:
        rotations: by name: key, and down, whose inverse is in the weights.
        shifts: by site, in the basis of the fused weights, [layers, width].
        clips: by site, [layers].
    """

    rotations: dict[str, Rotation] = struct.field(default_factory=dict)
    shifts: dict[str, Float[Values, "*layers width"]] = struct.field(default_factory=dict)
    clips: dict[str, Float[Values, "*layers"]] = struct.field(default_factory=dict)


T = TypeVar("T", bound=Transform | Online)


def split_layers(acting: T) -> tuple[T, dict[str, Rotation]]:
    """(All that each layer has of its own, stacked on a leading axis; the rotations they share)."""
    own = {name: r for name, r in acting.rotations.items() if r.stack}
    shared = {name: r for name, r in acting.rotations.items() if not r.stack}
    return acting.replace(rotations=own), shared


def of_layer(acting: T, i: Any) -> T:
    """What acts in one layer, or with a slice what acts in some."""
    own, shared = split_layers(acting)
    return with_shared(jax.tree.map(lambda x: x[i], own), shared)


def with_shared(own: T, shared: dict[str, Rotation]) -> T:
    """One layer's own part of `split_layers` with what all layers share."""
    return own.replace(rotations={**shared, **own.rotations})


def map_rotations(function: Any, rotations: dict[str, Rotation]) -> dict[str, Any]:
    """`function` of each rotation."""
    return jax.tree.map(function, rotations, is_leaf=is_rotation)
