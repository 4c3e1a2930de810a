"""Zero-shot tasks of a run: each task's scores are kept as soon as they are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from qrot.errors import InputError
from qrot.evaluate.likelihood import TOKENS, log_likelihoods, padded_length
from qrot.evaluate.zeroshot import Task, scores
from qrot.progress import forward_seconds
from qrot.run.inputs import Inputs
from qrot.run.results import read_scores, write_results

FILE = "zeroshot.json"  # of the row that is being judged


def judge_tasks(inputs: Inputs, name: str, logits_of: Callable) -> dict[str, Any]:
    """The scores of a row by task. A row that was interrupted goes on at the next task.

    Args:
        inputs: of the run.
        name: of the row.
        logits_of: jit-compiled logits of a batch of windows.

    Raises:
        InputError: where a likelihood is not finite.
    """
    file = inputs.folder / FILE
    about = {"row": name, "model": inputs.model.digest, "protocol": zeroshot_protocol(inputs)}
    kept = read_scores(file) or {"tasks": {}}
    found = kept.pop("tasks")
    if kept != about:
        found = {}
    for task in inputs.tasks:
        if task.name not in found:
            found[task.name] = _judge(inputs, name, logits_of, task)
            write_results(file, {**about, "tasks": found})
    return found


def _judge(inputs: Inputs, name: str, logits_of: Callable, task: Task) -> dict[str, Any]:
    window = inputs.network.config.max_position_embeddings
    padded = sum(padded_length(request, window) for request in task.requests)
    seconds = forward_seconds(inputs.millions, max(padded, TOKENS))
    stage = inputs.stages.stage(f"{name}: {task.name}", len(task.requests), seconds=seconds)
    with stage as advance:
        found = log_likelihoods(logits_of, task.requests, window=window, advance=advance)
    if not np.isfinite(found[0]).all():
        raise InputError(
            f"{name}: a likelihood of {task.name} is not finite; {inputs.config.compute_dtype} is "
            "too narrow for this model, try compute_dtype=float32"
        )
    return scores(task, *found)


def zeroshot_protocol(inputs: Inputs) -> dict[str, Any]:
    """What the scores depend on beside the method; {} without tasks."""
    settings = inputs.config.zeroshot
    if settings is None:
        return {}
    return {
        "tasks": {
            task.name: {"kind": task.kind, "rows": len(task.rows), "sha256": task.digest}
            for task in inputs.tasks
        },
        "bos": settings.bos,
        "separator": settings.separator,
        "window": inputs.network.config.max_position_embeddings,
        "acc_norm": "log-likelihood by character of the choice",
    }
