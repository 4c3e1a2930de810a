"""Objectives of captured site inputs: no pass through the network.

Each is a mean over tokens, summed over the sites of a layer that are quantised, for all layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from qrot.grid import Grid, expected_error, fake_quantise
from qrot.calibrate.capture import Captured
from qrot.model.config import ModelConfig
from qrot.model.params import Layers, Params
from qrot.quantize.rtn import rotate_and_round
from qrot.rotation.forms import Clips, Learned, Rotations, Scales, Shifts, by_layer
from qrot.rotation.basis import Site, layer_sites
from qrot.scheme import READERS, LayerScheme, Scheme, segments

UNIFORM = 1.8  # kurtosis of the uniform distribution


def fisher(
    learned: Learned, params: Params, captured: Captured, config: ModelConfig, scheme: Scheme
) -> Float[Array, ""]:
    """Nats a token that rounding activations and cache will cost, to second order.

    1/2 sum_i E[e_i^2] h_i^2: e is the rounding error in the basis that the grid sees (`qrot.grid.
    expected_error`), h the derivative there of the log-likelihood of the network's own predictions.
    Rounding errors of different values count as independent. Since KL(p || q) has the Fisher
    information as its second derivative, this estimates `kl` without running the network again.
    """
    return _over_sites(expected_cost, learned, captured, config, scheme)


def expected_cost(
    x: Float[Array, "tokens ..."],
    g: Float[Array, "tokens ..."],
    weight: Float[Array, " tokens"],
    grid: Grid,
    site: Site,
    clip: Float[Array, ""] | None = None,
) -> Float[Array, ""]:
    """`fisher` for one site of one layer. weight: the share of all tokens that each stands for."""
    wrong = expected_error(site.go(x), grid, clip=clip)
    felt = (wrong * jnp.square(site.dual(g))).reshape(len(x), -1).sum(-1)
    return weight @ felt / 2


def whip(
    learned: Learned, params: Params, captured: Captured, config: ModelConfig, scheme: Scheme
) -> Float[Array, ""]:
    """Mean of exp(-|y|), y having a mean square of 1 (DartQuant, 2025): small if few y are."""

    def site_loss(x, g, weight, grid: Grid, site: Site, clip) -> Float[Array, ""]:
        return weight @ jnp.exp(-jnp.abs(_standard(site.go(x)))).reshape(len(x), -1).mean(-1)

    return _over_sites(site_loss, learned, captured, config, scheme)


def kurtosis(
    learned: Learned, params: Params, captured: Captured, config: ModelConfig, scheme: Scheme
) -> Float[Array, ""]:
    """Mean distance of a token's kurtosis from that of a uniform distribution (KurTail, 2025)."""

    def site_loss(x, g, weight, grid: Grid, site: Site, clip) -> Float[Array, ""]:
        fourth = jnp.square(jnp.square(_standard(site.go(x)))).mean(-1)
        return weight @ jnp.abs(fourth - UNIFORM).reshape(len(x), -1).mean(-1)

    return _over_sites(site_loss, learned, captured, config, scheme)


def _standard(y: Float[Array, "*batch n"]) -> Float[Array, "*batch n"]:
    return y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + 1e-12)


def reconstruction(
    learned: Learned, params: Params, captured: Captured, config: ModelConfig, scheme: Scheme
) -> Float[Array, ""]:
    """Mean over layers and sites of ||X W - Q(X A) Q(A^-1 W)||^2 / ||X W||^2.

    Sites: the inputs of q, k, v; of o; of gate, up; of down; and keys and values, for which W = I.
    First tokens are left out: theirs would be the only errors that count.
    """
    residual = layer_sites(Rotations(learned.rotations.residual), None, config.head_dim)["qkv"]

    def one_layer(layer: Layers, view: _View, grids: LayerScheme) -> Float[Array, ""]:
        total, rounded = jnp.zeros(()), None
        if scheme.rounds_weights:
            rounded = rotate_and_round(layer, view.rotations, view.scales, grids, config, scheme)
        written = {"v": view.sites["o"].go, "o": residual.go, "down": residual.go}
        for name, site in view.sites.items():
            grid, clip = getattr(grids, name), getattr(view.clips, name)
            if not grid.on and (rounded is None or name not in READERS):
                continue
            x, mu = view.inputs[name][captured.first :], getattr(view.shifts, name, None)
            y = site.go(x if mu is None else x - mu)
            y = fake_quantise(y, grid, clip=clip, scale_gradient=scheme.scale_gradient)
            y = y if mu is None else y + site.go(mu)
            pairs = []  # of what is computed and what should be
            if rounded is None or name not in READERS:
                y = site.back(y)
            for reader in READERS.get(name, ()):
                exact = x @ getattr(layer, reader).weight
                if rounded is None:
                    pairs.append((y @ getattr(layer, reader).weight, exact))
                else:
                    exact = written.get(reader, lambda z: z)(exact)
                    pairs.append((y @ getattr(rounded, reader).weight, exact))
            pairs = pairs or [(y, x)]
            wrong = sum(jnp.square(a - b).sum() for a, b in pairs)
            total = total + wrong / sum(jnp.square(b).sum() for _, b in pairs)
        return total

    total = _over_layers(one_layer, learned, params.layers, captured, config, scheme)
    return total / config.num_hidden_layers


class _View(NamedTuple):
    """What one layer has captured, and all that acts on it."""

    inputs: dict[str, Array]
    gradients: dict[str, Array] | None
    rotations: Rotations
    shifts: Shifts
    clips: Clips
    scales: Scales
    sites: dict[str, Site]


def _over_layers(one_layer: Callable, learned: Learned, layers, captured: Captured, config, scheme):
    """Sum of one_layer(layer's weights, view of the layer, grids) over layers, scanned."""
    rotations = learned.rotations
    beside = (learned.shifts or Shifts(), learned.clips or Clips(), learned.scales or Scales())

    def wide(tree):
        return jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), tree)

    def step(total, inputs, grids):
        layer, seen, felt, own, (shifts, clips, scales) = inputs
        turns = rotations.replace(**own)
        sites = layer_sites(turns, scales, config.head_dim)
        view = _View(wide(seen), wide(felt), turns, shifts, clips, scales, sites)
        return total + one_layer(layer, view, grids), None

    total = jnp.zeros(())
    xs = (layers, captured.inputs, captured.gradients, by_layer(rotations), beside)
    for start, stop, grids in segments(scheme, config.num_hidden_layers):
        part = jax.tree.map(lambda x, a=start, b=stop: x[a:b], xs)
        total, _ = jax.lax.scan(partial(step, grids=grids), total, part)
    return total


def _over_sites(site_loss: Callable, learned: Learned, captured: Captured, config, scheme):
    """Sum of site_loss(x - mu, gradients, weight, grid, site, clip) over what is quantised."""

    def one_layer(_, view: _View, grids: LayerScheme):
        total = jnp.zeros(())
        for name, site in view.sites.items():
            if (grid := getattr(grids, name)).on:
                x, mu = view.inputs[name], getattr(view.shifts, name, None)
                x = x if mu is None else x - mu
                g = None if view.gradients is None else view.gradients[name]
                clip = getattr(view.clips, name)
                total = total + site_loss(x, g, jnp.asarray(captured.weight), grid, site, clip)
        return total

    return _over_layers(one_layer, learned, None, captured, config, scheme)
