"""What a run will take, roughly, before anything of it is run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from qrot.evaluate.zeroshot import ZeroShot, pairs, read_rows, task_file
from qrot.model.config import ModelConfig
from qrot.progress import FUSE, forward_seconds
from qrot.run.build import weight_seconds
from qrot.run.config import RunConfig
from qrot.run.methods import METHODS
from qrot.text import read_texts

_START = 12.0  # seconds: the process, the model, the text
_COMPILE = 3.0  # seconds a row
_CHARACTERS = 4  # of a token
_PADDING = 1.4  # tokens that are read, for each of a task's own


def millions_of(config: ModelConfig) -> float:
    """Millions of parameters of a model, its embedding untied."""
    hidden, heads = config.hidden_size, config.num_attention_heads + config.num_key_value_heads
    layer = 2 * hidden * heads * config.head_dim + 3 * hidden * config.intermediate_size
    return (config.num_hidden_layers * layer + 2 * config.vocab_size * hidden) / 1e6


def run_seconds(config: RunConfig, model: ModelConfig, methods: Iterable[str]) -> float:
    """What some rows of a run take by the rates of `qrot.progress`.

    Reads the text and the tasks where their size counts.

    Args:
        config: of the run.
        model: the sizes of its model.
        methods: one name a row.

    Returns:
        Seconds on two cores.

    Raises:
        InputError: where a text or a task cannot be read.
    """
    methods, m = list(methods), millions_of(model)
    judging = forward_seconds(m, _judged_tokens(config)) + _COMPILE
    return _START * bool(methods) + sum(judging + _row(config, m, name) for name in methods)


def measured_ratio(
    done: Iterable[tuple[RunConfig, dict[str, Any]]], model: ModelConfig
) -> tuple[float, int] | None:
    """How many times the rates rows took that are done.

    Args:
        done: configurations and what is in their results.json.
        model: the sizes of their model.

    Returns:
        The ratio and how many rows it is of; None where there are none.
    """
    taken = expected = count = 0.0
    for config, results in done:
        for row in results["rows"]:
            if "seconds" not in row:
                continue
            taken += row["seconds"]
            expected += run_seconds(config, model, [row["method"]]) - _START
            count += 1
    return (taken / expected, int(count)) if count else None


def _row(config: RunConfig, m: float, method: str) -> float:
    """What a row takes beside being judged."""
    record = METHODS[method]
    seconds = record.seconds(config, m) + FUSE * m * record.fuses
    if not record.scheme_of(config).rounds_weights:
        return seconds
    if config.mixed is not None:
        tokens = config.mixed.windows * config.calibration.length
        seconds += (3 + len(config.mixed.choices)) * forward_seconds(m, tokens)
    return seconds + weight_seconds(config, m)


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
