"""What a run will take, roughly, before anything of it is run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from qrot.evaluate.zeroshot import ZeroShot, pairs, read_rows, task_file
from qrot.run.config import RunConfig
from qrot.text import read_texts
from qrot.progress import FORWARD, FUSE, ROUND
from qrot.learn.objectives import OBJECTIVES
from qrot.learn.settings import Learn
from qrot.model.config import ModelConfig

_START = 12.0  # seconds: the process, the model, the text
_COMPILE = 3.0  # seconds a row
_CHARACTERS = 4  # of a token
_PADDING = 1.4  # tokens that are read, for each of a task's own


def millions_of(config: ModelConfig) -> float:
    """Millions of parameters, the embedding untied."""
    hidden, heads = config.hidden_size, config.num_attention_heads + config.num_key_value_heads
    layer = 2 * hidden * heads * config.head_dim + 3 * hidden * config.intermediate_size
    return (config.num_hidden_layers * layer + 2 * config.vocab_size * hidden) / 1e6


def learning_seconds(settings: Learn, millions: float) -> float:
    """What learning takes at one seed."""
    if OBJECTIVES[settings.objective].batch == "captured":
        return 60.0  # no step goes through the network
    tokens = settings.steps * settings.batch * settings.length
    return 60.0 + 4 * _forward(millions, tokens)


def run_seconds(config: RunConfig, model: ModelConfig, methods: Iterable[str]) -> float:
    """What these rows of a run take by the rates of `qrot.progress`, one row a name.

    Reads the text and the tasks where their size counts; raises InputError where it cannot.
    """
    methods, m = list(methods), millions_of(model)
    judging = _forward(m, _judged_tokens(config)) + _COMPILE
    return _START * bool(methods) + sum(judging + _row(config, m, name) for name in methods)


def measured_ratio(done: Iterable[tuple[RunConfig, dict[str, Any]]], model: ModelConfig):
    """How many times the rates rows took that are done, and how many rows that is; None for none.

    done: configurations and what is in their results.json.
    """
    taken = expected = count = 0.0
    for config, results in done:
        for row in results["rows"]:
            taken += row["seconds"]
            expected += run_seconds(config, model, [row["method"]]) - _START
            count += 1
    return (taken / expected, int(count)) if count else None


def _forward(millions: float, tokens: int | float) -> float:
    return FORWARD * millions * tokens / 1000


def _row(config: RunConfig, m: float, method: str) -> float:
    """What a row takes beside being judged."""
    windows = config.calibration.windows * config.calibration.length
    seconds = 0.0
    if method == "learned":
        seconds += learning_seconds(config.learn, m)
    elif method in ("slicegpt", "smoothquant"):
        seconds += 2 * _forward(m, windows)
    if method not in ("full_precision", "no_rotation"):
        seconds += FUSE * m
    if method == "full_precision" or not config.scheme.rounds_weights:
        return seconds
    if config.mixed is not None:
        tokens = config.mixed.windows * config.calibration.length
        seconds += (3 + len(config.mixed.choices)) * _forward(m, tokens)
    if config.weight_method == "qat":
        tokens = config.qat.steps * config.qat.batch * config.qat.length
        return seconds + 2 * _forward(m, tokens)
    return seconds + (ROUND * m if config.weight_method == "rtn" else 3 * _forward(m, windows))


def _judged_tokens(config: RunConfig) -> float:
    windows = config.evaluate
    tokens = float(windows.length * (windows.count or 0))
    if windows.count is None:
        text = len(read_texts(config.data).evaluation) / _CHARACTERS
        tokens = text * windows.length / (windows.stride or windows.length)
    if config.other is not None:
        tokens += windows.length * config.other_count
    return tokens + (_task_tokens(config.zeroshot) if config.zeroshot is not None else 0)


def _task_tokens(settings: ZeroShot) -> float:
    characters = 0
    for task in settings.tasks:
        kind, rows, _ = read_rows(task_file(settings, task))
        for row in rows[: settings.count]:
            characters += sum(len("".join(pair)) for pair in pairs(kind, row, settings.separator))
    return _PADDING * characters / _CHARACTERS
