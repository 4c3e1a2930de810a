"""The learning loop: from calibration tokens to rotations; resumable, safe against divergence."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jaxtyping import Int
from orbax.checkpoint import v1 as ocp

from qrot.errors import InputError
from qrot.evaluate.perplexity import Windows, cut_windows
from qrot.grid import OFF, Scheme
from qrot.learn.capture import capture, mean_shifts
from qrot.learn.objectives import OBJECTIVES, Learned
from qrot.learn.stiefel import OPTIMISERS
from qrot.model.fuse import fuse
from qrot.model.params import Model
from qrot.quantize.rtn import mean_best_clip
from qrot.rotation.random import RotationSites, random_rotations
from qrot.rotation.rotations import Clips, Hadamard

CLIP_RATE = 0.1  # of the clip ratios, at the first step
DIVERGED = 1.2  # times the held-out loss at the start, from which a run is rolled back


@dataclass(frozen=True)
class Learn:
    """How rotations are learned.

    objective: see `qrot.learn.objectives`. optimiser: see `qrot.learn.stiefel`.
    learning_rate: at the first step; `schedule` takes it to 0 at the last, or not at all.
    batch: windows of `length` tokens in a step for cross_entropy; captured vectors a site and layer
      for reconstruction.
    start: the random rotation that learning starts from.
    weight_bits: bits of the weights in training: fewer bits for rotations that are used with
      rounded weights, 16 for weights that another method (GPTQ) will round. None: as the scheme.
    shifts: whether to quantise around each site's mean (`qrot.rotation.rotations.Shifts`).
    learn_clips: whether the clip ratios are learned beside the rotations.
    clip_norm: bound on the global norm of the gradient; None for no bound.
    held_out: windows of the calibration text that are never trained on; they choose the best.
    evaluate_every, checkpoint_every: steps between looks at them and between checkpoints.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    objective: Literal["cross_entropy", "reconstruction"] = "cross_entropy"
    optimiser: Literal["cayley_sgd", "cayley_adam", "cayley_muon", "qr_sgd", "qr_adam"] = (
        "cayley_muon"
    )
    learning_rate: float = 0.1
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    steps: int = 20
    batch: int = 2
    length: int = 512
    start: Literal["hadamard", "orthogonal", "identity"] = "hadamard"
    weight_bits: int | None = None
    shifts: bool = True
    learn_clips: bool = True
    clip_norm: float | None = 1.0
    held_out: int = 4
    evaluate_every: int = 5
    checkpoint_every: int = 5

    def __post_init__(self):
        if not 0 < self.learning_rate < math.inf:
            raise InputError(f"learn.learning_rate: {self.learning_rate} is not positive")
        for name in ("steps", "batch", "held_out", "evaluate_every", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise InputError(f"learn.{name}: {getattr(self, name)} is not positive")
        if self.weight_bits is not None and not 2 <= self.weight_bits <= OFF:
            raise InputError(f"learn.weight_bits: {self.weight_bits} is outside 2 to {OFF}")


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
    objective = OBJECTIVES[settings.objective]
    scheme = training_scheme(model, scheme, settings, sites, seed)
    rows = cut_windows(tokens, Windows(settings.length, None))
    if len(rows) <= settings.held_out:
        raise InputError(
            f"the calibration text has {len(rows)} windows of {settings.length} tokens, all "
            f"of them held out (learn.held_out: {settings.held_out})"
        )
    held_out, rows = rows[: settings.held_out], rows[settings.held_out :]
    start = initial(model, rows, settings, scheme, sites, seed)
    batches = _token_batches if objective.batch == "tokens" else _captured_batches
    batch_of, held_out_batches = batches(model, rows, held_out, settings, seed)
    evaluate = jax.jit(objective.loss, static_argnums=(3, 4))

    def held_out_loss(learned: Learned) -> float:
        losses = [
            evaluate(learned, model.params, b, model.config, scheme) for b in held_out_batches
        ]
        return float(np.mean([float(loss) for loss in losses]))

    state = State(
        step=np.int64(0),
        learned=start,
        optimiser=make_optimiser(settings, 1.0).init(cast(Any, start)),
        best=start,
        best_loss=np.float64(math.inf),
        start_loss=np.float64(math.inf),
        slowdown=np.float64(1.0),
    )
    keep_one: Any = ocp.training.preservation_policies.LatestN(1)
    with ocp.training.Checkpointer(
        str((folder / "checkpoint").absolute()), preservation_policy=keep_one
    ) as checkpoints:
        state = _restore(checkpoints, state)
        metrics_file = folder / "metrics.jsonl"
        _forget_after(metrics_file, int(state.step))
        if int(state.step) == 0:
            loss = held_out_loss(start)
            state = state.replace(best_loss=np.float64(loss), start_loss=np.float64(loss))
            _append(metrics_file, {"step": 0, "held_out": loss})
        while int(state.step) < settings.steps:
            state, metrics = _one_step(state, batch_of, held_out_loss, model, settings, scheme)
            _append(metrics_file, metrics)
            step = int(state.step)
            if step % settings.checkpoint_every == 0 or step == settings.steps:
                _save(checkpoints, folder, state)
            progress(step, settings.steps, metrics)
    return state.best


def training_scheme(
    model: Model, scheme: Scheme, settings: Learn, sites: RotationSites, seed: int
) -> Scheme:
    """The scheme that training sees: `weight_bits`, and one clip ratio in place of a search.

    Searching a clip ratio for every channel at every step would cost more than the step. The mean
    ratio that the search finds on the starting rotation's weights stands in for it.
    """
    if settings.weight_bits is not None:
        weights = replace(scheme.weights, bits=settings.weight_bits)
        overrides = tuple(replace(o, weights=None) for o in scheme.overrides)
        overrides = tuple(o for o in overrides if o.changes)
        scheme = replace(scheme, weights=weights, overrides=overrides)
    if scheme.weights.on and scheme.weights.clip == "mse":
        start = random_rotations(model.config, seed, kind=settings.start, sites=sites)
        params, _, _ = fuse(model.params, start, model.config)
        clip = round(float(mean_best_clip(params, scheme)), 3)
        scheme = replace(scheme, weights=replace(scheme.weights, clip=clip))
    return scheme


def initial(model: Model, rows, settings: Learn, scheme: Scheme, sites, seed: int) -> Learned:
    """Where learning starts: random rotations, the sites' means, the scheme's clip ratios."""
    rotations = random_rotations(model.config, seed, kind=settings.start, sites=sites)
    shifts = mean_shifts(model, rows) if settings.shifts else None
    clips = None
    if settings.learn_clips:
        layers = model.config.num_hidden_layers
        of = {"keys": scheme.keys.clip, "values": scheme.values.clip}
        names = ("qkv", "o", "gate_up", "down", "keys", "values")
        start = {n: float(of.get(n, scheme.activations.clip)) for n in names}
        clips = Clips(**{n: jnp.full(layers, ratio) for n, ratio in start.items()})
    return Learned(rotations, shifts, clips)


def make_optimiser(settings: Learn, rate) -> optax.GradientTransformation:
    """Rotations by the chosen optimiser, clip ratios by Adam, the rest stays.

    rate: a learning rate, which may be traced; the state does not depend on it. The clip ratios'
    own rate follows the same schedule, whatever the scale of the optimiser's rates.
    """
    turn = OPTIMISERS[settings.optimiser](rate)
    if settings.clip_norm is not None:
        turn = optax.chain(optax.clip_by_global_norm(settings.clip_norm), turn)
    return optax.partition(
        {
            "turn": turn,
            "clip": optax.adam(rate * (CLIP_RATE / settings.learning_rate)),
            "stay": optax.set_to_zero(),
        },
        _labels,
    )


def _labels(learned: Learned) -> Learned:
    def label(leaf):
        return jax.tree.map(lambda _: "stay", leaf) if isinstance(leaf, Hadamard) else "turn"

    return Learned(
        jax.tree.map(label, learned.rotations, is_leaf=lambda x: isinstance(x, Hadamard)),
        jax.tree.map(lambda _: "stay", learned.shifts),
        jax.tree.map(lambda _: "clip", learned.clips),
    )


def rate_at(settings: Learn, step: int) -> float:
    """The learning rate of a step, counted from 0."""
    done = step / settings.steps
    shape = {
        "constant": 1.0,
        "linear": 1 - done,
        "cosine": (1 + math.cos(math.pi * done)) / 2,
    }
    return settings.learning_rate * shape[settings.schedule]


@partial(jax.jit, static_argnums=(5, 6, 7), donate_argnums=(1,))
def update(learned, optimiser_state, params, batch, rate, config, settings: Learn, scheme: Scheme):
    """One step of gradient descent: (learned, optimiser state, loss, gradient norm)."""
    objective = OBJECTIVES[settings.objective]
    loss, gradient = jax.value_and_grad(objective.loss)(learned, params, batch, config, scheme)
    optimiser = make_optimiser(settings, rate)
    change, optimiser_state = optimiser.update(gradient, optimiser_state, learned)
    turning = Learned(gradient.rotations.replace(key=None, down=None), None, gradient.clips)
    learned = optax.apply_updates(learned, change)
    if learned.clips is not None:
        clips = jax.tree.map(lambda c: jnp.clip(c, 0.3, 1.0), learned.clips)
        learned = learned.replace(clips=clips)
    return learned, optimiser_state, loss, optax.tree.norm(turning)


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


def _token_batches(model: Model, rows, held_out, settings: Learn, seed: int):
    """(step -> rows to train on, batches of held-out rows)."""
    size = min(settings.batch, len(rows))

    def batch_of(step: int):
        return jnp.asarray(rows[_drawn(len(rows), size, seed, step)])

    return batch_of, [jnp.asarray(held_out[i : i + size]) for i in range(0, len(held_out), size)]


def _captured_batches(model: Model, rows, held_out, settings: Learn, seed: int):
    """(step -> site inputs to train on, batches of held-out site inputs)."""
    site_inputs = capture(model, rows, settings.batch * settings.steps, seed)
    vectors = site_inputs["qkv"].shape[1]
    size = min(settings.batch, vectors)

    def batch_of(step: int):
        order = _drawn(vectors, size, seed, step)
        return {name: jnp.asarray(x[:, order]) for name, x in site_inputs.items()}

    judged = capture(model, held_out, 2 * settings.batch, seed)
    return batch_of, [{name: jnp.asarray(x) for name, x in judged.items()}]


def _drawn(count: int, size: int, seed: int, step: int) -> Int[np.ndarray, " size"]:
    """Which of `count` make up a step's batch: all once an epoch, by seed and step alone."""
    epoch, place = divmod(step * size, count - count % size)
    return np.random.default_rng((seed, epoch)).permutation(count)[place : place + size]


def _leaves(state: State) -> dict[str, Any]:
    return {str(i): np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state))}


def _save(checkpoints, folder: Path, state: State) -> None:
    leaves = _leaves(state)
    # Orbax writes from threads of its own, whose errors on a full disk cannot be caught.
    needed = 2 * sum(leaf.nbytes for leaf in leaves.values())
    if shutil.disk_usage(folder).free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / "checkpoint"))
    checkpoints.save(int(state.step), leaves)


def _restore(checkpoints, state: State) -> State:
    if checkpoints.latest is None:
        return state
    saved = checkpoints.load(checkpoints.latest.step, _leaves(state))
    leaves = [saved[str(i)] for i in range(len(saved))]
    kept = jax.tree.unflatten(jax.tree.structure(state), leaves)
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
