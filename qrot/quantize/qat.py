"""LLM-QAT: weights trained on their grids, by text and predictions of the full-precision network.

Liu, Oguz, Zhao, Chang, Stock, Mehdad, Shi, Krishnamoorthi, Chandra: LLM-QAT, 2023, arXiv
2305.17888.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from qrot.errors import InputError
from qrot.evaluate.losses import divergence
from qrot.grid import Grid, fake_quantise
from qrot.model.decode import generate
from qrot.model.forward import embedded, forward, project, run_layers
from qrot.model.params import Layers, Linear, Network
from qrot.quantize.method import Advance, Rows, WeightMethod, on_symmetric_grid
from qrot.quantize.rtn import clip_ratio, scale_by_group
from qrot.records import check_count
from qrot.rotation.transform import Online, Transform
from qrot.scheme import LayerScheme, Scheme, segments
from qrot.sites import PROJECTIONS

_TOKENS = 10**9  # of the text at most
AT_ONCE = 32  # windows that are generated together
LIKELIEST = (3, 4, 5)  # tokens of a window before the first that is drawn


@dataclass(frozen=True)
class Qat:
    """How weights are trained.

    Attributes:
        steps: of AdamW.
        batch: windows of a step, which are its own.
        length: tokens of a window.
        learning_rate: at the first step; a cosine takes it to 0.
        seed: of the generated text.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    method: Literal["qat"] = "qat"
    steps: int = 30
    batch: int = 2
    length: int = 512
    learning_rate: float = 1e-4
    seed: int = 0

    def __post_init__(self):
        for name in ("steps", "batch"):
            check_count(getattr(self, name), f"weights.{name}")
        if self.length <= max(LIKELIEST):
            raise InputError(f"weights.length: of {self.length} tokens none would be drawn")
        if (tokens := self.steps * self.batch * self.length) > _TOKENS:
            raise InputError(f"weights.steps: {tokens:,} tokens to be written are too many")
        if not 0 < self.learning_rate < math.inf:
            raise InputError(f"weights.learning_rate: {self.learning_rate} is not positive")
        if self.seed < 0:
            raise InputError("weights.seed: a seed is not negative")


def generate_text(
    network: Network,
    *,
    count: int,
    length: int,
    seed: int,
    advance: Callable[[int], None] = lambda windows: None,
) -> Int[np.ndarray, "count length"]:
    """Windows of text that the network writes itself, at full precision.

    Each begins with a token from anywhere in the vocabulary. The likeliest ones follow, until there
    are 3, 4 or 5, in turn from window to window; the rest is drawn from the network's predictions.

    Args:
        network: its scheme is left aside.
        count: windows.
        length: tokens of each.
        seed: of what is drawn.
        advance: called with the number of windows that are done.
    """
    network = network.replace(scheme=Scheme())
    first, draws = jax.random.split(jax.random.key(seed))
    starts = jax.random.randint(first, (count, 1), 0, network.config.vocab_size, jnp.int32)
    likeliest = np.resize(LIKELIEST, (count, 1))
    temperature = (np.arange(1, length) >= likeliest).astype(np.float32)
    done = []
    for i in range(0, count, AT_ONCE):
        part = slice(i, i + AT_ONCE)
        key = jax.random.fold_in(draws, i)
        more = generate(
            network,
            starts[part],
            key,
            steps=length - 1,
            temperature=jnp.asarray(temperature[part]),
        )
        done.append(np.concatenate([starts[part], more], axis=1))
        advance(len(done[-1]))
    return np.concatenate(done)


def qat(
    network: Network,
    rows: Rows,
    settings: Qat | None = None,
    *,
    batch: int = 2,
    advance: Advance = lambda note: None,
) -> Network:
    """Train all that is in the decoder layers for the network's grids, then round the weights.

    What is made small is KL(p || q): p is predicted by the network as it comes, q by the network
    whose weights, activations and cache are on their grids. Embedding, last norm and head stay.
    Where a clip ratio of the weights is searched for, it is for the weights as they come.

    Args:
        network: fused, or with nothing on it.
        rows: from `generate_text`, settings.batch windows a step; from the start again at their
            end.
        settings: the defaults if None.
        batch: not read: how many windows run at once is of the settings.
        advance: called after every step with a note on its loss, which is that before it.

    Returns:
        The network with rounded weights, and their scales where the grid is symmetric.

    Raises:
        InputError: where a loss is not finite, or a group does not divide a layer's inputs.
        ValueError: where rotations are not fused.
    """
    settings = settings or Qat()
    if isinstance(network.online, Transform) and jax.tree.leaves(network.online):
        raise ValueError("what is trained are the weights that the network has: fuse first")
    before, scheme = network.params.layers, network.scheme
    layers = jax.tree.map(_trainable, _without_scales(before))
    ratios = clip_ratios(before, scheme)
    state: Any = _optimiser(settings).init(cast(Any, layers))
    for i in range(settings.steps):
        places = np.arange(i * settings.batch, (i + 1) * settings.batch) % len(rows)
        tokens = jnp.asarray(rows[places])
        layers, state, loss = _update(layers, state, network, ratios, tokens, settings=settings)
        if not math.isfinite(loss):
            raise InputError(
                f"qat: the loss of step {i + 1} is not finite; try a smaller weights.learning_rate"
            )
        advance(note=f"loss {float(loss):.4g}")
    scaled = on_symmetric_grid(scheme, network.config.num_hidden_layers)
    rounded = _by_segment(partial(_round_all, scaled=scaled), (layers, ratios), scheme)
    values, old = _without_scales(rounded), _without_scales(before)
    values = jax.tree.map(lambda new, old: new.astype(old.dtype), values, old)
    scales = {name: rounded.linear(name).scale for name in scaled}
    values = values.replace(
        **{name: values.linear(name).replace(scale=scale) for name, scale in scales.items()}
    )
    return network.replace(params=network.params.replace(layers=values))


