"""What a row of a run comes to: fuse, round the weights, evaluate."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from qrot.errors import InputError
from qrot.evaluate.perplexity import mean_nll
from qrot.run.prepare import Fused, Inputs
from qrot.progress import FUSE, forward_seconds, millions
from qrot.run.weights import rounded
from qrot.run.zeroshot import judge_tasks
from qrot.model.forward import forward
from qrot.network import fuse
from qrot.model.params import Params
from qrot.quantize.slicegpt import cut
from qrot.rotation.forms import Learned
from qrot.scheme import Scheme


def judge(
    inputs: Inputs, name: str, learned: Learned | None, scheme: Scheme, *, kept: int | None = None
) -> dict[str, Any]:
    """Fuse, round and evaluate: nats a token and perplexity, on the other text, too, if there is
    one; scores of the zero-shot tasks; and how the weights were rounded.

    kept: directions of the residual stream that are not cut off; None for all of them.
    """
    config, model, stages = inputs.config, inputs.model, inputs.stages
    params, online, shifts, clips = model.params, None, None, None
    if learned is not None:
        clips = learned.clips
        with stages.stage(f"{name}: fusing", seconds=FUSE * millions(model)):
            params, online, shifts = fuse(
                params, learned.rotations, model.config, learned.shifts, learned.scales
            )
            jax.block_until_ready(params)
    if kept is not None:
        params, smaller = cut(params, model.config, kept)
        model = model.replace(config=smaller)
        inputs = replace(inputs, model=model)
    params, facts = rounded(inputs, name, Fused(params, online, shifts, clips), scheme)
    logits = partial(
        judged_logits,
        params,
        online,
        shifts,
        clips,
        config=model.config,
        scheme=scheme,
        dtype=config.compute_dtype,
    )

    def evaluate(rows, what: str) -> float:
        seconds = forward_seconds(model, rows.size)
        with stages.stage(f"{name}: {what}", len(rows), seconds=seconds) as advance:
            nll = mean_nll(logits, rows, config.evaluate, batch=config.batch, advance=advance)
        if not math.isfinite(nll):
            raise InputError(
                f"{name}: the loss is not finite; {config.compute_dtype} is too narrow for this "
                "model, try compute_dtype=float32"
            )
        return nll

    found = {"": evaluate(inputs.rows, "evaluating")}
    if inputs.other_rows is not None:
        found["other_"] = evaluate(inputs.other_rows, "evaluating on the other text")
    for text, nll in found.items():
        facts |= {f"{text}nll": nll, f"{text}perplexity": math.exp(min(nll, 700))}
    if inputs.tasks:
        facts["zeroshot"] = judge_tasks(inputs, name, logits)
    return facts


@partial(jax.jit, static_argnames=("config", "scheme", "dtype"))
def judged_logits(
    params: Params, online, shifts, clips, tokens, *, config, scheme: Scheme, dtype: str
):
    """Logits of weights that are fused and rounded, as every row is judged by."""
    return forward(
        params,
        tokens,
        config,
        rotations=online,
        scheme=scheme,
        shifts=shifts,
        clips=clips,
        dtype=jnp.dtype(dtype),
    )
