"""What a method of a run is: it puts something on the network before its weights are rounded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from qrot.model.params import Model, Network
from qrot.rotation.transform import Transform
from qrot.run.config import RunConfig
from qrot.run.inputs import Inputs
from qrot.scheme import Scheme


@dataclass(frozen=True)
class Prepared:
    """What a method makes of one row.

    Attributes:
        transform: that is fused into the network; None for nothing.
        facts: that the row tells of it.
        finish: applied to the fused network, whose scheme is that of the row, before its weights
            are rounded.
        network: that is judged as it is, in place of all that a run builds.
        earlier_seconds: that an interrupted run spent on it.
    """

    transform: Transform | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    finish: Callable[[Network], Network] | None = None
    network: Network | None = None
    earlier_seconds: float = 0.0


def _nothing(config: RunConfig, model: Model) -> Transform:
    return Transform()


def _no_seconds(config: RunConfig, millions: float) -> float:
    return 0.0


class Method(NamedTuple):
    """One method. To add one, put a file with its record into `qrot.run.methods`.

    Attributes:
        name: in a configuration, as one of `methods`.
        prepare: (inputs, name of the row, seed) -> what it makes of the row.
        seeds: the key of the configuration that has its seeds; None where it has none, which is
            seed 0 to `prepare`.
        text: the part of the calibration text that it reads: none, the windows of the section
            `calibration`, or those that learning reads.
        section: the key of the configuration that has its settings, read by such methods alone.
        file: the key of the configuration that names a file for it; "" for none.
        scheme: of its row, where it is not that of the run.
        fuses: whether it puts anything on the network.
        expect: (configuration, folded model) -> something of the kind that it will put on the
            network, whatever the numbers. Raises InputError where it does not fit, before anything
            is written.
        recall: (inputs, row of results) -> what it put on the network of that row; None where that
            was nothing, or is not kept.
        seconds: (configuration, millions of parameters) -> what `prepare` takes, roughly.
    """

    name: str
    prepare: Callable[[Inputs, str, int], Prepared]
    seeds: Literal["seeds", "learn_seeds"] | None = None
    text: Literal["none", "calibration", "learning"] = "none"
    section: str = ""
    file: str = ""
    scheme: Scheme | None = None
    fuses: bool = True
    expect: Callable[[RunConfig, Model], Transform] = _nothing
    recall: Callable[[Inputs, Mapping[str, Any]], Transform | None] = lambda inputs, row: None
    seconds: Callable[[RunConfig, float], float] = _no_seconds

    def scheme_of(self, config: RunConfig) -> Scheme:
        """The scheme of its row."""
        return config.scheme if self.scheme is None else self.scheme
