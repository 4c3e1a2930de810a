"""What every row of a run starts from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from qrot.evaluate.perplexity import spread_windows
from qrot.evaluate.zeroshot import Task
from qrot.learn.loop import start_shifts
from qrot.model.params import Model, Network
from qrot.progress import Stages, millions
from qrot.run.config import RunConfig
from qrot.run.track import Track


class GateText(NamedTuple):
    """A text that the gate is measured on: its name, and the windows of it."""

    name: str
    rows: Int[np.ndarray, "count length"]


@dataclass(frozen=True)
class Inputs:
    """What every row of a run starts from.

    Attributes:
        config: of the run.
        model: its network with the norms folded, untied.
        calibration: the tokens to calibrate on.
        rows: windows to judge by.
        other_rows: windows of the other text; None where there is none.
        text: the name of the text to judge by.
        other_text: that of the other one.
        folder: of the run.
        stages: told what is under way.
        tasks: to judge by as well.
        gated: the texts that the gate is measured on, with their windows.
        track: told of steps and rows.
    """

    config: RunConfig
    model: Model
    calibration: Int[np.ndarray, " tokens"]
    rows: Int[np.ndarray, "count length"]
    other_rows: Int[np.ndarray, "other_count length"] | None
    text: str
    other_text: str | None
    folder: Path
    stages: Stages
    tasks: tuple[Task, ...] = ()
    gated: tuple[GateText, ...] = ()
    track: Track = lambda row, step, values: None

    @property
    def network(self) -> Network:
        """In full precision, with nothing online."""
        return self.model.network

    @cached_property
    def millions(self) -> float:
        """Millions of parameters."""
        return millions(self.network.params)

    @cached_property
    def shifts(self) -> dict[str, Float[Array, "layers width"]]:
        """The shifts that learning starts with, measured once for all seeds."""
        with self.stages.stage("means of the sites", seconds=8.0):
            found = start_shifts(self.network, self.calibration, self.config.learn)
            return jax.block_until_ready(found)

    @cached_property
    def calibration_rows(self) -> Int[np.ndarray, "windows length"]:
        """The windows to calibrate on, from all over the text."""
        settings = self.config.calibration
        return spread_windows(self.calibration, settings.length, settings.windows)
