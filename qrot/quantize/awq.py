"""AWQ: input channels with large activations get larger weights, which rounding hurts less.

Lin, Tang, Tang, Yang, Chen, Wang, Xiao, Dang, Gan, Han: AWQ, MLSys 2024, arXiv 2306.00978.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from qrot.calibrate.moments import EXACT, Moments, change_layers
from qrot.grid import Grid, fake_quantise
from qrot.model.config import ModelConfig
from qrot.model.params import Layers, Network
from qrot.network import fuse_layers
from qrot.quantize.method import (
    Advance,
    Rows,
    WeightMethod,
    network_grids,
    rounded_sites,
    with_unit_scales,
    with_weights,
)
from qrot.quantize.rtn import best_clip, round_weight, round_with_scale, scale_by_group
from qrot.records import check_count
from qrot.rotation.basis import flat_scales, over_heads
from qrot.rotation.transform import Transform
from qrot.sites import SITES, Site

LEAST = 1e-4  # of mean|x|^alpha, as in the released code
UNCLIPPED = ("q", "k")  # their product is what counts, of which one of them cannot tell
Rounded = tuple[Float[Array, "n out"], Float[Array, "groups out"] | None]


@dataclass(frozen=True)
class Awq:
    """How AWQ rounds.

    Attributes:
        clip: whether clip ratios are searched as well.
        steps: how finely alpha is searched from 0 to 1, and the clip ratio from 1 to 1/2.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    method: Literal["awq"] = "awq"
    clip: bool = True
    steps: int = 20

    def __post_init__(self):
        check_count(self.steps, "weights.steps", most=10_000)


def awq(
    network: Network,
    rows: Rows,
    settings: Awq | None = None,
    *,
    batch: int = 2,
    advance: Advance = lambda: None,
) -> Network:
    """Scale each layer's inputs and round its weights to `network.scheme.weights`.

    As in the released code every layer sees what the full-precision layers before it write, and
    activations and cache are not quantised meanwhile. Norms, v and up change by the scales of what
    they write; embedding and head are left alone. Under an online rotation before down there is no
    scale for its inputs: up could not make it.

    Args:
        network: fused, or with nothing on it.
        rows: tokens to calibrate on.
        settings: the defaults if None.
        batch: windows that run at once.
        advance: called after each layer.

    Returns:
        The network with the scales folded and rounded weights, and the scales of their grid where
        that is symmetric.

    Raises:
        InputError: where a group does not divide a layer's inputs, or activations are not finite.
        ValueError: where rotations are not fused.
    """
    settings, grids, config = settings or Awq(), network_grids(network), network.config

    def change(i: int, layer: Layers, moments: dict[str, Moments]) -> Layers:
        weights = grids[i].weights
        scalable = {s: x for s, x in moments.items() if not rotated_online(network, SITES[s])}
        scales = find_scales(layer, scalable, weights, config, settings.steps)
        layer = with_unit_scales(scaled(layer, scales, config), network)
        return round_layer(layer, moments, scales, weights, config, settings)

    return change_layers(
        network,
        rows,
        change,
        sites=rounded_sites(grids),
        through_changed=False,
        batch=batch,
        advance=advance,
    )


AWQ = WeightMethod("awq", Awq, awq, "AWQ", "calibration", compensates=True, scales_inputs=True)


def rotated_online(network: Network, site: Site) -> bool:
    """Whether a rotation acts at run time on what the weights at a site read."""
    return site.online and site.rotation in network.online.rotations


def find_scales(
    layer: Layers,
    moments: dict[str, Moments],
    grids: Mapping[str, Grid],
    config: ModelConfig,
    steps: int,
) -> dict[str, Array]:
    """The log-scales of one layer by `Site.scale`, one site after the other, by `best_scale`.

    Where kv heads are shared, a channel of a value has one scale for all the query heads that read
    it, made from the mean of |x| over them.

    Args:
        layer: its weights (no `layers` axis).
        moments: by site.
        grids: of its weights.
        config: sizes of the network.
        steps: see `best_scale`.
    """
    found = {}
    for name, here in moments.items():
        site, mean = SITES[name], here.mean
        on = [reader for reader in site.readers if grids[reader].on]
        if site.per_head:
            mean = mean.reshape(config.num_key_value_heads, -1, config.head_dim).mean(1)
            mean = over_heads(mean, config.num_attention_heads).ravel()
        weights = tuple(layer.linear(reader).weight for reader in on)
        log = best_scale(weights, here.hessian, mean, tuple(grids[n] for n in on), steps)
        if site.per_head:
            log = log.reshape(config.num_key_value_heads, -1, config.head_dim)[:, 0]
        found[site.scale] = log
    return found


