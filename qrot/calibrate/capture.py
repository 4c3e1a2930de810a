"""Site inputs of the full-precision network, and the derivatives of its likelihood there."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from qrot.calibrate.moments import outputs
from qrot.calibrate.walk import Hidden, Place, backwards, forwards, predicted_gradients, pull
from qrot.model.params import Network
from qrot.rotation.random import stream
from qrot.sites import INPUTS, SITES

STORED = jnp.bfloat16  # half the memory; a hundredth of the error of a 4-bit grid
_NAMES = tuple(SITES)


class Captured(struct.PyTreeNode):
    """Vectors drawn from windows of text, at every site of every layer.

    Attributes:
        inputs: by site, [layers, vectors, width], of keys and values [layers, vectors, kv_heads,
            head_dim].
        gradients: the same shapes, or None: derivatives, by that input, of the negative
            log-likelihood of tokens that the network itself predicts. Their second moment is the
            Fisher information.
        weight: [vectors], the share of all tokens that a vector stands for.
        first: how many of the vectors, all at the front, are the first tokens of their windows. As
            attention sinks they may be a hundred times larger than any other token.
    """

    inputs: dict[str, Float[Any, "layers vectors *width"]]
    gradients: dict[str, Float[Any, "layers vectors *width"]] | None
    weight: Float[Any, " vectors"]
    first: int = struct.field(pytree_node=False)


class _Drawn(NamedTuple):
    """Positions of the vectors in the flattened tokens of each batch; how many a window has."""

    positions: list[Int[Array, " vectors"]]
    each: int


def capture(
    network: Network,
    rows: Int[np.ndarray, "count length"],
    *,
    vectors: int,
    seed: int,
    gradients: bool = False,
    batch: int = 2,
) -> tuple[Captured, dict[str, Float[Array, "layers width"]]]:
    """The first token of each window and vectors - 1 others, and the mean input of each site.

    Args:
        network: in full precision.
        rows: tokens of the windows.
        vectors: to take of each window.
        seed: of the positions, and of the predicted tokens.
        gradients: whether to take the derivatives as well.
        batch: windows that run at once.

    Returns:
        What is captured, on the host; and the means of the sites that projections read, over all
        tokens but the first ones.
    """
    count, length = rows.shape
    drawn = _positions(count, length, vectors, seed, batch)
    entered: list[Hidden] = []
    seen: list[list[dict[str, np.ndarray]]] = []
    derivatives: list[list[dict[str, np.ndarray]]] = []
    sums: list[dict[str, np.ndarray]] = []

    def forward(place: Place) -> Hidden:
        done = place.run(drawn.positions, names=_NAMES, statistic=_taken_and_summed)
        sums.append(jax.tree.map(lambda *x: np.sum(x, axis=0), *[s for _, (_, s) in done]))
        if gradients:
            entered.append(place.hidden)
        else:
            seen.append([_host(x) for _, (x, _) in done])
        return [np.asarray(h) for h, _ in done]

    def backward(place: Place, g: Hidden) -> Hidden:
        options = {"names": _NAMES, "wrt": _NAMES, "statistic": _taken_with_gradients}
        done = [
            pull(h, dh, place.layer, place.context, at, **options)
            for h, dh, at in zip(place.hidden, g, drawn.positions, strict=True)
        ]
        entered.pop()
        seen.insert(0, [_host(x) for _, (x, _) in done])
        derivatives.insert(0, [_host(dx) for _, (_, dx) in done])
        return [np.asarray(dh) for dh, _ in done]

    last = forwards(network, rows, forward, batch=batch)
    if gradients:
        backwards(network, entered, predicted_gradients(network, last, seed), backward)
    means = jax.tree.map(lambda *x: jnp.asarray(np.stack(x) / (count * (length - 1))), *sums)
    captured = Captured(
        _joined(seen, drawn.each),
        _joined(derivatives, drawn.each) if gradients else None,
        _shares(count, length, drawn.each),
        count,
    )
    return captured, {site: means[site] for site in INPUTS}


def _shares(count: int, length: int, each: int) -> Float[np.ndarray, " vectors"]:
    """The share of all tokens that each vector stands for; first tokens, in front, for one."""
    weight = np.full(count * each, (length - 1) / (length * count * max(each - 1, 1)))
    weight[:count] = 1 / (length * count)
    return weight.astype(np.float32)


def capture_hidden(
    network: Network, rows: Int[np.ndarray, "count length"], *, batch: int = 2
) -> Float[np.ndarray, "layers_and_last count length n"]:
    """The input of every layer, and the output of the last one, on the host."""
    states: list[Hidden] = []

    def visit(place: Place) -> Hidden:
        states.append(place.hidden)
        return outputs(place)

    states.append(forwards(network, rows, visit, batch=batch))
    return np.stack([np.concatenate(parts).astype(STORED) for parts in states])


def mean_inputs(
    network: Network, rows: Int[np.ndarray, "count length"], *, windows: int = 8
) -> dict[str, Float[Array, "layers width"]]:
    """The mean input of each site over some windows, their first tokens left out."""
    return capture(network, rows[:windows], vectors=1, seed=0)[1]


def _positions(count: int, length: int, vectors: int, seed: int, batch: int) -> _Drawn:
    draw = stream(seed, "capture")
    others = min(vectors, length) - 1
    taken = [np.r_[0, 1 + draw.permutation(length - 1)[:others]] for _ in range(count)]
    groups = [np.stack(taken[i : i + batch]) for i in range(0, count, batch)]
    flat = [jnp.asarray((at + length * np.arange(len(at))[:, None]).ravel()) for at in groups]
    return _Drawn(flat, others + 1)


def _flat(x: Array) -> Array:
    return x.reshape(-1, *x.shape[2:])


def _taken_and_summed(seen: dict[str, Array], at: Int[Array, " vectors"]):
    """(What is at these positions, sums over all but the first tokens of the windows)."""
    sums = {
        name: jnp.sum(x[:, 1:].astype(jnp.promote_types(x.dtype, jnp.float32)), axis=(0, 1))
        for name, x in seen.items()
    }
    return {name: _flat(x)[at].astype(STORED) for name, x in seen.items()}, sums


def _taken_with_gradients(seen: dict[str, Array], gradients: dict[str, Array], at):
    return jax.tree.map(lambda x: _flat(x)[at].astype(STORED), (seen, gradients))


def _host(seen: dict[str, Array]) -> dict[str, np.ndarray]:
    return {name: np.asarray(x) for name, x in seen.items()}


def _joined(seen: list[list[dict[str, np.ndarray]]], each: int) -> dict[str, np.ndarray]:
    """Layers stacked, windows joined, first tokens in front."""

    def front(parts: list[np.ndarray]) -> np.ndarray:
        x = np.concatenate(parts)
        x = x.reshape(-1, each, *x.shape[1:])
        return np.concatenate([x[:, 0], x[:, 1:].reshape(-1, *x.shape[2:])])

    names = seen[0][0]
    return {n: np.stack([front([group[n] for group in layer]) for layer in seen]) for n in names}
