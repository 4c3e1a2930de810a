"""The one table of sites: every place where activations or cache entries are quantised."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@runtime_checkable
class Sizes(Protocol):
    """The sizes that sites need to know; any model's configuration has them."""

    @property
    def hidden_size(self) -> int: ...  # noqa: D102
    @property
    def intermediate_size(self) -> int: ...  # noqa: D102
    @property
    def num_hidden_layers(self) -> int: ...  # noqa: D102
    @property
    def num_attention_heads(self) -> int: ...  # noqa: D102
    @property
    def num_key_value_heads(self) -> int: ...  # noqa: D102
    @property
    def head_dim(self) -> int: ...  # noqa: D102


@dataclass(frozen=True)
class Site:
    """One row of `SITES`.

    Attributes:
        name: of the site.
        width: values of one token there, all heads together.
        grid: the field of `Scheme` that says how they are rounded.
        rotation: the rotation that acts there, by its name in `Transform.rotations`; None for none.
        scale: the log-scales that act there, by their name in `Transform.scales`; None for none.
        readers: the projections that read the site.
        per_head: whether the rotation acts on each head by itself.
        cached: whether it is a part of the cache: [..., kv_heads, head_dim], where others are
            [..., width].
        scale_first: whether the scales act before the rotation; otherwise after it.
        online: whether the rotation acts at run time even when it is fused, as nothing that writes
            the site can hold it. Its inverse is in the readers, or for keys in the queries.
    """

    name: str
    width: Callable[[Sizes], int]
    grid: str
    rotation: str | None = None
    scale: str | None = None
    readers: tuple[str, ...] = ()
    per_head: bool = False
    cached: bool = False
    scale_first: bool = False
    online: bool = False

    def rotation_size(self, sizes: Sizes) -> int:
        """The order of the rotation that acts here."""
        return sizes.head_dim if self.per_head else self.width(sizes)


def _hidden(sizes: Sizes) -> int:
    return sizes.hidden_size


def _heads(sizes: Sizes) -> int:
    return sizes.num_attention_heads * sizes.head_dim


def _kv_heads(sizes: Sizes) -> int:
    return sizes.num_key_value_heads * sizes.head_dim


def _intermediate(sizes: Sizes) -> int:
    return sizes.intermediate_size


_ROWS = (
    Site("qkv", _hidden, "activations", "residual", "qkv", ("q", "k", "v")),
    Site(
        "keys",
        _kv_heads,
        "keys",
        "key",
        "keys",
        per_head=True,
        cached=True,
        scale_first=True,
        online=True,
    ),
    Site("values", _kv_heads, "values", "value", "values", per_head=True, cached=True),
    Site("o", _heads, "activations", "value", "values", ("o",), per_head=True),
    Site("gate_up", _hidden, "activations", "residual", "gate_up", ("gate", "up")),
    Site(
        "down",
        _intermediate,
        "activations",
        "down",
        "down",
        ("down",),
        scale_first=True,
        online=True,
    ),
)
SITES: dict[str, Site] = {site.name: site for site in _ROWS}
# The sites that projections read, in the order of a layer, and the site that each of them reads.
INPUTS: tuple[str, ...] = tuple(name for name, site in SITES.items() if site.readers)
PROJECTIONS: tuple[str, ...] = tuple(name for site in INPUTS for name in SITES[site].readers)
SITE_OF: dict[str, str] = {name: site for site in INPUTS for name in SITES[site].readers}


def rotation_site(rotation: str) -> Site:
    """A site at which the rotation of this name acts."""
    return next(site for site in SITES.values() if site.rotation == rotation)


ROTATIONS: tuple[str, ...] = tuple(
    dict.fromkeys(site.rotation for site in SITES.values() if site.rotation is not None)
)
ONLINE: tuple[str, ...] = tuple(name for name in ROTATIONS if rotation_site(name).online)
