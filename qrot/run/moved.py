"""How far other weights have moved the outliers that rotations were fitted to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Float, Int

from qrot.calibrate.align import aligned
from qrot.calibrate.capture import Captured, capture
from qrot.evaluate.divergence import compare_all
from qrot.evaluate.perplexity import Windows
from qrot.learn.batches import split_text
from qrot.learn.loop import start_shifts
from qrot.learn.settings import Learn
from qrot.model.params import Network
from qrot.network import fuse
from qrot.quantize.rtn import rtn
from qrot.rotation.transform import Transform
from qrot.run.anatomy import pooled
from qrot.run.inspect import site_costs
from qrot.run.judge import logits_of
from qrot.scheme import Scheme
from qrot.sites import SITES

_WINDOWS = 2  # that are captured: enough to tell the same channels from others
STEPS = 5  # of `moved`
WHENS = ("before", "after", "aligned")
Tokens = Int[np.ndarray, " tokens"]


class _Look(NamedTuple):
    """One network under the rotations.

    Attributes:
        captured: of it.
        costs: that rounding is expected to have at each site, in nats a token.
        shares: of each channel in the energy of a site, [layers, channels].
        loudest: largest |x| of each channel there.
    """

    captured: Captured
    costs: dict[str, float]
    shares: dict[str, Float[np.ndarray, "layers channels"]]
    loudest: dict[str, Float[np.ndarray, "layers channels"]]


def moved(
    before: tuple[Network, Tokens],
    after: tuple[Network, Tokens],
    transform: Transform,
    settings: Learn,
    *,
    kept: Network | None = None,
    known: Mapping[str, Any] | None = None,
    advance: Callable[[], None] = lambda: None,
) -> tuple[dict[str, Any], Transform]:
    """Compare two networks under rotations that were fitted to the first.

    Args:
        before: the network that they were fitted to, folded and with the scheme that they were
            learned for, and the tokens of the calibration text. Weights are rounded to nearest.
        after: the same for the other weights.
        transform: the rotations, and all that was fitted beside them.
        settings: of learning; windows as it has are looked at, and those that it holds out.
        kept: the first network under the rotations, rounded; None where it is to be made.
        known: what `known_of` an earlier comparison has of the first network; None for nothing.
        advance: called STEPS times.

    Returns:
        Plain values, and the transform aligned with the other weights (`qrot.calibrate.align`),
        its shifts measured there. The values: {"kl": {"before", "after", "aligned"}, "nats" the
        same (above full precision), "sites": {site: {"distance": by layer, "cost": as "kl"}},
        "picture": {"site", "channels", "before" and "after": the largest |x| by layer and channel,
        as in `qrot.run.anatomy.pooled`}}. A distance is that of Hellinger between the channels'
        shares of the energy: 0 where the same channels are as loud, 1 where other ones are. The
        picture is of the site that moved most.
    """
    old = _look(*before, transform, settings, None if known is None else known["costs"])
    advance()
    new = _look(*after, transform, settings)
    advance()
    network, tokens = after
    fitted = transform
    if np.array_equal(before[1], tokens):  # an adapter that adds tokens may read text otherwise
        fitted = aligned(transform, old.captured, new.captured)
    if transform.shifts:
        fitted = fitted.replace(shifts=start_shifts(network, tokens, settings))
    costs = (old.costs, new.costs, site_costs(network, fitted, new.captured))
    advance()
    if known is None:
        rounded = [_rounded(before[0], transform) if kept is None else kept]
        looks = _divergences(*before, rounded, settings)
    else:
        looks = [(known["kl"], known["nats"])]
    advance()
    rounded = [_rounded(network, each) for each in (transform, fitted)]
    looks += _divergences(network, tokens, rounded, settings)
    advance()
    sites = {
        name: {
            "distance": [_short(d) for d in hellinger(old.shares[name], new.shares[name])],
            "cost": dict(zip(WHENS, (_short(cost[name]) for cost in costs), strict=True)),
        }
        for name in SITES
    }
    most = max(sites, key=lambda name: float(np.mean(sites[name]["distance"])))
    found = {
        "kl": dict(zip(WHENS, (kl for kl, _ in looks), strict=True)),
        "nats": dict(zip(WHENS, (nats for _, nats in looks), strict=True)),
        "sites": sites,
        "picture": {
            "site": most,
            "channels": old.loudest[most].shape[1],
            "before": _picture(old.loudest[most]),
            "after": _picture(new.loudest[most]),
        },
    }
    return found, fitted


def known_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """What the values that `moved` returns say of the first network under the rotations alone."""
    before = WHENS[0]
    costs = {name: site["cost"][before] for name, site in found["sites"].items()}
    return {"kl": found["kl"][before], "nats": found["nats"][before], "costs": costs}


def hellinger(
    p: Float[np.ndarray, "layers channels"], q: Float[np.ndarray, "layers channels"]
) -> Float[np.ndarray, " layers"]:
    """Hellinger distance of two distributions in each layer, sqrt(sum (sqrt p - sqrt q)^2 / 2)."""
    return np.sqrt(np.maximum(0.0, np.square(np.sqrt(p) - np.sqrt(q)).sum(-1) / 2))


def _look(
    network: Network,
    tokens: Tokens,
    transform: Transform,
    settings: Learn,
    costs: dict[str, float] | None = None,
) -> _Look:
    """Without derivatives, half the work and more, where the costs are known."""
    rows = split_text(tokens, settings).rows[:_WINDOWS]
    new = costs is None
    captured, _ = capture(network, rows, vectors=settings.vectors, seed=0, gradients=new)
    costs = site_costs(network, transform, captured) if costs is None else costs
    channels = {name: _channels(captured, name) for name in SITES}
    shares, loudest = ({name: x[i] for name, x in channels.items()} for i in (0, 1))
    return _Look(captured, costs, shares, loudest)


def _rounded(network: Network, transform: Transform) -> Network:
    if network.scheme.rounds_weights:
        return rtn(fuse(network, transform))
    return network.replace(online=transform)


def _divergences(
    network: Network, tokens: Tokens, rounded: list[Network], settings: Learn
) -> list[tuple[float, float]]:
    """Of each of the rounded networks from the one in full precision, and nats above it."""
    dtype = settings.compute_dtype
    exact, *others = (logits_of(x, dtype) for x in (network.replace(scheme=Scheme()), *rounded))
    rows, windows = split_text(tokens, settings).held_out, Windows(settings.length)
    found = compare_all(exact, others, rows, windows, batch=settings.batch)
    return [(x.kl, x.nll - x.exact_nll) for x in found]


def _channels(
    captured: Captured, name: str
) -> tuple[Float[np.ndarray, "layers channels"], Float[np.ndarray, "layers channels"]]:
    """The channels' shares of the energy, and the largest |x| of each."""
    x = np.asarray(captured.inputs[name], np.float32)
    x = x.reshape(*x.shape[:2], -1)
    energy = np.einsum("lvc,v->lc", np.square(x), np.asarray(captured.weight))
    return energy / energy.sum(-1, keepdims=True), np.abs(x).max(1)


def _picture(x: Float[np.ndarray, "layers channels"]) -> list[list[float]]:
    return [[_short(value) for value in line] for line in pooled(x)]


def _short(x: float | np.floating | Array) -> float:
    return float(f"{float(x):.4g}")
