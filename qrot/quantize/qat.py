"""LLM-QAT: weights trained on their grids, by text and predictions of the full-precision network.

Liu, Oguz, Zhao, Chang, Stock, Mehdad, Shi, Krishnamoorthi, Chandra: LLM-QAT, 2023, arXiv
2305.17888.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jaxtyping import Array, Float, Int

from qrot.errors import InputError
from qrot.grid import Grid, fake_quantise
from qrot.learn.end_to_end import divergence
from qrot.model.config import ModelConfig
from qrot.model.decode import generate
from qrot.model.forward import forward
from qrot.model.params import Layers, Linear, Params
from qrot.sites import PROJECTIONS
from qrot.quantize.rtn import best_clip
from qrot.rotation.forms import Clips, Rotations, Scales, Shifts
from qrot.scheme import LayerScheme, Scheme, segments

AT_ONCE = 32  # windows that are generated together
LIKELIEST = (3, 4, 5)  # tokens of a window before the first that is drawn


@dataclass(frozen=True)
class Qat:
    """How weights are trained.

    steps: of AdamW, each on `batch` windows of `length` tokens of its own.
    learning_rate: at the first step; a cosine takes it to 0.
    seed: of the generated text.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    steps: int = 30
    batch: int = 2
    length: int = 512
    learning_rate: float = 1e-4
    seed: int = 0

    def __post_init__(self):
        for name in ("steps", "batch"):
            if getattr(self, name) < 1:
                raise InputError(f"qat.{name}: {getattr(self, name)} is not positive")
        if self.length <= max(LIKELIEST):
            raise InputError(f"qat.length: of {self.length} tokens none would be drawn")
        if not 0 < self.learning_rate < math.inf:
            raise InputError(f"qat.learning_rate: {self.learning_rate} is not positive")
        if self.seed < 0:
            raise InputError("qat.seed: a seed is not negative")


def generate_text(
    params: Params,
    config: ModelConfig,
    *,
    count: int,
    length: int,
    seed: int,
    advance: Callable[[int], None] = lambda windows: None,
) -> Int[np.ndarray, "count length"]:
    """Windows of text that the network writes itself, at full precision.

    Each begins with a token from anywhere in the vocabulary. The likeliest ones follow, until there
    are 3, 4 or 5, in turn from window to window; the rest is drawn from the network's predictions.
    advance: told the windows that are done.
    """
    first, draws = jax.random.split(jax.random.key(seed))
    starts = jax.random.randint(first, (count, 1), 0, config.vocab_size, jnp.int32)
    likeliest = np.resize(LIKELIEST, (count, 1))
    heat = (np.arange(1, length) >= likeliest).astype(np.float32)
    done = []
    for i in range(0, count, AT_ONCE):
        part = slice(i, i + AT_ONCE)
        key = jax.random.fold_in(draws, i)
        more = generate(
            params, starts[part], key, config, steps=length - 1, temperature=jnp.asarray(heat[part])
        )
        done.append(np.concatenate([starts[part], more], axis=1))
        advance(len(done[-1]))
    return np.concatenate(done)


def qat(
    params: Params,
    scheme: Scheme,
    config: ModelConfig,
    rows: Int[np.ndarray, "count length"],
    *,
    rotations: Rotations | None = None,
    shifts: Shifts | None = None,
    clips: Clips | None = None,
    settings: Qat | None = None,
    advance: Callable[[float], None] = lambda loss: None,
) -> Params:
    """Train all that is in the decoder layers for the grids of `scheme`, then round the weights.

    What is made small is KL(p || q): p is predicted by the network as it comes, q by the network
    whose weights, activations and cache are on their grids. Embedding, last norm and head stay.
    Where a clip ratio of the weights is searched for, it is for the weights as they come, and kept.

    rows: from `generate_text`, settings.batch windows a step; from the start again at their end.
    rotations, shifts, clips: what `fuse` left beside the weights. advance: told the loss of every
    step, which is that before it. Raises InputError where a loss is not finite, or a group does not
    divide a layer's inputs; ValueError where the rotations are not fused.
    """
    settings = settings or Qat()
    if rotations is not None and not rotations.fused:
        raise ValueError("what is trained are the weights that the network has: fuse first")
    layers = jax.tree.map(_trainable, params.layers)
    ratios = clip_ratios(params.layers, scheme)
    state: Any = _optimiser(settings).init(cast(Any, layers))
    beside = {"rotations": rotations, "shifts": shifts, "clips": clips}
    for i in range(settings.steps):
        places = np.arange(i * settings.batch, (i + 1) * settings.batch) % len(rows)
        layers, state, loss = _update(
            layers,
            state,
            params,
            ratios,
            jnp.asarray(rows[places]),
            beside,
            config=config,
            scheme=scheme,
            settings=settings,
        )
        if not math.isfinite(loss):
            raise InputError(
                f"qat: the loss of step {i + 1} is not finite; try a smaller qat.learning_rate"
            )
        advance(float(loss))
    rounded = _by_segment(_round_all, _held(layers, ratios), scheme)
    return params.replace(
        layers=jax.tree.map(lambda new, old: new.astype(old.dtype), rounded, params.layers)
    )


