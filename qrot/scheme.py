"""The grids of a whole model: which bits where, with exceptions by layer and projection."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from typing import Any

from flax.core import FrozenDict

from qrot.errors import InputError
from qrot.grid import GRIDS, OFF, Grid
from qrot.sites import PROJECTIONS, SITES

_ALONE = Grid()  # 16 bits: what it is for is left alone
_GRANULARITY = {
    "weights": ("channel", "group", "tensor"),
    "activations": ("token", "group", "tensor"),
    "keys": ("head", "token", "group", "tensor"),
    "values": ("head", "token", "group", "tensor"),
}


@dataclass(frozen=True)
class Override:
    """Other bit widths for the names that match.

    Attributes:
        match: a shell pattern over `layers.<i>.<name>`, name one of q, k, v, o, gate, up, down
            (their weights and their input) and keys, values (the cache): `*.down`, `layers.0.*`.
        weights: bits; None for the scheme's.
        activations: bits; None for the scheme's.
        keys: bits; None for the scheme's.
        values: bits; None for the scheme's.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    match: str
    weights: int | None = None
    activations: int | None = None
    keys: int | None = None
    values: int | None = None

    def __post_init__(self):
        for role in _GRANULARITY:
            bits = getattr(self, role)
            if bits is not None and not 2 <= bits <= OFF:
                raise InputError(f"{role} bits: {bits} is outside 2 to {OFF}")

    @property
    def changes(self) -> bool:
        """Whether the override says anything."""
        return any(getattr(self, role) is not None for role in _GRANULARITY)


