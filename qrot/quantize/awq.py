"""AWQ: input channels with large activations get larger weights, which rounding hurts less.

Lin, Tang, Tang, Yang, Chen, Wang, Xiao, Dang, Gan, Han: AWQ, MLSys 2024, arXiv 2306.00978.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from qrot.errors import InputError
from qrot.grid import Grid, fake_quantise
from qrot.model.config import ModelConfig
from qrot.network import fuse_layers
from qrot.model.params import Layers, Params
from qrot.calibrate.moments import (
    EXACT,
    Seen,
    layer_by_layer,
    rounded_sites,
    weight_grids,
)
from qrot.quantize.rtn import best_clip, round_weight
from qrot.rotation.forms import Rotations, Scales, over_heads
from qrot.scheme import READERS, Scheme

LEAST = 1e-4  # of mean|x|^alpha, as in the released code
UNCLIPPED = ("q", "k")  # their product is what counts, of which one of them cannot tell
SCALES = {"qkv": "qkv", "o": "values", "gate_up": "gate_up", "down": "down"}  # site: in `Scales`


@dataclass(frozen=True)
class Awq:
    """How AWQ rounds.

    clip: whether clip ratios are searched as well.
    steps: how finely alpha is searched from 0 to 1, and the clip ratio from 1 to 1/2.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    clip: bool = True
    steps: int = 20

    def __post_init__(self):
        if self.steps < 1:
            raise InputError(f"awq.steps: {self.steps} is not positive")


def awq(
    params: Params,
    scheme: Scheme,
    config: ModelConfig,
    rows: Int[np.ndarray, "count length"],
    *,
    rotations: Rotations | None = None,
    settings: Awq | None = None,
    batch: int = 2,
    advance: Callable[[], None] = lambda: None,
) -> Params:
    """Scale each layer's inputs and round its weights to `scheme.weights`; the scales are folded.

    As in the released code every layer sees what the full-precision layers before it write, and
    activations and cache are not quantised meanwhile. Norms, v and up change by the scales of what
    they write; embed and head are left alone. Under an online rotation before down there is no
    scale for its inputs: up could not make it.

    rows: tokens to calibrate on. rotations: what `fuse` left online; None where nothing was fused.
    advance: called after each layer.
    Raises InputError where a group does not divide a layer's inputs, or activations are not finite;
    ValueError where the rotations are not fused.
    """
    settings, grids = settings or Awq(), weight_grids(scheme, config.num_hidden_layers)
    turned = rotations is not None and rotations.down is not None

    def change(i: int, layer: Layers, seen: dict[str, Seen]) -> Layers:
        scalable = {s: x for s, x in seen.items() if s != "down" or not turned}
        scales = find_scales(layer, scalable, grids[i], config, settings.steps)
        return round_layer(scaled(layer, scales, config), seen, scales, grids[i], config, settings)

    return layer_by_layer(
        params,
        config,
        rows,
        change,
        sites=rounded_sites(grids),
        rotations=rotations,
        through_changed=False,
        batch=batch,
        advance=advance,
    )


def find_scales(
    layer: Layers, seen: dict[str, Seen], grids: dict[str, Grid], config: ModelConfig, steps: int
) -> Scales:
    """The scales of one layer (no `layers` axis), one site after the other, by `best_scale`.

    Where kv heads are shared, a channel of a value has one scale for all the query heads that read
    it, made from the mean of |x| over them.
    """
    found = {}
    for site, here in seen.items():
        names = [name for name in READERS[site] if grids[name].on]
        mean = here.mean
        if site == "o":
            mean = mean.reshape(config.num_key_value_heads, -1, config.head_dim).mean(1)
            mean = over_heads(mean, config.num_attention_heads).ravel()
        weights = tuple(getattr(layer, name).weight for name in names)
        log = best_scale(weights, here.hessian, mean, tuple(grids[n] for n in names), steps)
        if site == "o":
            log = log.reshape(config.num_key_value_heads, -1, config.head_dim)[:, 0]
        found[SCALES[site]] = log
    return Scales(**found)