QAT = WeightMethod("qat", Qat, qat, "LLM-QAT", "generated")


def student_loss(
    layers: Layers,
    network: Network,
    ratios: dict[str, Any],
    tokens: Int[Array, "batch length"],
) -> Float[Array, ""]:
    """KL of the network with these layers on its grids from the network as it is.

    Differentiable by the layers.

    Args:
        layers: in training.
        network: in full precision, with the scheme to train for.
        ratios: see `clip_ratios`.
        tokens: of windows.
    """
    exact = jax.lax.stop_gradient(forward(network.replace(scheme=Scheme()), tokens))

    def prepare(
        layer: Layers, online: Online, grids: LayerScheme, ratios: dict[str, Any]
    ) -> tuple[Layers, Online]:
        return _round_one(layer, ratios, grids, network.scheme.scale_gradient), online

    student = network.replace(params=network.params.replace(layers=layers))
    hidden = embedded(student, tokens)
    hidden = run_layers(student, hidden, prepare=prepare, beside=(ratios,), remat=True)
    return divergence(exact, project(student, hidden))


def clip_ratios(layers: Layers, scheme: Scheme) -> dict[str, Any]:
    """By projection the clip ratio of each scale, [layers, ...]; None where the grid names one."""
    if not isinstance(scheme.weights.clip, str):
        return dict.fromkeys(PROJECTIONS)
    return _by_segment(_searched, layers, scheme)


def _by_segment(function: Callable, layers: Any, scheme: Scheme) -> Any:
    """function(layers, grids) of each run of layers with the same grids, put together again."""
    count = jax.tree.leaves(layers)[0].shape[0]
    done = [
        function(jax.tree.map(lambda x, a=start, b=stop: x[a:b], layers), grids)
        for start, stop, grids in segments(scheme, count)
    ]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *done)


@partial(jax.jit, static_argnums=1)
def _searched(layers: Layers, grids: LayerScheme) -> dict[str, Any]:
    def one(layer: Layers) -> dict[str, Any]:
        weights = {name: layer.linear(name).weight for name in PROJECTIONS}
        return {name: clip_ratio(w, grids.weights[name]) for name, w in weights.items()}

    return jax.lax.map(one, layers)


def _without_scales(layers: Layers) -> Layers:
    return layers.replace(**{n: layers.linear(n).replace(scale=None) for n in PROJECTIONS})


def _round_one(
    layer: Layers, ratios: dict[str, Any], grids: LayerScheme, scale_gradient: bool = True
) -> Layers:
    """The weights of one layer (no `layers` axis) on their grids; differentiable."""

    def rounded(name: str, grid: Grid) -> Linear:
        linear = layer.linear(name)
        weight = fake_quantise(
            linear.weight, grid, axis=-2, clip=ratios[name], scale_gradient=scale_gradient
        )
        return linear.replace(weight=weight)

    return layer.replace(**{name: rounded(name, grid) for name, grid in grids.weights.items()})


@partial(jax.jit, static_argnums=1, static_argnames="scaled")
def _round_all(
    state: tuple[Layers, dict[str, Any]], grids: LayerScheme, *, scaled: tuple[str, ...]
) -> Layers:
    """All layers on their grids, with the scales of these projections."""

    def one(state: tuple[Layers, dict[str, Any]]) -> Layers:
        layer, ratios = state
        done = _round_one(layer, ratios, grids)

        def scale(name: str) -> Array | None:
            grid, ratio = grids.weights[name], ratios[name]
            clip: Any = grid.clip if ratio is None else ratio
            return scale_by_group(layer.linear(name).weight, grid, clip)

        return done.replace(**{n: done.linear(n).replace(scale=scale(n)) for n in scaled})

    return jax.lax.map(one, state)


def _trainable(x):
    """A copy, which may be overwritten, in no less than float32, in which small steps count."""
    return jnp.array(x, jnp.promote_types(x.dtype, jnp.float32), copy=True)


def _optimiser(settings: Qat) -> optax.GradientTransformation:
    # A weight decay of 0 makes AdamW Adam.
    return optax.adam(optax.cosine_decay_schedule(settings.learning_rate, settings.steps))


@partial(jax.jit, static_argnames="settings", donate_argnames=("layers", "state"))
def _update(layers, state, network, ratios, tokens, *, settings: Qat):
    """One step: (layers, optimiser's state, loss before it)."""
    loss, gradient = jax.value_and_grad(student_loss)(layers, network, ratios, tokens)
    change, state = _optimiser(settings).update(gradient, state, layers)
    return optax.apply_updates(layers, change), state, loss
