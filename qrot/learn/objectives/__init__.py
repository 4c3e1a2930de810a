"""What learning makes small. An objective is a pure function (learned, params, batch, config,
scheme) -> scalar; `jax.grad` of it by `learned` is all that learning needs.

To add one: write the function, say in `OBJECTIVES` what its batches are, and name it in a config.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

from jaxtyping import Array, Float

from qrot.learn.end_to_end import cross_entropy, kl
from qrot.learn.layer_wise import layer_reconstruction
from qrot.learn.site_wise import fisher, kurtosis, reconstruction, whip

TOP = 100  # tokens of kl_top


class Objective(NamedTuple):
    """A loss, what its batches are made of, and what it can judge."""

    loss: Callable[..., Float[Array, ""]]
    batch: Literal["tokens", "hidden", "captured"]
    gradients: bool = False  # whether captured derivatives are needed
    scales: bool = True  # whether it feels what a scale costs beside what it gains


OBJECTIVES = {
    "cross_entropy": Objective(cross_entropy, "tokens"),
    "kl": Objective(kl, "tokens"),
    "kl_top": Objective(partial(kl, top=TOP), "tokens"),
    "layer_reconstruction": Objective(layer_reconstruction, "hidden"),
    "reconstruction": Objective(reconstruction, "captured"),
    "fisher": Objective(fisher, "captured", gradients=True),
    "whip": Objective(whip, "captured", scales=False),
    "kurtosis": Objective(kurtosis, "captured", scales=False),
}
