"""From when on rotations of other weights are learned again."""

from __future__ import annotations

from dataclasses import dataclass

from qrot.errors import InputError


@dataclass(frozen=True)
class Refresh:
    """When rotations that were fitted to other weights are kept, moved on from, or learned anew.

    What decides is how many times the divergence from full precision that they have on the weights
    they were fitted to they have on the new ones.

    Attributes:
        keep: up to which they are kept as they are.
        relearn: from which on rotations are learned from scratch; in between, learning starts with
            the old ones.
        steps: share of learn.steps that it takes then.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    keep: float = 1.05
    relearn: float = 4.0
    steps: float = 0.25

    def __post_init__(self):
        if not 0 < self.keep <= self.relearn:
            raise InputError(
                f"refresh.keep: {self.keep} is not positive, or above refresh.relearn, "
                f"{self.relearn}"
            )
        if not 0 < self.steps <= 1:
            raise InputError(f"refresh.steps: {self.steps} is outside 0 to 1")
