"""What a configuration says about learning."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from qrot.errors import InputError
from qrot.grid import OFF
from qrot.learn.objectives import OBJECTIVES
from qrot.learn.starts import STARTS
from qrot.learn.stiefel import OPTIMISERS
from qrot.records import check_count, check_name
from qrot.sites import ONLINE

SCHEDULES = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1 - done,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
}


@dataclass(frozen=True)
class Learn:
    """How rotations are learned.

    Attributes:
        objective: see `qrot.learn.objectives`.
        optimiser: see `qrot.learn.stiefel`.
        learning_rate: of the rotations, at the first step; `schedule` takes it to 0 at the last, or
            not at all. Clip ratios and scales have rates of their own, on the same schedule.
        schedule: constant, linear or cosine.
        steps: of learning, beside those that make the start.
        batch: windows of `length` tokens in a step, or captured vectors for a site-wise objective.
        accumulate: parts that a batch of windows is taken in, one after the other, to save memory.
        length: of a window, in tokens.
        remat: compute each layer again in the backward pass instead of storing its intermediates.
        compute_dtype: of the arithmetic; rotations stay in float32.
        windows: calibration windows that are captured, by objectives and starts that need that.
        vectors: captured of each window, its first token among them.
        start: where learning starts, see `qrot.learn.starts`.
        fisher_steps: that make the start `fisher`.
        draws: random rotations to draw, of which the one of least held-out loss is where it starts.
        weight_bits: bits of the weights in training: fewer bits for rotations that are used with
            rounded weights, 16 for weights that another method (GPTQ) will round. None: as the
            scheme.
        shifts: whether to quantise around each site's mean (`Transform.shifts`).
        scales: whether factors a channel are learned beside the rotations (`Transform.scales`).
        scale_rate: learning rate of the logarithms of the scales, at the first step.
        clips: whether the clip ratios are learned beside the rotations.
        clip_rate: learning rate of the clip ratios, at the first step.
        clip_floor: the least clip ratio.
        value_heads: whether each kv head has a value rotation of its own, not each layer
            (DartQuant).
        online: online rotations that are learned as well: `key` as a matrix for each kv head,
            `down` as a Kronecker product for each layer, or as blocks where `rotations.down` is a
            block size.
        clip_norm: bound on the global norm of the gradient; None for no bound.
        divergence: times the held-out loss at the start, beyond which a run goes back to its best
            rotations with half the learning rate.
        held_out: windows of the calibration text that are never trained on; they choose the best.
        evaluate_every: steps between looks at them.
        checkpoint_every: steps between checkpoints.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    objective: str = "cross_entropy"
    optimiser: str = "cayley_muon"
    learning_rate: float = 0.05
    schedule: str = "cosine"
    steps: int = 20
    batch: int = 2
    accumulate: int = 1
    length: int = 512
    remat: bool = False
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    windows: int = 4
    vectors: int = 256
    start: str = "fisher"
    fisher_steps: int = 60
    draws: int = 1
    weight_bits: int | None = None
    shifts: bool = True
    scales: bool = True
    scale_rate: float = 0.03
    clips: bool = True
    clip_rate: float = 0.1
    clip_floor: float = 0.3
    value_heads: bool = False
    online: tuple[str, ...] = ()
    clip_norm: float | None = 1.0
    divergence: float = 1.2
    held_out: int = 4
    evaluate_every: int = 5
    checkpoint_every: int = 5

    def __post_init__(self):
        check_name(self.objective, OBJECTIVES, "learn.objective")
        check_name(self.optimiser, OPTIMISERS, "learn.optimiser")
        check_name(self.schedule, SCHEDULES, "learn.schedule")
        check_name(self.start, STARTS, "learn.start")
        for name in self.online:
            check_name(name, ONLINE, "learn.online")
        self._check_numbers()
        objective, start = OBJECTIVES[self.objective], STARTS[self.start]
        if self.scales and not objective.scales:
            raise InputError(
                f"learn.scales: {self.objective} does not feel what a scale costs, only what it "
                "gains; use scales: false with it"
            )
        if self.batch % self.accumulate:
            raise InputError(f"learn.accumulate: {self.accumulate} does not divide {self.batch}")
        if self.accumulate > 1 and not objective.accumulates:
            raise InputError(f"learn.accumulate: {self.objective} has no windows in its batches")
        if self.draws > 1 and not start.random:
            raise InputError(f"learn.draws: {self.start} is not drawn at random")

    def _check_numbers(self) -> None:
        for name in ("learning_rate", "scale_rate", "clip_rate", "divergence", "clip_norm"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise InputError(f"learn.{name}: {getattr(self, name)} is not positive")
        counts = ("steps", "batch", "accumulate", "windows", "draws", "held_out", "fisher_steps")
        for name in (*counts, "evaluate_every", "checkpoint_every"):
            check_count(getattr(self, name), f"learn.{name}")
        for name in ("length", "vectors"):
            if getattr(self, name) < 2:
                raise InputError(f"learn.{name}: {getattr(self, name)} is below 2")
        if not 0 < self.clip_floor <= 1:
            raise InputError(f"learn.clip_floor: {self.clip_floor} is outside 0 to 1")
        if self.weight_bits is not None and not 2 <= self.weight_bits <= OFF:
            raise InputError(f"learn.weight_bits: {self.weight_bits} is outside 2 to {OFF}")


def rate_at(settings: Learn, step: int) -> float:
    """The learning rate of a step, counted from 0."""
    return settings.learning_rate * SCHEDULES[settings.schedule](step / settings.steps)


def total_steps(settings: Learn) -> int:
    """All steps that learning reports, those of a start that is learned itself included."""
    learned = STARTS[settings.start].learned
    return settings.steps + (settings.fisher_steps if learned else 0)