def student_loss(
    layers: Layers,
    params: Params,
    ratios: dict[str, Any],
    tokens: Int[Array, "batch length"],
    config: ModelConfig,
    scheme: Scheme,
    *,
    rotations: Rotations | None = None,
    shifts: Shifts | None = None,
    clips: Clips | None = None,
) -> Float[Array, ""]:
    """KL of the network with these layers on their grids from the one of params, full precision.

    ratios: see `clip_ratios`. Differentiable by layers.
    """
    exact = jax.lax.stop_gradient(forward(params, tokens, config, rotations=rotations))

    def prepare(layer: Layers, turns: Rotations, scales: Scales, grids: LayerScheme) -> Layers:
        return _round_one(layer, grids, scheme.scale_gradient)

    logits = forward(
        params.replace(layers=_held(layers, ratios)),
        tokens,
        config,
        rotations=rotations,
        scheme=scheme,
        shifts=shifts,
        clips=clips,
        prepare=prepare,
        remat=True,
    )
    return divergence(exact, logits)


def clip_ratios(layers: Layers, scheme: Scheme) -> dict[str, Any]:
    """By projection the clip ratio of each scale, [layers, ...]; None where the grid names one."""
    if scheme.weights.clip != "mse":
        return dict.fromkeys(PROJECTIONS)
    return _by_segment(_searched, layers, scheme)


def _by_segment(function: Callable, layers: Layers, scheme: Scheme) -> Any:
    """function(layers, grids) of each run of layers with the same grids, put together again."""
    done = [
        function(jax.tree.map(lambda x, a=start, b=stop: x[a:b], layers), grids)
        for start, stop, grids in segments(scheme, layers.attention_norm.shape[0])
    ]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *done)


@partial(jax.jit, static_argnums=1)
def _searched(layers: Layers, grids: LayerScheme) -> dict[str, Any]:
    def one(layer: Layers) -> dict[str, Any]:
        return {name: best_clip(getattr(layer, name).weight, grid) for name, grid in grids.weights}

    return jax.lax.map(one, layers)


@struct.dataclass
class _Held:
    """A weight in training, and the clip ratios of its scales, which stay."""

    weight: Any
    clip: Any


def _held(layers: Layers, ratios: dict[str, Any]) -> Layers:
    """The layers with their weights as `_Held`."""

    def hold(name: str) -> Linear:
        linear = getattr(layers, name)
        return linear.replace(weight=_Held(linear.weight, ratios[name]))

    return layers.replace(**{name: hold(name) for name in PROJECTIONS})


def _round_one(layer: Layers, grids: LayerScheme, scale_gradient: bool = True) -> Layers:
    """One layer (no `layers` axis) with `_Held` weights, on their grids; differentiable."""

    def rounded(linear: Linear, grid: Grid) -> Linear:
        held = linear.weight
        weight = fake_quantise(
            held.weight, grid, axis=-2, clip=held.clip, scale_gradient=scale_gradient
        )
        return linear.replace(weight=weight)

    return layer.replace(
        **{name: rounded(getattr(layer, name), grid) for name, grid in grids.weights}
    )


@partial(jax.jit, static_argnums=1)
def _round_all(layers: Layers, grids: LayerScheme) -> Layers:
    return jax.lax.map(lambda layer: _round_one(layer, grids), layers)


def _trainable(x):
    """A copy, which may be overwritten, in no less than float32, in which small steps count."""
    return jnp.array(x, jnp.promote_types(x.dtype, jnp.float32), copy=True)


def _optimiser(settings: Qat) -> optax.GradientTransformation:
    # A weight decay of 0 makes AdamW Adam.
    return optax.adam(optax.cosine_decay_schedule(settings.learning_rate, settings.steps))


@partial(
    jax.jit, static_argnames=("config", "scheme", "settings"), donate_argnames=("layers", "state")
)
def _update(layers, state, params, ratios, tokens, beside, *, config, scheme, settings: Qat):
    """One step: (layers, optimiser's state, loss before it)."""
    loss, gradient = jax.value_and_grad(student_loss)(
        layers, params, ratios, tokens, config, scheme, **beside
    )
    change, state = _optimiser(settings).update(gradient, state, layers)
    return optax.apply_updates(layers, change), state, loss