@partial(jax.jit, static_argnames=("grids", "steps"))
def best_scale(
    weights: tuple[Float[Array, "n _"], ...],
    hessian: Float[Array, "n n"],
    mean: Float[Array, " n"],
    grids: tuple[Grid, ...],
    steps: int = 20,
) -> Float[Array, " n"]:
    """-log s, as in `Scales`: activations are to become x / s, the weights that read them W s.

    s = mean|x|^alpha, at least 1e-4, divided by sqrt(max s min s), with that alpha of 0, 1/steps,
    ..., 1 - 1/steps for which the sum over the weights of tr(E^T H E) is smallest, where
    E = Q(W s) / s - W and Q rounds to the nearest level, clipped as the grid says. At alpha = 0
    that is plain rounding.

    hessian: H = X^T X of the inputs. mean: of |x|.
    """
    weights = tuple(w.astype(jnp.promote_types(w.dtype, jnp.float32)) for w in weights)

    def log_scale(alpha):
        log = jnp.maximum(alpha * jnp.log(mean), np.log(LEAST))
        log = jnp.where(alpha > 0, log, 0)  # 0^0 = 1
        return log - (log.max() + log.min()) / 2

    def error(alpha):
        s = jnp.exp(log_scale(alpha))[:, None]
        rounded = (round_weight(w * s, grid) / s for w, grid in zip(weights, grids, strict=True))
        return sum(errors(w, q, hessian).sum() for w, q in zip(weights, rounded, strict=True))

    alphas = jnp.arange(steps, dtype=mean.dtype) / steps
    return -log_scale(alphas[jnp.argmin(jax.lax.map(error, alphas))])


def errors(
    weight: Float[Array, "n out"], rounded: Float[Array, "n out"], hessian: Float[Array, "n n"]
) -> Float[Array, " out"]:
    """By output, the squared error that rounding makes over all the inputs; they sum to
    tr(E^T H E)."""
    change = rounded - weight
    return jnp.sum(change * jnp.matmul(hessian, change, precision=EXACT), axis=0)


def scaled(layer: Layers, scales: Scales, config: ModelConfig) -> Layers:
    """One layer (no `layers` axis) with the scales folded in, in float64, and cast once."""
    one = jax.tree.map(lambda x: x[None], (layer, scales))
    return jax.tree.map(lambda x: x[0], fuse_layers(one[0], Rotations(), config, one[1]))


def round_layer(
    layer: Layers,
    seen: dict[str, Seen],
    scales: Scales,
    grids: dict[str, Grid],
    config: ModelConfig,
    settings: Awq,
) -> Layers:
    """The weights of one layer that is scaled already, on their grids.

    seen: before scaling.
    """
    for site, here in seen.items():
        log = getattr(scales, SCALES[site])
        if log is not None and site == "o":
            log = over_heads(log, config.num_attention_heads).ravel()
        for name in READERS[site]:
            linear, grid = getattr(layer, name), grids[name]
            steps = settings.steps if settings.clip and name not in UNCLIPPED else 0
            weight = _rounded(linear.weight, here.hessian, log, grid, steps)
            layer = layer.replace(**{name: linear.replace(weight=weight)})
    return layer


@partial(jax.jit, static_argnames=("grid", "steps"))
def _rounded(weight, hessian, log, grid: Grid, steps: int) -> Float[Array, "n out"]:
    if not grid.on:
        return weight
    if log is not None:
        factor = jnp.exp(log).astype(hessian.dtype)
        hessian = factor[:, None] * hessian * factor
    return clipped(weight, hessian, grid, steps) if steps else round_weight(weight, grid)


def clipped(
    weight: Float[Array, "n out"], hessian: Float[Array, "n n"], grid: Grid, steps: int
) -> Float[Array, "n out"]:
    """One weight matrix on its grid, with the clip ratios that lose least on the inputs.

    For each scale of the grid the ratio of 1, 1 - 1/steps, ..., 1/2 is taken for which what its
    weights make of their own inputs changes least: tr(E^T H E) over these alone. Groups of one
    output are not independent: an output for which plain rounding has the smaller error over all
    inputs is rounded plainly (all of the weight, where it shares one scale).
    """
    wide = weight.astype(jnp.promote_types(weight.dtype, jnp.float32))
    ratios = best_clip(wide, grid, lowest=0.5, step=1 / steps, hessian=hessian)
    tried, plain = fake_quantise(wide, grid, axis=-2, clip=ratios), round_weight(wide, grid)
    now, before = (errors(wide, q, hessian) for q in (tried, plain))
    if grid.granularity == "tensor":
        now, before = now.sum(), before.sum()
    return jnp.where(now < before, tried, plain).astype(weight.dtype)
