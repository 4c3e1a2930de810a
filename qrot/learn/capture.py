"""Site inputs of the full-precision network, and what its output feels there; captured once.

Layers are gone through one at a time, with all windows: a layer's weights are on the device only
while it runs, if the parameters are numpy arrays on the host.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from qrot.model.config import ModelConfig
from qrot.model.forward import PerLayer, plain_layer, project
from qrot.model.params import Layers, Model, Params
from qrot.rotation.rotations import Rotations, Shifts

STORED = jnp.bfloat16  # half the memory; a hundredth of the error of a 4-bit grid


@struct.dataclass
class Captured:
    """Vectors drawn from windows of text, at every site of every layer.

    inputs: {site: [layers, vectors, ...]}, sites as in `qrot.rotation.sites`.
    gradients: the same shapes, or None: derivatives, by that input, of the negative log-likelihood
      of tokens that the network itself predicts. Their second moment is the Fisher information.
    weight: [vectors], the share of all tokens that a vector stands for.
    first: how many of the vectors, all at the front, are the first tokens of their windows. As
      attention sinks they may be a hundred times larger than any other token.
    """

    inputs: dict[str, Any]
    gradients: dict[str, Any] | None
    weight: Any
    first: int = struct.field(pytree_node=False)


def capture(
    model: Model,
    rows: Int[np.ndarray, "count length"],
    *,
    taps: int,
    seed: int,
    gradients: bool = False,
    batch: int = 2,
) -> tuple[Captured, Shifts]:
    """The first token of each window and taps - 1 others, and the mean input of each site.

    The means are over all tokens but the first ones. batch: windows that run at once. Everything
    is kept on the host.
    """
    config, count, length = model.config, *rows.shape
    draw = np.random.default_rng(seed)
    others = min(taps, length) - 1
    taken = [np.r_[0, 1 + draw.permutation(length - 1)[:others]] for _ in rows]
    groups = [
        (jnp.asarray(rows[i : i + batch]), np.stack(taken[i : i + batch]))
        for i in range(0, count, batch)
    ]
    positions = [jnp.asarray(at + length * np.arange(len(at))[:, None]) for _, at in groups]
    hidden = [np.asarray(jnp.take(model.params.embed, tokens, axis=0)) for tokens, _ in groups]

    before, sums, seen, felt = [], [], [], []
    for i in range(config.num_hidden_layers):
        layer, window = _layer(model.params, config, i)
        if gradients:
            before.append(hidden)
        done = [
            _forward(h, layer, window, p.ravel(), config)
            for h, p in zip(hidden, positions, strict=True)
        ]
        hidden = [np.asarray(h) for h, _, _ in done]
        sums.append(jax.tree.map(lambda *x: np.sum(x, axis=0), *[total for _, _, total in done]))
        if not gradients:
            seen.append([_stored(x) for _, x, _ in done])
    if gradients:
        keys = jax.random.split(jax.random.key(seed), len(groups))
        g = [
            np.asarray(loss_gradient(h, model.params, key, config))
            for h, key in zip(hidden, keys, strict=True)
        ]
        for i in reversed(range(config.num_hidden_layers)):
            layer, window = _layer(model.params, config, i)
            done = [
                _backward(h, layer, window, p.ravel(), config, grad)
                for h, p, grad in zip(before.pop(), positions, g, strict=True)
            ]
            g = [np.asarray(grad) for grad, _, _ in done]
            seen.insert(0, [_stored(x) for _, x, _ in done])
            felt.insert(0, [_stored(dx) for _, _, dx in done])
    inputs = _joined(seen, others + 1)
    weight = np.full(count * (others + 1), (length - 1) / (length * count * max(others, 1)))
    weight[:count] = 1 / (length * count)
    means = jax.tree.map(lambda *x: jnp.asarray(np.stack(x) / (count * (length - 1))), *sums)
    shifts = Shifts(**{name: means[name] for name in ("qkv", "o", "gate_up", "down")})
    return Captured(
        inputs, _joined(felt, others + 1) if gradients else None, weight.astype(np.float32), count
    ), shifts


def capture_hidden(
    model: Model, rows: Int[np.ndarray, "count length"], *, batch: int = 2
) -> Float[np.ndarray, "layers_and_last count length n"]:
    """The input of every layer, and the output of the last one, on the host."""
    config, none = model.config, jnp.zeros(0, int)
    hidden = [
        np.asarray(jnp.take(model.params.embed, jnp.asarray(rows[i : i + batch]), axis=0))
        for i in range(0, len(rows), batch)
    ]
    states = [hidden]
    for i in range(config.num_hidden_layers):
        layer, window = _layer(model.params, config, i)
        hidden = [np.asarray(_forward(h, layer, window, none, config)[0]) for h in hidden]
        states.append(hidden)
    return np.stack([np.concatenate(parts).astype(STORED) for parts in states])


def mean_shifts(model: Model, rows: Int[np.ndarray, "count length"], *, windows: int = 8) -> Shifts:
    """The mean input of each site over some windows, their first tokens left out."""
    return capture(model, rows[:windows], taps=1, seed=0)[1]


def _layer(params: Params, config: ModelConfig, i: int) -> tuple[Layers, Any]:
    layer = jax.tree.map(lambda x: x[i], params.layers)
    return layer, None if config.sliding_window is None else config.sliding_window[i]


def _run(h, layer, window, taps, config: ModelConfig, nudges=None):
    own = PerLayer(window=window, nudges=nudges)
    return plain_layer(h, layer, own, Rotations(), config, taps=taps)


@partial(jax.jit, static_argnums=4)
def _forward(h: Float[Array, "batch length n"], layer, window, taps, config: ModelConfig):
    """(output of the layer, its tapped sites, sum of each site over all but the first tokens)."""
    every = jnp.arange(h.shape[0] * h.shape[1])
    out, seen = _run(h, layer, window, every, config)
    later = (every % h.shape[1]) > 0
    total = {
        name: jnp.einsum(
            "t,t...->...", later.astype(x.dtype), x, preferred_element_type=jnp.float32
        )
        for name, x in seen.items()
    }
    return out, {name: x[taps] for name, x in seen.items()}, total


@partial(jax.jit, static_argnums=4)
def _backward(h, layer, window, taps, config: ModelConfig, g):
    """(derivative by the layer's input, tapped sites, derivatives there); g: by its output."""
    shapes = jax.eval_shape(lambda: _run(h, layer, window, taps, config)[1])
    still = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    _, pull, seen = jax.vjp(
        lambda h, nudges: _run(h, layer, window, taps, config, nudges), h, still, has_aux=True
    )
    to_input, to_sites = pull(g)
    return to_input, seen, to_sites


@partial(jax.jit, static_argnums=3)
def loss_gradient(h, params: Params, key, config: ModelConfig):
    """Derivative by the last layer's output of the nats of tokens drawn from the predictions."""

    def nats(h):
        logits = project(h, params, config)
        log_p = jax.nn.log_softmax(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)))
        drawn = jax.random.categorical(key, jax.lax.stop_gradient(log_p))
        return -jnp.take_along_axis(log_p, drawn[..., None], axis=-1).sum()

    return jax.grad(nats)(h)


def _stored(seen: dict[str, Array]) -> dict[str, np.ndarray]:
    return {name: np.asarray(x.astype(STORED)) for name, x in seen.items()}


def _joined(seen: list[list[dict[str, np.ndarray]]], taps: int) -> dict[str, np.ndarray]:
    """Layers stacked, windows joined, first tokens in front."""

    def front(parts: list[np.ndarray]) -> np.ndarray:
        x = np.concatenate(parts)
        x = x.reshape(-1, taps, *x.shape[1:])
        return np.concatenate([x[:, 0], x[:, 1:].reshape(-1, *x.shape[2:])])

    names = seen[0][0]
    return {n: np.stack([front([group[n] for group in layer]) for layer in seen]) for n in names}
