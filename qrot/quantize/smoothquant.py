"""SmoothQuant: what is hard about activations moves into the weights that read them.

Xiao, Lin, Seznec, Wu, Demouth, Han: SmoothQuant, ICML 2023, arXiv 2211.10438.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from qrot.errors import InputError
from qrot.grid import Grid, fake_quantise
from qrot.model.config import ModelConfig
from qrot.model.forward import forward_with_taps
from qrot.model.params import Layers, Params
from qrot.calibrate.moments import EXACT, Seen, layer_by_layer
from qrot.quantize.rtn import round_weight
from qrot.rotation.forms import Scales
from qrot.scheme import READERS, Scheme, layer_scheme

SITES = ("qkv", "gate_up")  # a norm writes what they read; o and down are left alone
LEAST = 1e-5  # of a weight's maximum and of a scale, as in the released code
# Tried by `search`, those next to 1/2 first, so that it wins where nothing is rounded.
ALPHAS = (0.5, 0.55, 0.45, 0.6, 0.4, 0.65, 0.35, 0.7, 0.3, 0.75, 0.8, 0.85, 0.9)
WINDOWS, POSITIONS = 4, 64  # of the calibration text, that `search` measures on


@dataclass(frozen=True)
class SmoothQuant:
    """How SmoothQuant scales.

    alpha: how much of the activations' range moves into the weights: 0 moves the weights' range
      into the activations; `search` takes, for the whole model, the best of a short list.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    alpha: float | Literal["search"] = 0.5

    def __post_init__(self):
        if self.alpha != "search" and not 0 <= self.alpha <= 1:
            raise InputError(f"smoothquant.alpha: {self.alpha} is outside 0 to 1")


def smoothquant(
    params: Params,
    scheme: Scheme,
    config: ModelConfig,
    rows: Int[np.ndarray, "count length"],
    *,
    settings: SmoothQuant | None = None,
    batch: int = 2,
    advance: Callable[[], None] = lambda: None,
) -> tuple[Scales, float]:
    """Scales for the inputs of q, k, v and of gate, up; and the alpha that they were made with.

    The maxima of activations are those of the full-precision network over all tokens of `rows`.
    `fuse` folds the scales into the norms. The result is the same whether the norms' own scales
    are folded into the weights before or not, but for the least values.

    scheme: the grids that `search` is for. advance: called after each layer.
    Raises InputError where activations are not finite.
    """
    settings, largest = settings or SmoothQuant(), []

    def look(i: int, layer: Layers, seen: dict[str, Seen]) -> Layers:
        largest.append({site: here.largest for site, here in seen.items()})
        return layer

    layer_by_layer(
        params,
        config,
        rows,
        look,
        sites=[SITES] * config.num_hidden_layers,
        hessians=False,
        batch=batch,
        advance=advance,
    )
    alpha = settings.alpha
    if alpha == "search":
        alpha = best_alpha(params, scheme, config, rows, largest)

    def logs(site: str) -> Float[Array, "layers hidden"]:
        layers = (readers(params, i, site) for i in range(config.num_hidden_layers))
        seen = (here[site] for here in largest)
        return jnp.stack([log_scales(x, w, alpha) for x, w in zip(seen, layers, strict=True)])

    return Scales(**{site: logs(site) for site in SITES}), alpha


@jax.jit
def log_scales(
    largest: Float[Array, " n"],
    weights: Sequence[Float[Array, "n _"]],
    alpha: float | Float[Array, ""],
) -> Float[Array, " n"]:
    """-log s, as in `Scales`: activations become x / s, the weights that read them W s, by channel.

    s_j = max|X_j|^alpha / max|W_j|^(1 - alpha), the maximum of the weights at least 1e-5, and s_j
    at least 1e-5. At alpha = 1/2 both maxima become the root of their product.

    largest: max|X_j|. weights: all that read the channels.
    """
    wide = jnp.promote_types(largest.dtype, jnp.float32)
    steepest = jnp.stack([jnp.abs(w).max(1).astype(wide) for w in weights]).max(0)
    s = largest.astype(wide) ** alpha / jnp.maximum(steepest, LEAST) ** (1 - alpha)
    return -jnp.log(jnp.maximum(s, LEAST))


def best_alpha(
    params: Params,
    scheme: Scheme,
    config: ModelConfig,
    rows: Int[np.ndarray, "count length"],
    largest: Sequence[dict[str, Array]],
) -> float:
    """The alpha of `ALPHAS` with the smallest sum, over layers and sites, of relative errors.

    The error of a site is |Q(X / s) Q(s W) - X W|^2 / |X W|^2, with activations and weights rounded
    to the nearest level of their grids and X what the full-precision network has at 64 positions
    of each of the first four windows.
    """
    length = rows.shape[1]
    positions = np.unique(np.linspace(0, length - 1, POSITIONS).astype(np.int32))
    tokens = jnp.asarray(rows[:WINDOWS])
    taps = jnp.asarray((np.arange(len(tokens))[:, None] * length + positions).ravel())
    inputs = _inputs(params, tokens, taps, config=config)
    total = np.zeros(len(ALPHAS))
    for i in range(config.num_hidden_layers):
        grids = layer_scheme(scheme, i)
        by_name = dict(grids.weights)
        for site in SITES:
            grid, weight_grids = getattr(grids, site), tuple(by_name[n] for n in READERS[site])
            if not any(g.on for g in (grid, *weight_grids)):
                continue
            weights, alphas = readers(params, i, site), jnp.asarray(ALPHAS)
            found = relative_errors(
                inputs[site][i], weights, largest[i][site], alphas, grid, weight_grids
            )
            total += np.asarray(found, np.float64)
    return ALPHAS[int(total.argmin())]


def readers(params: Params, layer: int, site: str) -> tuple[Array, ...]:
    """The weights of one layer that read a site."""
    return tuple(jnp.asarray(getattr(params.layers, n).weight[layer]) for n in READERS[site])


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


@partial(jax.jit, static_argnames="config")
def _inputs(params: Params, tokens, taps, *, config: ModelConfig) -> dict[str, Array]:
    _, seen = forward_with_taps(params, tokens, config, taps=taps)
    return {site: seen[site] for site in SITES}
