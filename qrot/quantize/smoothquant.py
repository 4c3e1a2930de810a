"""SmoothQuant: what is hard about activations moves into the weights that read them.

Xiao, Lin, Seznec, Wu, Demouth, Han: SmoothQuant, ICML 2023, arXiv 2211.10438.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from qrot.calibrate.moments import EXACT, Moments, gather_layers
from qrot.calibrate.walk import Hidden, Place, forwards
from qrot.errors import InputError
from qrot.grid import Grid, fake_quantise
from qrot.model.params import Layers, Network
from qrot.quantize.method import Advance, Rows, network_grids
from qrot.quantize.rtn import round_weight
from qrot.rotation.transform import Transform
from qrot.sites import SITES

SMOOTHED = ("qkv", "gate_up")  # a norm writes what they read; o and down are left alone
LEAST = 1e-5  # of a weight's maximum and of a scale, as in the released code
# Tried by `search`, those next to 1/2 first, so that it wins where nothing is rounded.
ALPHAS = (0.5, 0.55, 0.45, 0.6, 0.4, 0.65, 0.35, 0.7, 0.3, 0.75, 0.8, 0.85, 0.9)
WINDOWS, POSITIONS = 4, 64  # of the calibration text, that `search` measures on
Largest = dict[str, Float[Array, " n"]]  # by site, max|X_j| of the channels


@dataclass(frozen=True)
class SmoothQuant:
    """How SmoothQuant scales.

    Attributes:
        alpha: how much of the activations' range moves into the weights: 0 moves the weights' range
            into the activations; `search` takes, for the whole model, the best of a short list.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    alpha: float | Literal["search"] = 0.5

    def __post_init__(self):
        if self.alpha != "search" and not 0 <= self.alpha <= 1:
            raise InputError(f"smoothquant.alpha: {self.alpha} is outside 0 to 1")


def smoothquant(
    network: Network,
    rows: Rows,
    settings: SmoothQuant | None = None,
    *,
    batch: int = 2,
    advance: Advance = lambda: None,
) -> tuple[Transform, float]:
    """Scales for the inputs of q, k, v and of gate, up; and the alpha that they were made with.

    The maxima of activations are those of the full-precision network over all tokens of `rows`.
    `fuse` folds the scales into the norms. The result is the same whether the norms' own scales
    are folded into the weights before or not, but for the least values.

    Args:
        network: with nothing on it; its scheme is the one that `search` is for.
        rows: tokens to calibrate on.
        settings: the defaults if None.
        batch: windows that run at once.
        advance: called after each layer.

    Raises:
        InputError: where activations are not finite.
    """
    settings, largest = settings or SmoothQuant(), []

    def look(i: int, moments: dict[str, Moments]) -> None:
        largest.append({site: here.largest for site, here in moments.items()})

    gather_layers(network, rows, SMOOTHED, look, hessians=False, batch=batch, advance=advance)
    alpha = settings.alpha
    if alpha == "search":
        alpha = best_alpha(network, rows, largest)

    def logs(site: str) -> Float[Array, "layers hidden"]:
        stacked = readers(network.params.layers, site)
        each = ([w[i] for w in stacked] for i in range(network.config.num_hidden_layers))
        return jnp.stack(
            [log_scales(x[site], w, alpha) for x, w in zip(largest, each, strict=True)]
        )

    return Transform(scales={str(SITES[site].scale): logs(site) for site in SMOOTHED}), alpha


@jax.jit
def log_scales(
    largest: Float[Array, " n"],
    weights: Sequence[Float[Array, "n _"]],
    alpha: float | Float[Array, ""],
) -> Float[Array, " n"]:
    """-log s, as in `Transform.scales`: activations become x / s, the weights that read them W s.

    s_j = max|X_j|^alpha / max|W_j|^(1 - alpha), the maximum of the weights at least 1e-5, and s_j
    at least 1e-5. At alpha = 1/2 both maxima become the root of their product.

    Args:
        largest: max|X_j|.
        weights: all that read the channels.
        alpha: as in `SmoothQuant`.
    """
    wide = jnp.promote_types(largest.dtype, jnp.float32)
    steepest = jnp.stack([jnp.abs(w).max(1).astype(wide) for w in weights]).max(0)
    s = largest.astype(wide) ** alpha / jnp.maximum(steepest, LEAST) ** (1 - alpha)
    return -jnp.log(jnp.maximum(s, LEAST))


def best_alpha(network: Network, rows: Rows, largest: Sequence[Largest]) -> float:
    """The alpha of `ALPHAS` with the smallest sum, over layers and sites, of relative errors.

    The error of a site is |Q(X / s) Q(s W) - X W|^2 / |X W|^2, with activations and weights rounded
    to the nearest level of their grids and X what the full-precision network has at 64 positions
    of each of the first four windows.

    Args:
        network: with nothing on it.
        rows: tokens to calibrate on.
        largest: of each layer.
    """
    length, some = rows.shape[1], rows[:WINDOWS]
    positions = np.unique(np.linspace(0, length - 1, POSITIONS).astype(np.int32))
    positions = jnp.asarray((np.arange(len(some))[:, None] * length + positions).ravel())
    grids, total = network_grids(network), np.zeros(len(ALPHAS))

    def visit(place: Place) -> Hidden:
        here = grids[place.index]
        done = place.run([positions], names=SMOOTHED, statistic=_taken)
        for site, x in done[0][1].items():
            weight_grids = tuple(here.weights[name] for name in SITES[site].readers)
            if not any(grid.on for grid in (here.sites[site], *weight_grids)):
                continue
            found = relative_errors(
                x,
                readers(place.layer, site),
                largest[place.index][site],
                jnp.asarray(ALPHAS),
                here.sites[site],
                weight_grids,
            )
            total[...] += np.asarray(found, np.float64)
        return [np.asarray(h) for h, _ in done]

    forwards(network, some, visit, batch=WINDOWS)
    return ALPHAS[int(total.argmin())]


def _taken(seen: dict[str, Array], positions: Array) -> dict[str, Array]:
    return {site: x.reshape(-1, x.shape[-1])[positions] for site, x in seen.items()}


def readers(layers: Layers, site: str) -> tuple[Array, ...]:
    """The weights that read a site, of one layer or of all."""
    return tuple(jnp.asarray(layers.linear(name).weight) for name in SITES[site].readers)


@partial(jax.jit, static_argnames=("grid", "weight_grids"))
def relative_errors(
    x: Float[Array, "tokens n"],
    weights: tuple[Float[Array, "n _"], ...],
    largest: Float[Array, " n"],
    alphas: Float[Array, " alphas"],
    grid: Grid,
    weight_grids: tuple[Grid, ...],
) -> Float[Array, " alphas"]:
    """|Q(X / s) Q(s W) - X W|^2 / |X W|^2 for each alpha, over all the weights that read X."""
    product = partial(jnp.matmul, precision=EXACT)
    plain = [product(x, w) for w in weights]

    def error(alpha):
        factor = jnp.exp(log_scales(largest, weights, alpha)).astype(x.dtype)
        smooth = fake_quantise(x * factor, grid)
        changes = (
            product(smooth, round_weight(w / factor[:, None], g)) - y
            for w, g, y in zip(weights, weight_grids, plain, strict=True)
        )
        return sum(jnp.square(change).sum() for change in changes)

    size = sum(jnp.square(y).sum() for y in plain)
    return jax.lax.map(error, alphas) / jnp.maximum(size, jnp.finfo(x.dtype).tiny)