@dataclass(frozen=True)
class Scheme:
    """The grids of a whole model: W4A4KV4 is bits=4 for all four.

    Attributes:
        weights: of all linear layers.
        activations: of what they read.
        keys: of the cache.
        values: of the cache.
        overrides: exceptions by layer and projection; of those that match the last one counts.
        scale_gradient: whether the derivative of a quantiser follows its scale; False holds the
            scale constant, as the released SpinQuant does.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    weights: Grid = _ALONE
    activations: Grid = _ALONE
    keys: Grid = _ALONE
    values: Grid = _ALONE
    overrides: tuple[Override, ...] = ()
    scale_gradient: bool = True

    def __post_init__(self):
        for role, allowed in _GRANULARITY.items():
            grid: Grid = getattr(self, role)
            if grid.granularity is None:
                object.__setattr__(self, role, replace(grid, granularity=allowed[0]))
            elif grid.granularity not in allowed:
                raise InputError(
                    f"{role}: granularity '{grid.granularity}' is not one of {', '.join(allowed)}"
                )
            if grid.clip == "mse" and role != "weights":
                raise InputError(f"{role}: clip 'mse' is a search over fixed numbers: weights only")
            if grid.threshold and role != "activations":
                raise InputError(f"{role}: a threshold keeps channels of activations: only theirs")

    @property
    def rounds_weights(self) -> bool:
        """Whether any weight is rounded."""
        return self.weights.on or any((o.weights or OFF) < OFF for o in self.overrides)

    @property
    def name(self) -> str:
        """The short name in use in the field, such as W4A4KV4, or NVFP4KV16."""
        w, a, k, v = (grid.label for grid in self.grids.values())
        cache = f"KV{k}" if k == v else f"K{k}V{v}"
        if w in GRIDS and a in (w, str(OFF)):
            return f"{w}{cache}" if a == w else f"{w}A{a}{cache}"
        return f"W{w}A{a}{cache}"

    @property
    def in_integers(self) -> bool:
        """Whether bits alone say the codes of all grids."""
        return all(grid.integers or not grid.on for grid in self.grids.values())

    @property
    def grids(self) -> dict[str, Grid]:
        """Of weights, activations, keys and values."""
        return {role: getattr(self, role) for role in _GRANULARITY}


def scheme_named(name: str, weights: Grid, activations: Grid, cache: Grid = _ALONE) -> Scheme:
    """The scheme of a short name, on grids with the bits that it says.

    Args:
        name: such as W4A4KV4 or W4A16.
        weights, activations, cache: the grids apart from their bits.

    Raises:
        InputError: where it is no such name.
    """
    match = re.fullmatch(r"W(\d+)A(\d+)(?:KV(\d+))?", name)
    if match is None:
        raise InputError(f"--scheme: {name!r} is no name such as W4A4KV4, W8A8 or W4A16")
    w, a, kv = (int(bits) if bits else OFF for bits in match.groups())
    keys = replace(cache, bits=kv)
    return Scheme(replace(weights, bits=w), replace(activations, bits=a), keys=keys, values=keys)


@dataclass(frozen=True)
class LayerScheme:
    """The grids of one layer, overrides applied. Hashable: layers of equal scheme share a scan."""

    weights: Mapping[str, Grid]  # by projection
    sites: Mapping[str, Grid]  # by site


def layer_scheme(scheme: Scheme, layer: int) -> LayerScheme:
    """Resolve the overrides for one layer; the last override that matches a name wins.

    Raises:
        InputError: if projections that share their input would get different activation bits.
    """

    def grid(role: str, name: str) -> Grid:
        result: Grid = getattr(scheme, role)
        for override in scheme.overrides:
            bits = getattr(override, role)
            if bits is not None and fnmatch(f"layers.{layer}.{name}", override.match):
                result = replace(result, bits=bits)
        return result

    sites = {}
    for name, site in SITES.items():
        grids = {grid(site.grid, reader) for reader in site.readers or (name,)}
        if len(grids) > 1:
            raise InputError(
                f"overrides: {', '.join(site.readers)} share their input in layer {layer}, so they "
                "need the same activation bits"
            )
        sites[name] = grids.pop()
    weights = {name: grid("weights", name) for name in PROJECTIONS}
    return LayerScheme(FrozenDict(weights), FrozenDict(sites))


def segments(scheme: Scheme, layers: int) -> list[tuple[int, int, LayerScheme]]:
    """Runs (start, stop, scheme) of neighbouring layers with the same grids.

    Raises:
        InputError: where an override changes nothing in the model.
    """
    for override in scheme.overrides:
        _check_match(override, layers)
    runs: list[tuple[int, int, LayerScheme]] = []
    for i in range(layers):
        current = layer_scheme(scheme, i)
        if runs and runs[-1][2] == current:
            runs[-1] = (runs[-1][0], i + 1, current)
        else:
            runs.append((i, i + 1, current))
    return runs


def layer_schemes(scheme: Scheme, layers: int) -> list[LayerScheme]:
    """The grids of each layer. Raises InputError as `segments` does."""
    return [grids for a, b, grids in segments(scheme, layers) for _ in range(a, b)]


def grids_by_layer(scheme: Scheme, layers: int) -> list[tuple[int, int, dict[str, dict[str, Any]]]]:
    """The grids of activations and cache in plain values: (start, stop, {site: grid}) for runs of
    layers, so that a reader of a file need not know what an override is."""
    return [
        (start, stop, {name: asdict(grid) for name, grid in grids.sites.items()})
        for start, stop, grids in segments(scheme, layers)
    ]


def _check_match(override: Override, layers: int) -> None:
    names = {"weights": PROJECTIONS}
    for name, site in SITES.items():
        names[site.grid] = (*names.get(site.grid, ()), *(site.readers or (name,)))
    allowed = [n for role, ns in names.items() if getattr(override, role) is not None for n in ns]
    if not any(
        fnmatch(f"layers.{i}.{name}", override.match) for i in range(layers) for name in allowed
    ):
        raise InputError(
            f"overrides: {override.match!r} changes nothing; the names are layers.<i>.<name>, i up "
            f"to {layers - 1}, name one of {', '.join(dict.fromkeys(allowed))}"
        )
