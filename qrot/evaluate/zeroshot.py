"""Zero-shot tasks: JSONL files whose rows are answered by likelihood, without an example.

The fields of a row decide how it is scored, as lm-eval scores the task of that name:

- context, continuation (LAMBADA): is the continuation what greedy decoding writes, and its
  perplexity, that of the whole continuation;
- query, choices, gold (PIQA, ARC): which choice is the most likely after the query (acc), and which
  one is by character (acc_norm: log-likelihood / len(choice), characters and not bytes, without
  the space before it);
- context_options, continuation, gold (WinoGrande): after which context the same continuation is
  the most likely.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from qrot.errors import InputError, located
from qrot.evaluate.likelihood import Request, encode_pair
from qrot.files.plain import MOST_JSON, parse_json, read_bytes, readable
from qrot.model.params import Model

Kind = Literal["continuation", "choices", "contexts"]


@dataclass(frozen=True)
class ZeroShot:
    """Tasks to judge by beside perplexity.

    Attributes:
        tasks: JSONL files, or names of such files in the folder `path`.
        path: of that folder.
        count: how many rows of each, from the start; None for all.
        bos: whether a BOS token stands before every context.
        separator: what stands between a query, without the blanks at its end, and each of its
            choices.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    tasks: tuple[str, ...]
    path: str | None = None
    count: int | None = None
    bos: bool = False
    separator: str = "\nAnswer: "

    def __post_init__(self):
        names = [Path(task).stem if _is_file(task) else task for task in self.tasks]
        if not names or len(set(names)) < len(names):
            raise InputError(f"zeroshot.tasks: {list(self.tasks)} is empty or names one twice")
        if self.path is None and not all(map(_is_file, self.tasks)):
            raise InputError("zeroshot.path: give the folder that holds tasks which are named")
        if self.count is not None and self.count < 1:
            raise InputError(f"zeroshot.count: {self.count} rows are none")


class Task(NamedTuple):
    """A task in the tokens of a model.

    Attributes:
        name: of the task.
        kind: how it is scored.
        rows: of the file.
        digest: sha256 of the file, 16 hex digits.
        requests: one a row, or one for each choice or context, row after row.
    """

    name: str
    kind: Kind
    rows: list[dict[str, Any]]
    digest: str
    requests: list[Request]


def read_tasks(settings: ZeroShot, model: Model) -> tuple[Task, ...]:
    """The tasks of a configuration.

    Raises:
        InputError: with file and line, where one cannot be read, a row is not of the kind of the
            first, or the model cannot be asked it.
    """
    config = model.network.config
    if settings.bos and config.bos_token_id is None:
        raise InputError("zeroshot.bos: this model has no BOS token")
    found = []
    for task in settings.tasks:
        file = task_file(settings, task)
        kind, rows, digest = read_rows(file)
        rows, requests = rows[: settings.count], []
        for line, row in enumerate(rows, 1):
            with located(f"{file}, line {line}"):
                requests += [
                    encode_pair(
                        model.tokenizer,
                        *pair,
                        vocab_size=config.vocab_size,
                        bos=config.bos_token_id if settings.bos else None,
                        prefix=config.prefix_token_id,
                    )
                    for pair in pairs(kind, row, settings.separator)
                ]
        found.append(Task(file.stem, kind, rows, digest, requests))
    return tuple(found)


def task_file(settings: ZeroShot, task: str) -> Path:
    """Where a task of a configuration is."""
    return Path(task) if _is_file(task) else Path(settings.path or "") / f"{task}.jsonl"


def read_rows(file: Path) -> tuple[Kind, list[dict[str, Any]], str]:
    """Kind, rows and digest of a JSONL file; raises InputError with the line that is damaged."""
    content = read_bytes(file, MOST_JSON)
    with readable(file):
        text = content.decode("utf-8-sig")
    rows, kinds = [], []
    # Not splitlines: a string in JSON may hold a U+2028.
    for number, line in enumerate(text.removesuffix("\n").split("\n"), 1):
        with located(f"{file}, line {number}"):
            row = parse_json(line)
            kinds.append(_kind(row))
            if kinds[-1] != kinds[0]:
                raise InputError("the fields of another task than those of line 1")
            rows.append(row)
    return kinds[0], rows, hashlib.sha256(content).hexdigest()[:16]


