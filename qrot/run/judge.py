"""What a network comes to: nats a token, perplexity, scores of tasks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from qrot.errors import InputError
from qrot.evaluate.perplexity import mean_nll
from qrot.model.forward import forward
from qrot.model.params import Network
from qrot.progress import forward_seconds
from qrot.run.inputs import Inputs
from qrot.run.zeroshot import judge_tasks
from qrot.scheme import Scheme


def judge(inputs: Inputs, name: str, network: Network) -> dict[str, Any]:
    """Evaluate the network of a row.

    Args:
        inputs: of the run.
        name: of the row.
        network: as it is deployed: fused, its weights rounded.

    Returns:
        Nats a token and perplexity, on the other text, too, if there is one; scores of the
        zero-shot tasks.

    Raises:
        InputError: where what is measured is not finite.
    """
    config = inputs.config
    logits = logits_of(network, config.compute_dtype)

    def evaluate(rows: Int[np.ndarray, "count length"], what: str) -> float:
        seconds = forward_seconds(inputs.millions, rows.size)
        with inputs.stages.stage(f"{name}: {what}", len(rows), seconds=seconds) as advance:
            nll = mean_nll(logits, rows, config.evaluate, batch=config.batch, advance=advance)
        check_finite(nll, name, config.compute_dtype)
        return nll

    found = {"": evaluate(inputs.rows, "evaluating")}
    if inputs.other_rows is not None:
        found["other_"] = evaluate(inputs.other_rows, "evaluating on the other text")
    facts: dict[str, Any] = {}
    for text, nll in found.items():
        facts |= {f"{text}nll": nll, f"{text}perplexity": math.exp(min(nll, 700))}
    if inputs.tasks:
        facts["zeroshot"] = judge_tasks(inputs, name, logits)
    return facts


def logits_of(
    network: Network, dtype: str
) -> Callable[[Int[Array, "batch length"]], Float[Array, "batch length vocab"]]:
    """The compiled logits that a network is judged by, of a batch of windows.

    Args:
        network: as it is deployed: fused, its weights rounded.
        dtype: of the arithmetic.
    """
    # Layers with equal grids share a scan, and the grids of the weights count no more.
    network = network.replace(scheme=_without_weights(network.scheme))
    return partial(judged_logits, network, dtype=dtype)


def check_finite(nats: float, name: str, dtype: str) -> None:
    """Raise InputError where a loss is not finite.

    Args:
        nats: the loss.
        name: of the row that it is of.
        dtype: of the arithmetic.
    """
    if not math.isfinite(nats):
        raise InputError(
            f"{name}: the loss is not finite; {dtype} is too narrow for this model, try "
            "compute_dtype=float32"
        )


def _without_weights(scheme: Scheme) -> Scheme:
    """The scheme without the bits that weights have in some layers only."""
    overrides = tuple(replace(override, weights=None) for override in scheme.overrides)
    return replace(scheme, overrides=tuple(o for o in overrides if o.changes))


@partial(jax.jit, static_argnames="dtype")
def judged_logits(
    network: Network, tokens: Int[Array, "batch length"], *, dtype: str
) -> Float[Array, "batch length vocab"]:
    """Logits of a network whose weights are rounded, as every row is judged by."""
    return forward(network, tokens, dtype=jnp.dtype(dtype))
