"""What every row of a run starts from: model, text, windows; and whether all of it fits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from qrot.errors import located
from qrot.evaluate.perplexity import Windows, cut_windows, spread_windows
from qrot.evaluate.zeroshot import Task, read_tasks
from qrot.run.combinations import refuse_combination, warn_of_combination
from qrot.run.config import RunConfig
from qrot.text import Data, Texts, read_text, read_texts
from qrot.progress import Stages
from qrot.run.track import Track
from qrot.calibrate.capture import mean_shifts
from qrot.learn.start import check_start
from qrot.model.forward import forward
from qrot.network import fold_norms
from qrot.model.io.load import load
from qrot.model.params import Model, Params
from qrot.model.io.tokenizer import encode
from qrot.quantize.quip import check as check_quip
from qrot.quantize.rtn import rtn
from qrot.rotation.random import random_rotations
from qrot.rotation.forms import Clips, Learned, Rotations, Shifts
from qrot.rotation.store import load_rotations

CALIBRATED = {"slicegpt", "smoothquant"}  # methods that go through the calibration windows


class Fused(NamedTuple):
    """A network whose weights hold what is put on it, and what acts beside them."""

    params: Params
    online: Rotations | None = None
    shifts: Shifts | None = None
    clips: Clips | None = None


@dataclass(frozen=True)
class Inputs:
    """What every row of a run starts from."""

    config: RunConfig
    model: Model  # norms folded, untied
    calibration: Int[np.ndarray, " tokens"]
    rows: Int[np.ndarray, "count length"]  # to judge by
    other_rows: Int[np.ndarray, "other_count length"] | None
    text: str
    other_text: str | None
    folder: Path
    stages: Stages
    tasks: tuple[Task, ...] = ()  # to judge by as well
    track: Track = lambda row, step, values: None

    @cached_property
    def shifts(self) -> Shifts:
        """The mean input of each site, measured once for all seeds."""
        rows = cut_windows(self.calibration, Windows(self.config.learn.length, None))
        with self.stages.stage("means of the sites", seconds=8.0):
            return jax.block_until_ready(mean_shifts(self.model, rows))

    @cached_property
    def calibration_rows(self) -> Int[np.ndarray, "windows length"]:
        """The windows to calibrate on, from all over the text."""
        settings = self.config.calibration
        return spread_windows(self.calibration, settings.length, settings.windows)


def prepare(config: RunConfig, folder: Path, stages: Stages) -> Inputs:
    """Load, cut, and find out what does not fit, before anything is written."""
    texts = read_texts(config.data)
    other = None if config.other is None else read_texts(config.other)
    with stages.stage(f"loading {config.model}", seconds=7.0):
        model = fold_norms(load(config.model, dtype=jnp.dtype(config.dtype)))
        jax.block_until_ready(model.params)
    with stages.stage("reading the text", seconds=2.0):
        windows, bos = config.evaluate, model.config.bos_token_id
        rows = cut_windows(encode(model.tokenizer, texts.evaluation), windows, bos_token_id=bos)
        other_rows = None
        if other is not None:
            windows = replace(windows, count=config.other_count)
            other_tokens = encode(model.tokenizer, other.evaluation)
            other_rows = cut_windows(other_tokens, windows, bos_token_id=bos)
        calibration = _calibration(model, texts, config)
        _check_fit(config, model, rows)
        saved = None
        if config.saved is not None:
            saved, _ = load_rotations(Path(config.saved), digest=model.digest)
        refuse_combination(config, saved)
        warn_of_combination(config, saved)
    tasks = ()
    if config.zeroshot is not None:
        with stages.stage("reading the tasks", seconds=5.0):
            tasks = read_tasks(config.zeroshot, model)
    other_text = None if other is None else other.name
    return Inputs(
        config, model, calibration, rows, other_rows, texts.name, other_text, folder, stages, tasks
    )


def inspected(
    name: str, rotations: Path | None, text: Path | None, windows: int, length: int, stages: Stages
) -> tuple[Model, Int[np.ndarray, "windows length"], Learned]:
    """What `inspect` looks at: the folded model, windows of a text, and rotations.

    rotations: a file; a random Hadamard rotation if None. text: a file; Python's manual if None.
    """
    with stages.stage(f"loading {name}", seconds=7.0):
        model = fold_norms(load(name))
        jax.block_until_ready(model.params)
    if text is None:
        words = read_texts(Data()).evaluation
    else:
        words = read_text(text)
    rows = cut_windows(encode(model.tokenizer, words), Windows(length, windows))
    if rotations is not None:
        return model, rows, load_rotations(rotations, digest=model.digest)[0]
    return model, rows, Learned(random_rotations(model.config, 0))


def _calibration(model: Model, texts: Texts, config: RunConfig) -> Int[np.ndarray, " tokens"]:
    """The tokens to calibrate on; none where no method does."""
    learns = {"learned", "random_hadamard_shift"} & set(config.methods)
    calibrates = config.calibrates or bool(CALIBRATED & set(config.methods))
    if not learns and not calibrates and config.mixed is None:
        return np.zeros(0, np.int32)
    tokens = encode(model.tokenizer, texts.calibration)
    if learns:
        cut_windows(tokens, Windows(config.learn.length, config.learn.held_out + 1))
    if calibrates:
        with located("calibration.windows"):  # says now that the text is too short
            spread_windows(tokens, config.calibration.length, config.calibration.windows)
    if config.mixed is not None:
        with located("mixed.windows"):
            spread_windows(tokens, config.calibration.length, config.mixed.windows)
    return tokens


def _check_fit(config: RunConfig, model: Model, rows) -> None:
    """Trace everything without computing it: groups, blocks and overrides that do not fit raise."""
    if "learned" in config.methods:
        check_start(config.learn, config.rotations)
    kinds: dict[str, Any] = {
        "random_orthogonal": "orthogonal",
        "random_hadamard": "hadamard",
        "random_hadamard_shift": "hadamard",
        "learned": config.learn.start if config.learn.start == "orthogonal" else "hadamard",
    }
    rotations = Rotations()
    for kind in {kinds[method] for method in config.methods if method in kinds}:
        rotations = random_rotations(model.config, 0, kind=kind, sites=config.rotations)
    scheme = config.scheme
    if config.weight_method in ("quip", "quip_sharp"):
        check_quip(model.params.layers, scheme, lattice=config.weight_method == "quip_sharp")
    tokens = jnp.asarray(rows[:1, :2])
    jax.eval_shape(lambda params: rtn(params, scheme), model.params)
    jax.eval_shape(
        lambda params: forward(params, tokens, model.config, rotations=rotations, scheme=scheme),
        model.params,
    )