def _is_file(task: str) -> bool:
    return task.endswith(".jsonl")


def _kind(row: Any) -> Kind:
    """The kind that the fields of a row say; raises InputError where they say none."""
    if not isinstance(row, dict):
        raise InputError("not an object with fields")
    options = None
    if "context_options" in row:
        kind, texts, options = "contexts", ("continuation",), "context_options"
    elif "query" in row:
        kind, texts, options = "choices", ("query",), "choices"
    elif "context" in row:
        kind, texts = "continuation", ("context", "continuation")
    else:
        raise InputError("no field context, query or context_options")
    for name in texts:
        if not isinstance(row.get(name), str):
            raise InputError(f"{name} is missing or no text")
    if row.get("continuation") == "":
        raise InputError("continuation is empty")
    if options is not None:
        values, gold = row.get(options), row.get("gold")
        if not isinstance(values, list) or len(values) < 2:
            raise InputError(f"{options} is missing or no list of two or more")
        if not all(isinstance(value, str) and value for value in values):
            raise InputError(f"{options} holds something that is no text or empty")
        if type(gold) is not int or not 0 <= gold < len(values):
            raise InputError(f"gold is missing or none of 0 to {len(values) - 1}")
    return kind


def pairs(kind: Kind, row: dict[str, Any], separator: str) -> list[tuple[str, str]]:
    """The contexts and continuations that a row asks for."""
    if kind == "choices":
        return [(row["query"].rstrip() + separator, choice) for choice in row["choices"]]
    contexts = row["context_options"] if kind == "contexts" else [row["context"]]
    return [(context, _after(context, row["continuation"])) for context in contexts]


def _after(context: str, continuation: str) -> str:
    """The continuation with a space before it, unless there is some blank already."""
    apart = not context or context[-1].isspace() or continuation[:1].isspace()
    return continuation if apart else " " + continuation


def scores(
    task: Task,
    log_likelihood: Float[np.ndarray, " requests"],
    greedy: Bool[np.ndarray, " requests"],
) -> dict[str, Any]:
    """What a task comes to: acc and, by kind, acc_norm or perplexity, each with its standard error.

    The error is that of a mean over rows, sqrt(var / n) with n - 1 in the variance, which says how
    much another draw of rows would move it; of the perplexity exp(-m), exp(-m) times that of m.
    None for a single row.

    Args:
        task: whose requests were scored.
        log_likelihood: of each request, in nats.
        greedy: whether it is what greedy decoding writes.
    """
    if task.kind == "continuation":
        nll = -log_likelihood
        perplexity, error = math.exp(min(nll.mean(), 700)), _stderr(nll)
        return {
            **_mean("acc", greedy),
            "perplexity": perplexity,
            "perplexity_stderr": None if error is None else perplexity * error,
            "count": len(task.rows),
        }
    choices = [row["choices" if task.kind == "choices" else "context_options"] for row in task.rows]
    gold = [row["gold"] for row in task.rows]
    each = np.split(log_likelihood, np.cumsum([len(options) for options in choices])[:-1])
    found = _mean("acc", np.equal([ll.argmax() for ll in each], gold))
    if task.kind == "choices":
        by = [ll / [len(c) for c in options] for ll, options in zip(each, choices, strict=True)]
        found |= _mean("acc_norm", np.equal([ll.argmax() for ll in by], gold))
    return {**found, "count": len(task.rows)}


def _mean(name: str, values: np.ndarray) -> dict[str, float | None]:
    values = values.astype(np.float64)
    return {name: float(values.mean()), f"{name}_stderr": _stderr(values)}


def _stderr(values: np.ndarray) -> float | None:
    if len(values) < 2:
        return None
    return float(values.std(ddof=1)) / math.sqrt(len(values))
