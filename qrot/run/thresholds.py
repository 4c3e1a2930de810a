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
        align: of the divergence that they have as they are, up to which rotations that are aligned
            with the new weights count in their place: turning them changes how weights round.
        keep: factor by which it may have changed, either way, for them to be kept; where it became
            smaller the network is another one, too, and learning finds more.
        relearn: from which on rotations are learned from scratch; in between, learning starts with
            the old ones.
        steps: share of learn.steps that it takes then.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    align: float = 0.9
    keep: float = 1.05
    relearn: float = 4.0
    steps: float = 0.25

    def __post_init__(self):
        if self.keep < 1:
            raise InputError(f"refresh.keep: {self.keep} is below 1, a factor either way")
        if self.relearn <= 0:
            raise InputError(f"refresh.relearn: {self.relearn} is not positive")
        if not 0 <= self.align <= 1:
            raise InputError(f"refresh.align: {self.align} is outside 0 to 1")
        if not 0 < self.steps <= 1:
            raise InputError(f"refresh.steps: {self.steps} is outside 0 to 1")
