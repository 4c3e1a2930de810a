"""What gate.json and refresh.json hold; as in `qrot.run.contents`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from qrot.errors import InputError
from qrot.files.plain import shown
from qrot.run.contents import (
    Plain,
    check_cells,
    check_channels,
    check_numbers,
    check_sizes,
    check_texts,
)
from qrot.sites import SITES


@dataclass(frozen=True)
class GateOf:
    """What a gate was measured on: the network, its model, the texts."""

    row: str
    network: str
    digest: str
    model: str
    fingerprint: str
    texts: tuple[str, ...]
    windows: dict[str, Plain]

    def __post_init__(self):
        check_texts(self)


@dataclass(frozen=True)
class GateText:
    """Two networks on a text, as `qrot.evaluate.divergence` has it."""

    text: str
    tokens: int
    exact_nll: float
    nll: float
    perplexity_ratio: float
    nats: float
    kl: float
    kl_p99: float
    flips: float

    def __post_init__(self):
        check_numbers(self)
        check_texts(self)


@dataclass(frozen=True)
class GateMeasured:
    """What limits are compared with; what no limit asked for may be absent."""

    texts: tuple[GateText, ...] = ()
    site_costs: dict[str, float] = field(default_factory=dict)

    def __post_init__(self):
        for site, cost in self.site_costs.items():
            if not 0 <= cost < math.inf:
                raise InputError(f"site_costs.{shown(site)}: {cost} is no cost")


@dataclass(frozen=True)
class GateLimit:
    """One limit on one text: whether it is kept to."""

    name: str
    text: str
    limit: float
    value: float
    passed: bool
    interval: tuple[float, float] | None = None
    site: str = ""

    def __post_init__(self):
        check_numbers(self)
        check_texts(self)
        if self.passed != (self.value <= self.limit):
            raise InputError(f"passed: {self.value} at a limit of {self.limit} is not that")


@dataclass(frozen=True)
class GateFile:
    """The contents of gate.json."""

    passed: bool
    of: GateOf
    settings: dict[str, Any]
    limits: tuple[GateLimit, ...]
    measured: GateMeasured
    environment: dict[str, Plain]
    seconds: float

    def __post_init__(self):
        check_numbers(self)
        if not self.limits or self.passed != all(limit.passed for limit in self.limits):
            raise InputError("passed: is not what the limits say")


@dataclass(frozen=True)
class Whens:
    """A value on the old weights, on the new ones, and there with rotations that are aligned."""

    before: float
    after: float
    aligned: float

    def __post_init__(self):
        check_numbers(self)


@dataclass(frozen=True)
class MovedSite:
    """How far a site moved in each layer, and what rounding it is expected to cost."""

    distance: tuple[float, ...]
    cost: Whens

    def __post_init__(self):
        check_sizes("distance", self.distance)
        if not self.distance:
            raise InputError("distance: is empty")


@dataclass(frozen=True)
class MovedPicture:
    """The largest |x| of a site by layer and channel, in cells."""

    site: str
    channels: int
    before: tuple[tuple[float, ...], ...]
    after: tuple[tuple[float, ...], ...]

    def __post_init__(self):
        check_texts(self)
        check_channels(self.channels)
        for name in ("before", "after"):
            check_cells(name, getattr(self, name))


@dataclass(frozen=True)
class Moved:
    """What `qrot.run.moved` measures."""

    kl: Whens
    nats: Whens
    sites: dict[str, MovedSite]
    picture: MovedPicture

    def __post_init__(self):
        for name in self.sites:
            if name not in SITES:
                raise InputError(f"sites: there is no site {shown(name)}")
        if not self.sites:
            raise InputError("sites: is empty")


@dataclass(frozen=True)
class BeforeFile:
    """The contents of before.json: `qrot.run.moved.known_of`, and a digest of what it is of."""

    of: str
    kl: float
    nats: float
    costs: dict[str, float]

    def __post_init__(self):
        check_numbers(self)
        if {*self.costs} != {*SITES}:
            raise InputError(f"costs: are not those of {', '.join(SITES)}")


@dataclass(frozen=True)
class RefreshOf:
    """What a refresh compared."""

    parent: str
    row: str
    rotations: str
    before: str
    after: str
    difference: str | None

    def __post_init__(self):
        check_texts(self)


@dataclass(frozen=True)
class RefreshSettings:
    """The thresholds that a refresh went by, see `qrot.run.thresholds.Refresh`."""

    align: float
    keep: float
    relearn: float
    steps: float

    def __post_init__(self):
        check_numbers(self)


@dataclass(frozen=True)
class RefreshFile:
    """The contents of refresh.json."""

    of: RefreshOf
    moved: Moved
    decision: Literal["keep", "warm", "relearn"]
    settings: RefreshSettings
    environment: dict[str, Plain]
    seconds: float

    def __post_init__(self):
        check_numbers(self)
