"""What a row of a run comes to: fuse, round the weights, evaluate."""

from __future__ import annotations

import math
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from qrot.errors import InputError
from qrot.evaluate.perplexity import mean_nll
from qrot.experiment.prepare import Inputs
from qrot.model.forward import forward
from qrot.model.fuse import fuse
from qrot.model.params import Model, Params
from qrot.quantize.gptq import gptq
from qrot.quantize.rtn import rtn
from qrot.rotation.rotations import Learned, Rotations
from qrot.scheme import Scheme

# What stages take on 2 cores, roughly, for their remaining time until they can tell it themselves:
# seconds per million parameters, for a forward pass also per thousand tokens.
_FUSE, _ROUND, _FORWARD = 0.08, 0.03, 0.03


def judge(inputs: Inputs, name: str, learned: Learned | None, scheme: Scheme) -> dict[str, Any]:
    """Fuse, round and evaluate: nats a token and perplexity, on the other text, too, if there is
    one; and what GPTQ took.
    """
    config, model, stages = inputs.config, inputs.model, inputs.stages
    params, online, shifts, clips = model.params, None, None, None
    if learned is not None:
        clips = learned.clips
        with stages.stage(f"{name}: fusing", seconds=_FUSE * _millions(model)):
            params, online, shifts = fuse(
                params, learned.rotations, model.config, learned.shifts, learned.scales
            )
            jax.block_until_ready(params)
    params, facts = _rounded(inputs, name, params, online, scheme)
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
    return facts


def _rounded(
    inputs: Inputs, name: str, params: Params, online: Rotations | None, scheme: Scheme
) -> tuple[Params, dict[str, Any]]:
    """Weights on their grids by the run's method, and what a row tells of it."""
    config, model, stages = inputs.config, inputs.model, inputs.stages
    if not scheme.rounds_weights:
        return params, {}
    if config.weight_method == "rtn":
        with stages.stage(f"{name}: rounding weights", seconds=_ROUND * _millions(model)):
            return jax.block_until_ready(rtn(params, scheme)), {}
    rows, layers = inputs.gptq_rows, model.config.num_hidden_layers
    began = time.perf_counter()
    seconds = 3 * forward_seconds(model, rows.size)
    with stages.stage(f"{name}: GPTQ", layers, seconds=seconds) as advance:
        params = gptq(
            params,
            scheme,
            model.config,
            rows,
            rotations=online,
            settings=config.gptq,
            batch=config.batch,
            advance=advance,
        )
        jax.block_until_ready(params)
    return params, {"weight_method": "gptq", "weight_seconds": time.perf_counter() - began}


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


def forward_seconds(model: Model, tokens: int) -> float:
    """What a forward pass takes, roughly."""
    return _FORWARD * _millions(model) * tokens / 1000


def _millions(model: Model) -> float:
    return sum(x.size for x in jax.tree.leaves(model.params)) / 1e6
