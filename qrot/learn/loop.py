"""The learning loop: from calibration tokens to rotations; resumable, safe against divergence."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jaxtyping import Int
from orbax.checkpoint import v1 as ocp

from qrot.errors import InputError
from qrot.evaluate.perplexity import Windows, cut_windows
from qrot.learn.batches import TAPS, make_batches
from qrot.calibrate.capture import Captured, capture, mean_shifts
from qrot.learn.objectives import OBJECTIVES
from qrot.learn.settings import Learn, rate_at
from qrot.learn.start import (
    FISHER_STEPS,
    fisher_settings,
    no_shifts,
    starting_point,
    training_scheme,
)
from qrot.learn.stiefel import OPTIMISERS
from qrot.model.params import Model
from qrot.rotation.random import RotationSites
from qrot.rotation.forms import Kronecker, Learned, Shifts, is_signed
from qrot.scheme import Scheme

CLIP_RATE = 0.1  # of the clip ratios, at the first step
SCALE_RATE = 0.03  # of the logarithms of the scales, at the first step
FAR = 1_000_003  # between the seeds of further draws, out of the way of those of users
DIVERGED = 1.2  # times the held-out loss at the start, from which a run is rolled back


@struct.dataclass
class State:
    """Everything that a resumed run needs; a pytree, checkpointed whole."""

    step: Any  # steps done
    learned: Learned
    optimiser: Any
    best: Learned
    best_loss: Any  # held-out loss of best
    start_loss: Any  # held-out loss before the first step
    slowdown: Any  # factor on the learning rate, halved at each rollback


def learn(
    model: Model,
    tokens: Int[np.ndarray, " tokens"],
    settings: Learn,
    scheme: Scheme,
    *,
    sites: RotationSites,
    seed: int,
    folder: Path,
    progress: Callable[[int, int, dict[str, Any]], None] = lambda step, steps, metrics: None,
) -> Learned:
    """Learn rotations for a folded model from calibration tokens; return the best by held-out loss.

    Writes a line a step to folder/metrics.jsonl and checkpoints to folder/checkpoint; called again
    with the same arguments after a kill it goes on from the last checkpoint, and arrives where an
    uninterrupted run arrives. progress is told (steps done, steps in all, metrics of the step).
    Raises InputError where the text is too short.
    """
    scheme = training_scheme(model, scheme, settings, sites, seed)
    rows = cut_windows(tokens, Windows(settings.length, None))
    if len(rows) <= settings.held_out:
        raise InputError(
            f"the calibration text has {len(rows)} windows of {settings.length} tokens, all "
            f"of them held out (learn.held_out: {settings.held_out})"
        )
    held_out, rows = rows[: settings.held_out], rows[settings.held_out :]
    if settings.compute_dtype != "float32":
        narrow = jnp.dtype(settings.compute_dtype)
        model = model.replace(params=jax.tree.map(lambda x: x.astype(narrow), model.params))
    keep_one: Any = ocp.training.preservation_policies.LatestN(1)
    with ocp.training.Checkpointer(
        str((folder / "checkpoint").absolute()), preservation_policy=keep_one
    ) as checkpoints:
        state = _restore(checkpoints, model, settings, scheme, sites, seed)
        metrics_file = folder / "metrics.jsonl"
        _forget_after(metrics_file, 0 if state is None else int(state.step))
        if state is not None and int(state.step) >= settings.steps:
            return state.best
        captured, shifts = _capture(model, rows, settings, seed)
        batch_of, judged = make_batches(model, rows, held_out, captured, settings, seed)

        def held_out_loss(learned: Learned) -> float:
            losses = [
                _loss(learned, model.params, batch, model.config, settings, scheme)
                for batch in judged
            ]
            return float(np.mean([float(loss) for loss in losses]))

        before = total_steps(settings) - settings.steps
        if state is None:
            if settings.start == "fisher":
                (folder / "start").mkdir(exist_ok=True)
                start = learn(
                    model,
                    tokens,
                    fisher_settings(settings, sites),
                    scheme,
                    sites=sites,
                    seed=seed,
                    folder=folder / "start",
                    progress=lambda step, _, told: progress(step, before + settings.steps, told),
                )
            else:
                draws = [
                    starting_point(model, settings, scheme, sites, n, shifts, captured)
                    for n in range(seed, seed + settings.draws * FAR, FAR)
                ]
                start = min(draws, key=held_out_loss) if len(draws) > 1 else draws[0]
            loss = np.float64(held_out_loss(start))
            state = _first_state(start, settings, loss)
            _append(metrics_file, {"step": 0, "held_out": float(loss)})
        while int(state.step) < settings.steps:
            state, metrics = _one_step(state, batch_of, held_out_loss, model, settings, scheme)
            _append(metrics_file, metrics)
            step = int(state.step)
            if step % settings.checkpoint_every == 0 or step == settings.steps:
                _save(checkpoints, folder, state)
            progress(before + step, before + settings.steps, metrics)
    return state.best


def _first_state(start: Learned, settings: Learn, loss: np.float64) -> State:
    return State(
        step=np.int64(0),
        learned=start,
        optimiser=make_optimiser(settings, 1.0).init(cast(Any, start)),
        best=start,
        best_loss=loss,
        start_loss=loss,
        slowdown=np.float64(1.0),
    )


def total_steps(settings: Learn) -> int:
    """All steps that `learn` tells of, those of a start that is learned itself included."""
    return settings.steps + (FISHER_STEPS if settings.start == "fisher" else 0)


def _capture(
    model: Model, rows, settings: Learn, seed: int
) -> tuple[Captured | None, Shifts | None]:
    """What the objective and the start need to know of the full-precision network."""
    objective = OBJECTIVES[settings.objective]
    gradients = objective.gradients or settings.start == "balanced"
    if objective.batch == "captured" or settings.start in ("pca", "balanced"):
        rows = rows[: settings.windows]
        return capture(model, rows, taps=TAPS, seed=seed, gradients=gradients)
    return None, mean_shifts(model, rows) if settings.shifts else None


def make_optimiser(settings: Learn, rate) -> optax.GradientTransformation:
    """Rotations by the chosen optimiser, scales and clip ratios by Adam, the rest stays.

    rate: a learning rate, which may be traced; the state does not depend on it. The rates of scales
    and clip ratios follow the same schedule, whatever the scale of the optimiser's rates.
    """
    turn = OPTIMISERS[settings.optimiser](rate)
    if settings.clip_norm is not None:
        turn = optax.chain(optax.clip_by_global_norm(settings.clip_norm), turn)
    relative = rate / settings.learning_rate
    return optax.partition(
        {
            "turn": turn,
            "clip": optax.adam(relative * CLIP_RATE),
            "scale": optax.adam(relative * SCALE_RATE),
            "stay": optax.set_to_zero(),
        },
        _labels,
    )


def _labels(learned: Learned) -> Learned:
    def label(rotation):
        if isinstance(rotation, Kronecker):
            return rotation.replace(signs="stay", left="turn", right="turn")
        return jax.tree.map(lambda _: "stay" if is_signed(rotation) else "turn", rotation)

    return Learned(
        jax.tree.map(label, learned.rotations, is_leaf=is_signed),
        jax.tree.map(lambda _: "stay", learned.shifts),
        jax.tree.map(lambda _: "clip", learned.clips),
        jax.tree.map(lambda _: "scale", learned.scales),
    )


@partial(jax.jit, static_argnums=(5, 6, 7), donate_argnums=(1,))
def update(learned, optimiser_state, params, batch, rate, config, settings: Learn, scheme: Scheme):
    """One step of gradient descent: (learned, optimiser state, loss, gradient norm)."""
    loss, gradient = _loss_and_gradient(learned, params, batch, config, settings, scheme)
    change, optimiser_state = make_optimiser(settings, rate).update(
        gradient, optimiser_state, learned
    )
    moving = jax.tree.map(
        lambda g, label: 0.0 if label == "stay" else g, gradient, _labels(learned)
    )
    learned = optax.apply_updates(learned, change)
    if learned.clips is not None:
        clips = jax.tree.map(lambda c: jnp.clip(c, 0.3, 1.0), learned.clips)
        learned = learned.replace(clips=clips)
    return learned, optimiser_state, loss, optax.tree.norm(moving)


@partial(jax.jit, static_argnums=(3, 4, 5))
def _loss(learned, params, batch, config, settings: Learn, scheme: Scheme):
    objective = OBJECTIVES[settings.objective]
    options = {"remat": settings.remat} if objective.batch == "tokens" else {}
    return objective.loss(learned, params, batch, config, scheme, **options)


def _loss_and_gradient(learned, params, batch, config, settings: Learn, scheme: Scheme):
    """Both as means over the parts of the batch, which are gone through one by one."""

    def one(part):
        return jax.value_and_grad(_loss)(learned, params, part, config, settings, scheme)

    if settings.accumulate == 1:
        return one(batch)
    parts = batch.reshape(settings.accumulate, -1, batch.shape[1])
    zero = jax.tree.map(jnp.zeros_like, (jnp.zeros(()), learned))
    total, _ = jax.lax.scan(
        lambda total, part: (jax.tree.map(jnp.add, total, one(part)), None), zero, parts
    )
    return jax.tree.map(lambda x: x / settings.accumulate, total)


def _one_step(state: State, batch_of, held_out_loss, model: Model, settings: Learn, scheme):
    """A step, now and then a look at held-out text, and a rollback where the run diverged."""
    began = time.perf_counter()
    done = int(state.step)
    rate = rate_at(settings, done) * float(state.slowdown)
    learned, optimiser_state, loss, norm = update(
        state.learned,
        state.optimiser,
        model.params,
        batch_of(done),
        rate,
        model.config,
        settings,
        scheme,
    )
    state = state.replace(step=np.int64(done + 1), learned=learned, optimiser=optimiser_state)
    metrics = {
        "step": done + 1,
        "loss": float(loss),
        "gradient_norm": float(norm),
        "learning_rate": rate,
    }
    finite = math.isfinite(metrics["loss"]) and math.isfinite(metrics["gradient_norm"])
    judged = math.inf
    if finite and ((done + 1) % settings.evaluate_every == 0 or done + 1 == settings.steps):
        judged = metrics["held_out"] = held_out_loss(learned)
        if judged < float(state.best_loss):
            state = state.replace(best=learned, best_loss=np.float64(judged))
    diverged = not finite or (
        "held_out" in metrics and not judged <= DIVERGED * float(state.start_loss)
    )
    if diverged:
        slower = float(state.slowdown) / 2
        metrics["message"] = f"diverged; back to the best rotations, learning rate times {slower}"
        state = state.replace(
            learned=state.best,
            optimiser=make_optimiser(settings, 1.0).init(cast(Any, state.best)),
            slowdown=np.float64(slower),
        )
    metrics["seconds"] = time.perf_counter() - began
    return state, metrics


def _leaves(state: State) -> dict[str, Any]:
    return {str(i): np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state))}


def _save(checkpoints, folder: Path, state: State) -> None:
    leaves = _leaves(state)
    # Orbax writes from threads of its own, whose errors on a full disk cannot be caught.
    needed = 2 * sum(leaf.nbytes for leaf in leaves.values())
    if shutil.disk_usage(folder).free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / "checkpoint"))
    checkpoints.save(int(state.step), leaves)


def _restore(checkpoints, model: Model, settings: Learn, scheme, sites, seed: int) -> State | None:
    """The state of the last checkpoint, if there is one."""
    if checkpoints.latest is None:
        return None
    # Any start has the leaves that the checkpoint has; a random one costs nothing.
    plain = replace(settings, start="hadamard", draws=1)
    shifts = no_shifts(model.config)
    start = starting_point(model, plain, scheme, sites, seed, shifts, None)
    like = _first_state(start, settings, np.float64(0))
    saved = checkpoints.load(checkpoints.latest.step, _leaves(like))
    leaves = [saved[str(i)] for i in range(len(saved))]
    kept = jax.tree.unflatten(jax.tree.structure(like), leaves)
    return kept.replace(
        learned=jax.tree.map(jnp.asarray, kept.learned),
        optimiser=jax.tree.map(jnp.asarray, kept.optimiser),
        best=jax.tree.map(jnp.asarray, kept.best),
    )


def _forget_after(path: Path, step: int) -> None:
    """Drop the lines of steps that the checkpoint does not have, and a line cut off by a kill."""
    if not path.exists():
        return
    lines = []
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n") and json.loads(line)["step"] <= step and step > 0:
            lines.append(line)
    partial_path = path.with_name(path.name + ".partial")
    partial_path.write_text("".join(lines))
    partial_path.replace(path)


def _append(path: Path, metrics: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(metrics) + "\n")


def load_history(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl."""
    return [json.loads(line) for line in path.read_text().splitlines()]
