"""The grids of a whole model: which bits where, with exceptions by layer and projection."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from typing import Any, NamedTuple

from qrot.errors import InputError
from qrot.grid import OFF, Grid

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

    match: a shell pattern over `layers.<i>.<name>`, name one of q, k, v, o, gate, up, down (their
      weights and their input) and keys, values (the cache): `*.down`, `layers.0.*`.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    match: str
    weights: int | None = None
    activations: int | None = None
    keys: int | None = None
    values: int | None = None

    @property
    def changes(self) -> bool:
        """Whether the override says anything."""
        return any(getattr(self, role) is not None for role in _GRANULARITY)


@dataclass(frozen=True)
class Scheme:
    """The grids of a whole model: W4A4KV4 is bits=4 for all four.

    scale_gradient: whether the derivative of a quantiser follows its scale; False holds the scale
      constant, as the released SpinQuant does.
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
        """The short name in use in the field, such as W4A4KV4."""
        k, v = self.keys.bits, self.values.bits
        cache = f"KV{k}" if k == v else f"K{k}V{v}"
        return f"W{self.weights.bits}A{self.activations.bits}{cache}"


class LayerScheme(NamedTuple):
    """The grids of one layer, overrides applied. Hashable: layers of equal scheme share a scan."""

    weights: tuple[tuple[str, Grid], ...]  # by projection
    qkv: Grid
    o: Grid
    gate_up: Grid
    down: Grid
    keys: Grid
    values: Grid


READERS = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}


def layer_scheme(scheme: Scheme, layer: int) -> LayerScheme:
    """Resolve the overrides for one layer; the last override that matches a name wins.

    Raises InputError where projections that share their input would get different activation bits.
    """

    def grid(role: str, name: str) -> Grid:
        result: Grid = getattr(scheme, role)
        for override in scheme.overrides:
            bits = getattr(override, role)
            if bits is not None and fnmatch(f"layers.{layer}.{name}", override.match):
                result = replace(result, bits=bits)
        return result

    sites = {}
    for site, readers in READERS.items():
        grids = {grid("activations", name) for name in readers}
        if len(grids) > 1:
            raise InputError(
                f"overrides: {', '.join(readers)} share their input in layer {layer}, so they need "
                "the same activation bits"
            )
        sites[site] = grids.pop()
    weights = tuple((n, grid("weights", n)) for names in READERS.values() for n in names)
    return LayerScheme(weights, **sites, keys=grid("keys", "keys"), values=grid("values", "values"))


def segments(scheme: Scheme, layers: int) -> list[tuple[int, int, LayerScheme]]:
    """Runs (start, stop, scheme) of neighbouring layers with the same grids.

    Raises InputError where an override changes nothing in the model.
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
        (start, stop, {site: asdict(getattr(grids, site)) for site in (*READERS, "keys", "values")})
        for start, stop, grids in segments(scheme, layers)
    ]


def _check_match(override: Override, layers: int) -> None:
    inputs = tuple(name for names in READERS.values() for name in names)
    names = {"weights": inputs, "activations": inputs, "keys": ("keys",), "values": ("values",)}
    allowed = [n for role, ns in names.items() if getattr(override, role) is not None for n in ns]
    if not any(
        fnmatch(f"layers.{i}.{name}", override.match) for i in range(layers) for name in allowed
    ):
        raise InputError(
            f"overrides: {override.match!r} changes nothing; the names are layers.<i>.<name>, i up "
            f"to {layers - 1}, name one of {', '.join(dict.fromkeys(allowed))}"
        )
