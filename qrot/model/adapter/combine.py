"""Several adapters as one, weighted: by sum, or by the ways that PEFT has names for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float64

from qrot.errors import InputError
from qrot.files.tensors import Tensor
from qrot.model.adapter.read import Adapter, Update
from qrot.model.io.assemble import EMBED

CombineBy = Literal["sum", "linear", "ties", "dare_linear", "dare_ties"]
Stack = Float64[np.ndarray, "adapters *shape"]


class Combining(NamedTuple):
    """How adapters become one.

    Attributes:
        weights: of the adapters.
        by: sum: the updates themselves are added (PEFT's "cat"). The others work on the factors A
            and B of equal rank, as PEFT does, each scaled by the square root of its weight:
            linear adds them; ties keeps the largest share `density` of each, elects a sign for each
            entry and takes the mean of those that have it (TIES, arXiv 2306.01708); dare_linear and
            dare_ties drop entries at random and scale the rest up (DARE, arXiv 2311.03099).
        density: the share of entries that is kept.
        seed: of what is dropped at random.
    """

    weights: tuple[float, ...]
    by: CombineBy = "sum"
    density: float = 1.0
    seed: int = 0


def combined(
    adapters: Sequence[Adapter], combining: Combining
) -> tuple[dict[str, Update], dict[str, Tensor]]:
    """The updates by module, and the tensors that are replaced, of all adapters together.

    Args:
        adapters: one or more.
        combining: their weights, and how they are put together.

    Raises:
        InputError: where they cannot be: DoRA or tensors trained whole beside others, ranks that
            differ.
    """
    weights = combining.weights
    if len(weights) != len(adapters) or not np.isfinite(weights).all():
        raise InputError(f"{len(adapters)} adapters need as many finite weights, not {weights}")
    if not 0 < combining.density <= 1:
        raise InputError(f"density is {combining.density}; it is above 0 and at most 1")
    if combining.by == "sum" and combining.density != 1:
        raise InputError("density goes with ties, dare_linear and dare_ties, not with sum")
    whole: dict[str, Tensor] = {}
    for adapter, weight in zip(adapters, weights, strict=True):
        _check_weighted(adapter, weight, alone=len(adapters) == 1)
        twice = sorted(whole.keys() & adapter.whole.keys())
        if twice:
            raise InputError(f"{adapter.path}: another adapter replaces {twice[0]}, too")
        whole |= adapter.whole
    random = np.random.default_rng(combining.seed)
    updates = {}
    for module in dict.fromkeys(module for adapter in adapters for module in adapter.updates):
        parts = [
            (adapter.updates[module], weight)
            for adapter, weight in zip(adapters, weights, strict=True)
            if module in adapter.updates
        ]
        updates[module] = _together(module, parts, combining, random)
    return updates, whole


def _check_weighted(adapter: Adapter, weight: float, *, alone: bool) -> None:
    """Raise InputError where something of an adapter has no weighted form."""
    if weight != 1 and adapter.whole:
        name = next(iter(adapter.whole))
        raise InputError(f"{adapter.path}: {name} was trained whole, which weight {weight} is not")
    if adapter.config.use_dora and not (alone and weight == 1):
        raise InputError(
            f"{adapter.path}: DoRA changes the length of rows, so that it is merged alone and with"
            " weight 1; merge the adapters one after the other"
        )


def _together(
    module: str,
    parts: Sequence[tuple[Update, float]],
    combining: Combining,
    random: np.random.Generator,
) -> Update:
    first = parts[0][0]
    if first.magnitude is not None:  # alone and of weight 1
        return first
    scalings = [update.scaling * weight for update, weight in parts]
    biases = [
        scaling * update.bias
        for (update, _), scaling in zip(parts, scalings, strict=True)
        if update.bias is not None
    ]
    bias = np.sum(biases, axis=0) if biases else None
    shapes = {(update.a.shape[1], update.b.shape[0]) for update, _ in parts}
    if len(shapes) > 1:
        raise InputError(f"the updates of {module} have several sizes: {sorted(shapes)}")
    if combining.by == "sum":
        scaled = [update.a * s for (update, _), s in zip(parts, scalings, strict=True)]
        b = np.concatenate([update.b for update, _ in parts], axis=1)
        return Update(np.concatenate(scaled), b, 1.0, None, bias)
    ranks = {len(update.a) for update, _ in parts}
    if len(ranks) > 1:
        raise InputError(f"{combining.by} needs equal ranks; those of {module} are {sorted(ranks)}")
    mix = _MIXES[combining.by]
    roots = np.sqrt(np.abs(scalings))
    a = mix(np.stack([u.a for u, _ in parts]), roots * np.sign(scalings), combining, random)
    b = mix(np.stack([u.b for u, _ in parts]), roots, combining, random)
    return Update(a, b, 1.0, None, bias)


def _weighted(tensors: Stack, weights: Float64[np.ndarray, " adapters"]) -> Stack:
    return tensors * weights.reshape(-1, *[1] * (tensors.ndim - 1))


def _linear(tensors: Stack, weights, combining: Combining, random) -> np.ndarray:
    return _weighted(tensors, weights).sum(0)


def _ties(tensors: Stack, weights, combining: Combining, random) -> np.ndarray:
    return _elected(np.stack([_largest(x, combining.density) for x in tensors]), weights)


def _dare_linear(tensors: Stack, weights, combining: Combining, random) -> np.ndarray:
    return _weighted(_dropped(tensors, combining.density, random), weights).sum(0)


def _dare_ties(tensors: Stack, weights, combining: Combining, random) -> np.ndarray:
    return _elected(_dropped(tensors, combining.density, random), weights)


_MIXES: dict[str, Callable[..., np.ndarray]] = {
    "linear": _linear,
    "ties": _ties,
    "dare_linear": _dare_linear,
    "dare_ties": _dare_ties,
}


def _largest(x: Float64[np.ndarray, "..."], density: float) -> Float64[np.ndarray, "..."]:
    """The largest share of the entries by magnitude; zeros in place of the others."""
    kept = np.zeros(x.size, bool)
    count = int(density * x.size)
    kept[np.argsort(-np.abs(x), axis=None, kind="stable")[:count]] = True
    return np.where(kept.reshape(x.shape), x, 0.0)


def _dropped(tensors: Stack, density: float, random: np.random.Generator) -> Stack:
    return np.where(random.random(tensors.shape) < density, tensors / density, 0.0)


def _elected(tensors: Stack, weights: Float64[np.ndarray, " adapters"]) -> np.ndarray:
    """The mean, for each entry, of those that have the sign of the sum."""
    sign = np.where(tensors.sum(0) >= 0, 1.0, -1.0)
    agree: Bool[np.ndarray, "adapters *shape"] = np.sign(tensors) == sign
    return (_weighted(tensors, weights) * agree).sum(0) / np.maximum(agree.sum(0), 1)


def is_embedding(module: str) -> bool:
    """Whether a module is the embedding, whose updates are transposed."""
    return f"{module}.weight" == EMBED