@partial(jax.jit, static_argnames=("grids", "steps"))
def best_scale(
    weights: tuple[Float[Array, "n _"], ...],
    hessian: Float[Array, "n n"],
    mean: Float[Array, " n"],
    grids: tuple[Grid, ...],
    steps: int = 20,
) -> Float[Array, " n"]:
    """-log s, as in `Transform.scales`: activations become x / s, the weights that read them W s.

    s = mean|x|^alpha, at least 1e-4, divided by sqrt(max s min s), with that alpha of 0, 1/steps,
    ..., 1 - 1/steps for which the sum over the weights of tr(E^T H E) is smallest, where
    E = Q(W s) / s - W and Q rounds to the nearest level, clipped as the grid says. At alpha = 0
    that is plain rounding.

    Args:
        weights: all that read the channels.
        hessian: H = X^T X of the inputs.
        mean: of |x|.
        grids: of the weights.
        steps: as above.
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


def scaled(layer: Layers, scales: dict[str, Array], config: ModelConfig) -> Layers:
    """One layer (no `layers` axis) with the scales folded in, in float64, and cast once."""
    layers, transform = jax.tree.map(lambda x: x[None], (layer, Transform(scales=scales)))
    return jax.tree.map(lambda x: x[0], fuse_layers(layers, transform, config))


def round_layer(
    layer: Layers,
    moments: dict[str, Moments],
    scales: dict[str, Array],
    grids: Mapping[str, Grid],
    config: ModelConfig,
    settings: Awq,
) -> Layers:
    """The weights of one layer that is scaled already, on their grids.

    Args:
        layer: one, with unit scales in what it leaves alone where other layers have scales.
        moments: by site, from before it was scaled.
        scales: as `find_scales` returns them.
        grids: of its weights.
        config: sizes of the network.
        settings: of the method.
    """
    for name, here in moments.items():
        site = SITES[name]
        log = scales.get(site.scale or "")
        if log is not None and site.per_head:
            log = flat_scales(log, config.num_attention_heads)
        for reader in (reader for reader in site.readers if grids[reader].on):
            steps = settings.steps if settings.clip and reader not in UNCLIPPED else 0
            weight = layer.linear(reader).weight
            rounded = _rounded(weight, here.hessian, log, grids[reader], steps)
            layer = with_weights(layer, {reader: rounded})
    return layer


@partial(jax.jit, static_argnames=("grid", "steps"))
def _rounded(weight, hessian, log, grid: Grid, steps: int) -> Rounded:
    if log is not None:
        factor = jnp.exp(log).astype(hessian.dtype)
        hessian = factor[:, None] * hessian * factor
    return clipped(weight, hessian, grid, steps) if steps else round_with_scale(weight, grid)


def clipped(
    weight: Float[Array, "n out"], hessian: Float[Array, "n n"], grid: Grid, steps: int
) -> Rounded:
    """One weight matrix on its grid, with the clip ratios that lose least on the inputs.

    For each scale of the grid the ratio of 1, 1 - 1/steps, ..., 1/2 is taken for which what its
    weights make of their own inputs changes least: tr(E^T H E) over these alone. Groups of one
    output are not independent: an output for which plain rounding has the smaller error over all
    inputs is rounded plainly (all of the weight, where it shares one scale).

    Args:
        weight: to be rounded.
        hessian: H = X^T X of what it reads.
        grid: that it is rounded to.
        steps: as above.

    Returns:
        The weight, and its scales as `Linear` has them.
    """
    wide = weight.astype(jnp.promote_types(weight.dtype, jnp.float32))
    ratios = best_clip(wide, grid, lowest=0.5, step=1 / steps, hessian=hessian)
    tried = fake_quantise(wide, grid, axis=-2, clip=ratios), scale_by_group(wide, grid, ratios)
    plain = round_with_scale(wide, grid)
    now, before = (errors(wide, q, hessian) for q, _ in (tried, plain))
    if grid.granularity == "tensor":
        now, before = now.sum(), before.sum()
    rounded, scale = jax.tree.map(lambda a, b: jnp.where(now < before, a, b), tried, plain)
    return rounded.astype(weight.dtype), scale
