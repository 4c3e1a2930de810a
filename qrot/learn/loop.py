"""The learning loop: from calibration tokens to a transform; resumable, safe against divergence."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from qrot.calibrate.capture import Captured, capture, mean_inputs
from qrot.learn.batches import Batches, Text, make_batches, split_text
from qrot.learn.checkpoint import State, belonging, checkpoints
from qrot.learn.history import append, forget_after
from qrot.learn.objectives import OBJECTIVES
from qrot.learn.settings import Learn, rate_at, total_steps
from qrot.learn.starting_point import (
    check_start,
    given_start,
    no_shifts,
    settings_of_start,
    starting_point,
    training_scheme,
)
from qrot.learn.starts import STARTS
from qrot.learn.starts.drawn import HADAMARD
from qrot.learn.step import loss_of, optimiser_state, update
from qrot.model.params import Network
from qrot.rotation.random import RotationSites, stream
from qrot.rotation.transform import Transform

# Called with (steps done, steps in all, metrics of the step).
Progress = Callable[[int, int, dict[str, Any]], None]
Means = Mapping[str, Float[Array, "layers width"]]


class _Run(NamedTuple):
    """One call of `learn`: the network is in the dtype and has the scheme of training."""

    network: Network
    tokens: Int[np.ndarray, " tokens"]
    text: Text
    settings: Learn
    sites: RotationSites
    seed: int
    folder: Path
    given: Transform | None


def learn(
    network: Network,
    tokens: Int[np.ndarray, " tokens"],
    settings: Learn,
    *,
    sites: RotationSites,
    seed: int,
    folder: Path,
    given: Transform | None = None,
    progress: Progress = lambda step, steps, metrics: None,
) -> Transform:
    """Learn a transform of a network from calibration tokens; the best by held-out loss.

    Writes a line a step to folder/metrics.jsonl and checkpoints to folder/checkpoint; called again
    with the same arguments after a kill it goes on from the last checkpoint, and arrives where an
    uninterrupted run arrives.

    Args:
        network: folded, with nothing online and the scheme that it is to be used with.
        tokens: of the calibration text.
        settings: of learning.
        sites: that are rotated.
        seed: of all that is drawn.
        folder: that is written to.
        given: what it starts with, for a start that is given; its shifts are measured anew.
        progress: called with (steps done, steps in all, metrics of the step).

    Raises:
        InputError: where the text is too short, the start does not go with the sites or the
            settings, or the checkpoints in the folder are of something else.
    """
    check_start(settings, sites)
    text = split_text(tokens, settings)
    key = belonging(network, tokens, settings, sites, seed, given)
    scheme = training_scheme(network, settings, sites, seed)
    network = _in_training(network, settings).replace(scheme=scheme)
    run = _Run(network, tokens, text, settings, sites, seed, folder, given)
    metrics_file = folder / "metrics.jsonl"
    before = total_steps(settings) - settings.steps
    with checkpoints(folder / "checkpoint", key) as saved:
        state = saved.load(lambda: _any_state(run))
        done = 0 if state is None else int(state.step)
        forget_after(metrics_file, done)
        if state is not None and done >= settings.steps:
            return state.best
        captured, means = _capture(run, starting=state is None)
        batches = make_batches(network, text, captured, settings, seed)
        if state is None:
            start = _start(run, batches, means, captured, progress)
            state = _first_state(start, settings, held_out_loss(start, network, batches, settings))
            append(metrics_file, {"step": 0, "held_out": float(state.start_loss)})
        while int(state.step) < settings.steps:
            state, metrics = _step(state, batches, network, settings)
            append(metrics_file, metrics)
            done = int(state.step)
            if done % settings.checkpoint_every == 0 or done == settings.steps:
                saved.save(state)
            progress(before + done, before + settings.steps, metrics)
    return state.best


def start_shifts(
    network: Network, tokens: Int[np.ndarray, " tokens"], settings: Learn
) -> dict[str, Float[Array, "layers width"]]:
    """The shifts that learning starts with: means over the windows that it measures them on.

    Args:
        network: folded, with nothing online.
        tokens: of the calibration text.
        settings: of learning; `shifts` may be off.

    Raises:
        InputError: where the text is too short.
    """
    rows = split_text(tokens, settings).rows
    first = settings_of_start(settings, RotationSites()) or settings
    network = _in_training(network, settings)
    if OBJECTIVES[first.objective].captures or STARTS[first.start].directions is not None:
        return mean_inputs(network, rows, windows=first.windows)
    return mean_inputs(network, rows)


def _in_training(network: Network, settings: Learn) -> Network:
    """The network in the dtype of the arithmetic."""
    if settings.compute_dtype == "float32":
        return network
    narrow = jnp.dtype(settings.compute_dtype)
    return network.replace(params=jax.tree.map(lambda x: x.astype(narrow), network.params))


def _capture(run: _Run, *, starting: bool) -> tuple[Captured | None, Means]:
    """What the objective, and the start where there is none yet, need of the network as it is."""
    settings, rows = run.settings, run.text.rows
    objective, start = OBJECTIVES[settings.objective], STARTS[settings.start]
    if objective.captures or (starting and start.directions is not None):
        return capture(
            run.network,
            rows[: settings.windows],
            vectors=settings.vectors,
            seed=run.seed,
            gradients=objective.gradients or start.gradients,
        )
    if starting and start.learned is None and settings.shifts:
        return None, mean_inputs(run.network, rows)
    return None, {}


def _start(
    run: _Run, batches: Batches, means: Means, captured: Captured | None, progress: Progress
) -> Transform:
    """What the first step moves from: learned first, or the best of what is drawn."""
    settings, network, sites = run.settings, run.network, run.sites
    first = settings_of_start(settings, sites)
    if first is not None:
        folder, steps = run.folder / "start", total_steps(settings)
        folder.mkdir(exist_ok=True)
        return learn(
            network,
            run.tokens,
            first,
            sites=sites,
            seed=run.seed,
            folder=folder,
            progress=lambda step, _, metrics: progress(step, steps, metrics),
        )
    if STARTS[settings.start].given:
        return given_start(run.given, _any_start(run), means)
    more = [int(stream(run.seed, "draws", i).integers(2**31)) for i in range(1, settings.draws)]
    draws = [
        starting_point(network, settings, sites, seed, means, captured)
        for seed in (run.seed, *more)
    ]
    if len(draws) == 1:
        return draws[0]
    return min(draws, key=lambda start: held_out_loss(start, network, batches, settings))


def held_out_loss(
    transform: Transform, network: Network, batches: Batches, settings: Learn
) -> float:
    """The mean loss of the windows that are held out; each counts alike, whatever its batch."""
    losses = [float(loss_of(transform, network, batch, settings)) for batch, _ in batches.held_out]
    return float(np.average(losses, weights=[count for _, count in batches.held_out]))


def _first_state(start: Transform, settings: Learn, loss: float) -> State:
    return State(
        step=np.asarray(0),
        transform=start,
        optimiser=optimiser_state(start, settings),
        best=start,
        best_loss=np.asarray(loss),
        start_loss=np.asarray(loss),
        slowdown=np.asarray(1.0),
    )


def _any_state(run: _Run) -> State:
    """A state with the structure and shapes of all states of the run."""
    return _first_state(_any_start(run), run.settings, 0.0)


def _any_start(run: _Run) -> Transform:
    """A start with the structure and shapes of all starts; a random one costs nothing."""
    plain = replace(run.settings, start=HADAMARD.name, draws=1)
    return starting_point(run.network, plain, run.sites, run.seed, no_shifts(run.network.config))


def _step(
    state: State, batches: Batches, network: Network, settings: Learn
) -> tuple[State, dict[str, Any]]:
    """A step, now and then a look at held-out text, and a rollback where the run diverged."""
    began = time.perf_counter()
    done = int(state.step)
    rate = rate_at(settings, done) * float(state.slowdown)
    transform, optimiser, loss, norm = update(
        state.transform, state.optimiser, network, batches.of_step(done), rate, settings
    )
    state = state.replace(step=np.asarray(done + 1), transform=transform, optimiser=optimiser)
    metrics = {
        "step": done + 1,
        "loss": float(loss),
        "gradient_norm": float(norm),
        "learning_rate": rate,
    }
    finite = math.isfinite(metrics["loss"]) and math.isfinite(metrics["gradient_norm"])
    judged = math.inf
    if finite and ((done + 1) % settings.evaluate_every == 0 or done + 1 == settings.steps):
        judged = held_out_loss(transform, network, batches, settings)
        metrics["held_out"] = judged
        if judged < float(state.best_loss):
            state = state.replace(best=transform, best_loss=np.asarray(judged))
    diverged = not finite or (
        "held_out" in metrics and not judged <= settings.divergence * float(state.start_loss)
    )
    if diverged:
        slower = float(state.slowdown) / 2
        metrics["message"] = f"diverged; back to the best rotations, learning rate times {slower}"
        state = state.replace(
            transform=state.best,
            optimiser=optimiser_state(state.best, settings),
            slowdown=np.asarray(slower),
        )
    metrics["seconds"] = time.perf_counter() - began
    return state, metrics
