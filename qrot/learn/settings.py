"""What a configuration says about learning."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from qrot.errors import InputError
from qrot.grid import OFF
from qrot.learn.objectives import OBJECTIVES

Start = Literal["hadamard", "orthogonal", "identity", "pca", "balanced", "fisher"]


@dataclass(frozen=True)
class Learn:
    """How rotations are learned.

    objective: see `qrot.learn.objectives`. optimiser: see `qrot.learn.stiefel`.
    learning_rate: of the rotations, at the first step; `schedule` takes it to 0 at the last, or not
      at all. Clip ratios and scales have rates of their own, on the same schedule.
    batch: windows of `length` tokens in a step, or captured vectors for a site-wise objective.
    accumulate: parts that a batch of windows is taken in, one after the other, to save memory.
    remat: compute each layer again in the backward pass instead of storing its intermediates.
    compute_dtype: of the arithmetic; rotations stay in float32.
    windows: calibration windows that are captured, by objectives and starts that need that.
    start: where learning starts, see `qrot.learn.start`.
    draws: random rotations to draw, of which the one of least held-out loss is where it starts.
    weight_bits: bits of the weights in training: fewer bits for rotations that are used with
      rounded weights, 16 for weights that another method (GPTQ) will round. None: as the scheme.
    shifts: whether to quantise around each site's mean (`qrot.rotation.forms.Shifts`).
    scales: whether factors a channel are learned beside the rotations (`Scales`).
    clips: whether the clip ratios are learned beside the rotations.
    value_heads: whether each kv head has a value rotation of its own, not each layer (DartQuant).
    online: online rotations that are learned as well: `key` as a matrix for each kv head, `down` as
      a Kronecker product for each layer, or as blocks where `rotations.down` is a block size.
    clip_norm: bound on the global norm of the gradient; None for no bound.
    held_out: windows of the calibration text that are never trained on; they choose the best.
    evaluate_every, checkpoint_every: steps between looks at them and between checkpoints.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    objective: Literal[
        "cross_entropy",
        "kl",
        "kl_top",
        "layer_reconstruction",
        "reconstruction",
        "fisher",
        "whip",
        "kurtosis",
    ] = "cross_entropy"
    optimiser: Literal["cayley_sgd", "cayley_adam", "cayley_muon", "qr_sgd", "qr_adam"] = (
        "cayley_muon"
    )
    learning_rate: float = 0.05
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    steps: int = 20
    batch: int = 2
    accumulate: int = 1
    length: int = 512
    remat: bool = False
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    windows: int = 4
    start: Start = "fisher"
    draws: int = 1
    weight_bits: int | None = None
    shifts: bool = True
    scales: bool = True
    clips: bool = True
    value_heads: bool = False
    online: tuple[Literal["key", "down"], ...] = ()
    clip_norm: float | None = 1.0
    held_out: int = 4
    evaluate_every: int = 5
    checkpoint_every: int = 5

    def __post_init__(self):
        if not 0 < self.learning_rate < math.inf:
            raise InputError(f"learn.learning_rate: {self.learning_rate} is not positive")
        counts = ("steps", "batch", "accumulate", "windows", "draws", "held_out")
        for name in (*counts, "evaluate_every", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise InputError(f"learn.{name}: {getattr(self, name)} is not positive")
        if self.weight_bits is not None and not 2 <= self.weight_bits <= OFF:
            raise InputError(f"learn.weight_bits: {self.weight_bits} is outside 2 to {OFF}")
        if self.scales and not OBJECTIVES[self.objective].scales:
            raise InputError(
                f"learn.scales: {self.objective} does not feel what a scale costs, only what it "
                "gains; use scales: false with it"
            )
        if self.batch % self.accumulate:
            raise InputError(f"learn.accumulate: {self.accumulate} does not divide {self.batch}")
        if self.accumulate > 1 and OBJECTIVES[self.objective].batch != "tokens":
            raise InputError(f"learn.accumulate: {self.objective} has no windows in its batches")
        if self.draws > 1 and self.start not in ("hadamard", "orthogonal"):
            raise InputError(f"learn.draws: {self.start} is not drawn at random")


def rate_at(settings: Learn, step: int) -> float:
    """The learning rate of a step, counted from 0."""
    done = step / settings.steps
    shape = {
        "constant": 1.0,
        "linear": 1 - done,
        "cosine": (1 + math.cos(math.pi * done)) / 2,
    }
    return settings.learning_rate * shape[settings.schedule]
