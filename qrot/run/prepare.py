"""Load, cut, and find out what does not fit, before anything is written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from qrot.errors import located
from qrot.evaluate.perplexity import Windows, cut_windows, spread_windows
from qrot.evaluate.zeroshot import read_tasks
from qrot.model.forward import forward
from qrot.model.io.load import load
from qrot.model.io.tokenizer import encode
from qrot.model.params import Model
from qrot.network import fold
from qrot.progress import Stages
from qrot.quantize.rtn import rtn
from qrot.rotation.random import random_rotations
from qrot.rotation.store import load_rotations
from qrot.rotation.transform import Transform
from qrot.run.combinations import check_combinations
from qrot.run.config import RunConfig
from qrot.run.inputs import GateText, Inputs
from qrot.run.limits import gate_texts
from qrot.run.methods import METHODS
from qrot.text import Data, Texts, read_text, read_texts


def prepare(config: RunConfig, folder: Path, stages: Stages) -> Inputs:
    """What every row of a run starts from.

    Args:
        config: of the run.
        folder: of the run; nothing is written to it.
        stages: told what is under way.

    Raises:
        InputError: where the configuration does not fit the model or the text. Warns of what is
            known to work against each other.
    """
    texts = read_texts(config.data)
    other = None if config.other is None else read_texts(config.other)
    with stages.stage(f"loading {config.model}", seconds=7.0):
        model = _folded(load(config.model, dtype=jnp.dtype(config.dtype)))
        _ = model.identity.fingerprint  # of all that is kept; here, since it may take a while once
    with stages.stage("reading the text", seconds=2.0):
        rows = _windows(model, texts.evaluation, config.evaluate)
        other_rows = None
        if other is not None:
            windows = replace(config.evaluate, count=config.other_count)
            other_rows = _windows(model, other.evaluation, windows)
        gated = _gated(model, config, GateText(texts.name, rows))
        calibration = _calibration(model, texts, config)
        _check_fit(config, model, rows)
        expected = {name: METHODS[name].expect(config, model) for name in config.methods}
        check_combinations(config, model.network, expected)
    tasks = ()
    if config.zeroshot is not None:
        with stages.stage("reading the tasks", seconds=5.0):
            tasks = read_tasks(config.zeroshot, model)
    return Inputs(
        config=config,
        model=model,
        calibration=calibration,
        rows=rows,
        other_rows=other_rows,
        text=texts.name,
        other_text=None if other is None else other.name,
        folder=folder,
        stages=stages,
        tasks=tasks,
        gated=gated,
    )


def inspected(
    name: str, rotations: Path | None, text: Path | None, windows: int, length: int, stages: Stages
) -> tuple[Model, Int[np.ndarray, "windows length"], Transform]:
    """What `inspect` looks at.

    Args:
        name: of the model.
        rotations: a file; a random Hadamard rotation if None.
        text: a file; Python's manual if None.
        windows: of the text.
        length: of a window, in tokens.
        stages: told what is under way.

    Returns:
        The folded model, windows of the text, and what is put on the network.
    """
    with stages.stage(f"loading {name}", seconds=7.0):
        model = _folded(load(name))
    words = read_texts(Data()).evaluation if text is None else read_text(text)
    rows = cut_windows(_encode(model, words), Windows(length, windows))
    if rotations is not None:
        sizes = model.network.config
        return model, rows, load_rotations(rotations, sizes=sizes, identity=model.identity)[0]
    return model, rows, Transform(random_rotations(model.network.config, 0))


def _folded(model: Model) -> Model:
    return model.replace(network=jax.block_until_ready(fold(model.network)))


def _encode(model: Model, text: str) -> Int[np.ndarray, " tokens"]:
    return encode(model.tokenizer, text, model.network.config.vocab_size)


def _windows(model: Model, text: str, windows: Windows) -> Int[np.ndarray, "count length"]:
    """The windows of a text to judge by."""
    tokens = _encode(model, text)
    return cut_windows(tokens, windows, bos_token_id=model.network.config.bos_token_id)


def _gated(model: Model, config: RunConfig, own: GateText) -> tuple[GateText, ...]:
    """What the gate is measured on: the texts that it names, or the run's own."""
    if config.gate is None:
        return ()
    if not config.gate.texts:
        return (own,)
    found = []
    for name, text in gate_texts(config.gate, config.data):
        with located(f"gate: {name}"):
            found.append(GateText(name, _windows(model, text, config.evaluate)))
    return tuple(found)


def _calibration(model: Model, texts: Texts, config: RunConfig) -> Int[np.ndarray, " tokens"]:
    """The tokens to calibrate on; none where no method does."""
    read = {METHODS[name].text for name in config.methods}
    if config.gate is not None and config.gate.site_cost is not None:
        read.add("learning")
    calibrates = config.calibrates or "calibration" in read
    if read == {"none"} and not calibrates and config.mixed is None:
        return np.zeros(0, np.int32)
    tokens = _encode(model, texts.calibration)
    if "learning" in read:
        cut_windows(tokens, Windows(config.learn.length, config.learn.held_out + 1))
    if calibrates:
        with located("calibration.windows"):  # says now that the text is too short
            spread_windows(tokens, config.calibration.length, config.calibration.windows)
    if config.mixed is not None:
        with located("mixed.windows"):
            spread_windows(tokens, config.calibration.length, config.mixed.windows)
    return tokens


def _check_fit(config: RunConfig, model: Model, rows: Int[np.ndarray, "count length"]) -> None:
    """Trace all that rounds without computing it: groups and overrides that do not fit raise."""
    network, tokens = model.network.replace(scheme=config.scheme), jnp.asarray(rows[:1, :2])
    jax.eval_shape(lambda network: jax.tree.leaves(rtn(network)), network)
    jax.eval_shape(forward, network, tokens)
