"""What the JSON files of a run folder hold: what is read of them, and of what types it has to be.

What is not named here passes unread, and what has a default may be absent.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from qrot.errors import InputError
from qrot.files.plain import shown

Plain = str | int | float | bool | None
_PROTOCOL = ("model", "note", "text", "count", "window", "stride", "bos", "logits", "norms")
_ROWS = 10_000  # at most
_LARGEST = math.exp(700)  # of a perplexity


@dataclass(frozen=True)
class MixedRow:
    """What a row tells of its bits: on average, and by projection those of each layer."""

    bits_per_weight: float
    with_scales: float
    bits: dict[str, str]
    seconds: float = 0.0

    def __post_init__(self):
        check_numbers(self)
        for name, bits in self.bits.items():
            if not re.fullmatch(r"\d{1,2}( \d{1,2})*", bits):
                raise InputError(f"bits.{shown(name)}: not the bits of each layer")
        if not self.bits:
            raise InputError("bits: is empty")


@dataclass(frozen=True)
class Row:
    """A method at one seed: what it is, what it came to, and what that took."""

    method: str
    seed: int | None
    nll: float
    perplexity: float
    weights: float
    activations: float
    keys: float
    values: float
    seconds: float = 0.0
    other_nll: float = 0.0
    other_perplexity: float = 0.0
    rotation_seed: int | None = None
    weight_method: str = ""
    weight_seconds: float = 0.0
    mixed: MixedRow = field(default_factory=lambda: MixedRow(0.0, 0.0, {"": "16"}))
    objective: str = ""
    unit: str = ""
    optimiser: str = ""
    steps: int = 0
    trained_weight_bits: int = 0
    start: str = ""
    learn_seconds: float = 0.0
    peak_gib: float = 0.0
    rotations: str = ""
    scheme: str = ""
    mismatch: str = ""
    environment: dict[str, Plain] = field(default_factory=dict)
    zeroshot: dict[str, dict[str, float | None]] = field(default_factory=dict)

    def __post_init__(self):
        check_numbers(self)
        check_texts(self)
        _check_scores("zeroshot", self.zeroshot)


@dataclass(frozen=True)
class TaskProtocol:
    """Of which kind the rows of a task are, and how many."""

    kind: str
    rows: int


@dataclass(frozen=True)
class TasksProtocol:
    """What scores depend on beside the method."""

    tasks: dict[str, TaskProtocol]
    bos: bool
    separator: str


@dataclass(frozen=True)
class Results:
    """The contents of results.json."""

    protocol: dict[str, Plain]
    rows: tuple[Row, ...]
    environment: dict[str, Plain] = field(default_factory=dict)
    zeroshot: TasksProtocol = field(default_factory=lambda: TasksProtocol({}, False, ""))

    def __post_init__(self):
        for key in _PROTOCOL:
            if key not in self.protocol:
                raise InputError(f"protocol.{key}: this key is needed")
        if ("other_text" in self.protocol) != ("other_count" in self.protocol):
            raise InputError("protocol.other_count: goes with other_text, and only with it")
        if len(self.rows) > _ROWS:
            raise InputError(f"rows: {len(self.rows):,} are more than {_ROWS:,}")


def check_numbers(section: Any) -> None:
    """Raise InputError where a number is none that could be measured."""
    for name, value in vars(section).items():
        if isinstance(value, float) and not abs(value) <= 1.001 * _LARGEST:
            raise InputError(f"{name}: {value} is not finite, or too large")
        if name.endswith("nll") and abs(value) > 1e100:
            raise InputError(f"{name}: {value} is too large")


def _check_scores(key: str, tasks: dict[str, dict[str, float | None]]) -> None:
    """Raise InputError where a score is none; the error of a huge perplexity may be infinite."""
    for task, scores in tasks.items():
        for name, score in scores.items():
            if not (score is None or 0 <= score <= 1.001 * _LARGEST or score == math.inf):
                where = f"{key}.{shown(task)}.{shown(name)}"
                raise InputError(f"{where}: {score} is no score")


def check_texts(section: Any) -> None:
    """Raise InputError where a text is none that a terminal should be given."""
    for name, value in vars(section).items():
        if isinstance(value, str) and not value.isprintable():
            raise InputError(f"{name}: a text with characters that cannot be printed")


@dataclass(frozen=True)
class Panel:
    """A figure by layer, before and after what was put on the network."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    before: tuple[float, ...]
    after: tuple[float, ...] = ()

    def __post_init__(self):
        check_sizes("before", self.before)
        check_sizes("after", self.after)


@dataclass(frozen=True)
class SitePanels:
    """The figures of a site."""

    crest: Panel
    error: Panel = field(default_factory=lambda: Panel(()))


@dataclass(frozen=True)
class Activation:
    """One activation, as `qrot.run.anatomy` has it: |x| in cells, and its loud channels."""

    place: str
    channels: int
    loud: tuple[tuple[int, float], ...]
    before: tuple[tuple[float, ...], ...]
    after: tuple[tuple[float, ...], ...] = ((0.0,),)

    def __post_init__(self):
        check_texts(self)
        check_sizes("loud", [value for _, value in self.loud])
        check_channels(self.channels)
        if not all(0 <= channel < self.channels for channel, _ in self.loud):
            raise InputError(f"loud: a channel is none of the {self.channels}")
        for name in ("before", "after"):
            check_cells(name, getattr(self, name))


@dataclass(frozen=True)
class Anatomy:
    """The contents of anatomy.json; sizes that are not finite are left out of pictures."""

    after: str
    tokens: int
    sites: dict[str, SitePanels]
    activation: Activation

    def __post_init__(self):
        check_texts(self)


def check_channels(channels: int) -> None:
    """Raise InputError where no activation has as many channels."""
    if not 0 < channels < 1e9:
        raise InputError(f"channels: there are no {channels} channels")


def check_cells(name: str, cells: Sequence[Sequence[float]]) -> None:
    """Raise InputError where a picture is none of lines of cells."""
    if len({len(line) for line in cells}) != 1 or not cells[0]:
        raise InputError(f"{name}: expected lines of cells, all as long")
    for line in cells:
        check_sizes(name, line)


def check_sizes(name: str, values: Sequence[float]) -> None:
    """Raise InputError where a number is no size, for a picture or a table."""
    if any(value < 0 or 1e300 < value < math.inf for value in values):
        raise InputError(f"{name}: a number is negative, or too large")


@dataclass(frozen=True)
class KeptScores:
    """The scores of a row that is being judged, by task, and what they are of."""

    row: str
    model: str
    protocol: dict[str, Any]
    tasks: dict[str, dict[str, float | None]]

    def __post_init__(self):
        _check_scores("tasks", self.tasks)
