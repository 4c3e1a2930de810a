"""Where learning starts: the record of a start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Array, Float

from qrot.calibrate.capture import Captured

# Of captured vectors and the mean input of each site (none where shifts are not captured): R1.
Directions = Callable[[Captured, Mapping[str, Array]], Float[np.ndarray, "n n"]]


class LearnedFirst(NamedTuple):
    """A start that other steps of learning make.

    Attributes:
        settings: of these steps, beside those of the run.
        whole: the start of these steps where R1 is one whole matrix.
        otherwise: their start where it is not.
    """

    settings: dict[str, Any]
    whole: str
    otherwise: str


class Start(NamedTuple):
    """One start. To add one, put a file with its record into `starts`.

    Attributes:
        name: in a configuration.
        kind: of the random rotations that it begins with, see `qrot.rotation.random`.
        random: whether it differs from seed to seed, so that several may be drawn.
        directions: what computes R1 of captured vectors; None where R1 is drawn. It needs R1 to be
            one whole matrix.
        gradients: whether that needs captured derivatives.
        learned: the steps that make it; None for none.
        given: whether it is what another run has fitted, which the caller of `learn` hands over.
    """

    name: str
    kind: Literal["hadamard", "orthogonal", "identity"] = "hadamard"
    random: bool = False
    directions: Directions | None = None
    gradients: bool = False
    learned: LearnedFirst | None = None
    given: bool = False
