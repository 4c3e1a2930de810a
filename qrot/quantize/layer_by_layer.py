"""Through the network a layer at a time, with what each layer's weights read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from qrot.errors import InputError
from qrot.grid import Grid
from qrot.model.config import ModelConfig
from qrot.model.forward import PerLayer, plain_layer
from qrot.model.params import Layers, Params
from qrot.rotation.rotations import Rotations, by_layer
from qrot.scheme import READERS, Scheme, layer_schemes

EXACT = jax.lax.Precision.HIGHEST  # a TPU would round the products to bfloat16


@dataclass(frozen=True)
class Calibration:
    """The windows of the calibration text, from all over it, and their length in tokens."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    windows: int = 64
    length: int = 512

    def __post_init__(self):
        if self.windows < 1:
            raise InputError(f"calibration.windows: {self.windows} is not positive")
        if self.length < 2:
            raise InputError(f"calibration.length: a window of {self.length} tokens is none")


@struct.dataclass
class Seen:
    """What the weights at one site of one layer read, over all tokens.

    hessian: X^T X; None where it was not asked for. largest, mean: of |x|, by channel.
    """

    hessian: Float[Array, "n n"] | None
    largest: Float[Array, " n"]
    mean: Float[Array, " n"]


def layer_by_layer(
    params: Params,
    config: ModelConfig,
    rows: Int[np.ndarray, "count length"],
    change: Callable[[int, Layers, dict[str, Seen]], Layers],
    *,
    sites: Sequence[tuple[str, ...]] | None = None,
    rotations: Rotations | None = None,
    hessians: bool = True,
    through_changed: bool = True,
    batch: int = 2,
    advance: Callable[[], None] = lambda: None,
) -> Params:
    """The parameters with every layer replaced by `change(i, layer, {site: Seen})`.

    All windows run through a layer, it is changed, then they run through it once more: the next
    layer sees what the changed one makes of them, or the one that was, if not `through_changed`.
    Activations and cache are not quantised. Beside what is changed the device holds one layer, its
    statistics and `batch` windows; all hidden states are on the host.

    rows: tokens to calibrate on. sites: of each layer, those to look at; all where it is None.
    rotations: what `fuse` left online; None where nothing was fused. advance: called after each
    layer. Raises InputError where what is read is not finite, ValueError where the rotations are
    not fused.
    """
    rotations = rotations or Rotations(fused=True)
    if not rotations.fused:
        raise ValueError("what is calibrated are the weights that the network has: fuse first")
    embed = np.asarray(params.embed)
    hidden = [embed[rows[i : i + batch]] for i in range(0, len(rows), batch)]
    windows, done = config.sliding_window, []
    for i in range(config.num_hidden_layers):
        layer, turns = jax.tree.map(lambda x, i=i: x[i], (params.layers, by_layer(rotations)))
        window = None if windows is None else windows[i]
        here = tuple(READERS) if sites is None else sites[i]
        run = partial(_run, turns=turns, window=window, rotations=rotations, config=config)
        before, seen = layer, {}
        if here:
            found = (run(h, layer, sites=here, hessians=hessians) for h in hidden)
            seen = _mean(reduce(_together, found), rows.size)
            _check(seen, i)
        layer = change(i, layer, seen)
        if i + 1 < config.num_hidden_layers:
            hidden = [np.asarray(run(h, layer if through_changed else before)) for h in hidden]
        done.append(layer)
        advance()
    return params.replace(layers=jax.tree.map(lambda *x: jnp.stack(x), *done))


def weight_grids(scheme: Scheme, layers: int) -> list[dict[str, Grid]]:
    """Of each layer the grids of its weights, by projection."""
    return [dict(grids.weights) for grids in layer_schemes(scheme, layers)]


def with_weights(layer: Layers, weights: dict[str, Array]) -> Layers:
    """The layer with other weights in some of its projections."""
    return layer.replace(**{n: getattr(layer, n).replace(weight=w) for n, w in weights.items()})


def rounded_sites(grids: Sequence[dict[str, Grid]]) -> list[tuple[str, ...]]:
    """Of each layer the sites with a weight to be rounded."""
    return [tuple(s for s, names in READERS.items() if any(g[n].on for n in names)) for g in grids]


@partial(jax.jit, static_argnames=("config", "sites", "hessians"))
def _run(
    h: Float[Array, "batch length n"],
    layer,
    *,
    turns,
    window,
    rotations,
    config,
    sites=(),
    hessians=True,
):
    """The layer's output; or sums over the tokens of what its weights read, if there are sites."""
    seen: dict[str, Seen] = {}

    def observe(site: str, x: Array) -> None:
        if site in sites:
            x = x.reshape(-1, x.shape[-1])
            size = jnp.abs(x).astype(jnp.promote_types(x.dtype, jnp.float32))
            seen[site] = Seen(_hessian(x) if hessians else None, size.max(0), size.sum(0))

    own = PerLayer(turns, window=window)
    out, _ = plain_layer(h, layer, own, rotations, config, observe=observe)
    return seen if sites else out


@jax.jit
def _together(some: dict[str, Seen], more: dict[str, Seen]) -> dict[str, Seen]:
    sums = jax.tree.map(jnp.add, some, more)
    return {
        site: x.replace(largest=jnp.maximum(some[site].largest, more[site].largest))
        for site, x in sums.items()
    }


def _mean(seen: dict[str, Seen], tokens: int) -> dict[str, Seen]:
    return {site: x.replace(mean=x.mean / tokens) for site, x in seen.items()}


def _check(seen: dict[str, Seen], layer: int) -> None:
    for site in (site for site in READERS if site in seen):
        if not np.isfinite(np.asarray(seen[site].mean)).all():
            raise InputError(f"calibration: the input of {site} in layer {layer} is not finite")


def _hessian(x: Float[Array, "tokens n"]) -> Float[Array, "n n"]:
    """X^T X. It is symmetric: four strips of its upper half are 5/8 of the work."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    product = partial(jnp.matmul, precision=EXACT, preferred_element_type=wide)
    edges = [x.shape[1] * i // 4 for i in range(5)]
    strips = [jnp.pad(product(x[:, a:b].T, x[:, a:]), ((0, 0), (a, 0))) for a, b in pairwise(edges)]
    upper = jnp.concatenate(strips)
    return jnp.triu(upper) + jnp.triu(upper, 1).T
