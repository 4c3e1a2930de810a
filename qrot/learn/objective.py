"""What learning makes small: the record of an objective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from jaxtyping import Array, Float


class Objective(NamedTuple):
    """One objective. To add one, put a file with its loss and its record into `objectives`.

    Attributes:
        name: in a configuration.
        loss: of a `Transform`, the network that it is put on (folded, with nothing online, its
            scheme the one that is trained for) and a batch; `jax.grad` of it by the transform is
            all that learning needs.
        batch: what a batch is: `tokens`, windows of them [batch, length]; `hidden`, what enters
            each layer and leaves the last one [layers + 1, batch, length, hidden]; `captured`, a
            `Captured` of some vectors.
        unit: of the loss, for the axis of a plot.
        gradients: whether captured derivatives are needed.
        scales: whether it has in it what a scale costs, not only what it gains.
        remat: whether the loss has a keyword of this name, to compute each layer again in the
            backward pass in place of storing its intermediates.
    """

    name: str
    loss: Callable[..., Float[Array, ""]]
    batch: Literal["tokens", "hidden", "captured"]
    unit: str
    gradients: bool = False
    scales: bool = True
    remat: bool = False

    @property
    def captures(self) -> bool:
        """Whether batches are of captured vectors."""
        return self.batch == "captured"

    @property
    def accumulates(self) -> bool:
        """Whether a batch can be gone through in parts: where it is of windows."""
        return self.batch == "tokens"
