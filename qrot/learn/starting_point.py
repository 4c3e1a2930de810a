"""From the settings of learning to what it moves from there on, and to the scheme it trains for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from qrot.calibrate.capture import Captured
from qrot.errors import InputError
from qrot.hadamard.factors import hadamard_dense
from qrot.learn.named import named_arrays, with_arrays
from qrot.learn.settings import Learn
from qrot.learn.starts import STARTS
from qrot.model.config import ModelConfig
from qrot.model.params import Network
from qrot.network import fuse
from qrot.quantize.rtn import mean_best_clip
from qrot.rotation.forms import Blocks, Dense, Hadamard, Kronecker, Rotation
from qrot.rotation.random import RotationSites, random_rotations
from qrot.rotation.transform import Transform
from qrot.scheme import Scheme
from qrot.sites import INPUTS, SITES, Site, rotation_site


def training_scheme(network: Network, settings: Learn, sites: RotationSites, seed: int) -> Scheme:
    """The scheme that training sees: `weight_bits`, and one clip ratio in place of a search.

    Searching a clip ratio for every channel at every step would cost more than the step. The mean
    ratio that the search finds on a random rotation's weights stands in for it.

    Args:
        network: folded, with the scheme of the run.
        settings: of learning.
        sites: that are rotated.
        seed: of the random rotation.
    """
    scheme = with_weight_bits(network.scheme, settings.weight_bits)
    if scheme.weights.on and scheme.weights.clip == "mse":
        start = Transform(random_rotations(network.config, seed, sites=sites))
        clip = round(float(mean_best_clip(fuse(network.replace(scheme=scheme), start))), 3)
        scheme = replace(scheme, weights=replace(scheme.weights, clip=clip))
    return scheme


def with_weight_bits(scheme: Scheme, bits: int | None) -> Scheme:
    """A scheme with all weights at so many bits; as it is where that is None."""
    if bits is None:
        return scheme
    overrides = tuple(replace(o, weights=None) for o in scheme.overrides)
    weights = replace(scheme.weights, bits=bits)
    return replace(scheme, weights=weights, overrides=tuple(o for o in overrides if o.changes))


def starting_point(
    network: Network,
    settings: Learn,
    sites: RotationSites,
    seed: int,
    means: Mapping[str, Array],
    captured: Captured | None = None,
) -> Transform:
    """What learning moves from there on, for every start that is not itself learned.

    Args:
        network: folded, with the scheme that training sees.
        settings: of learning.
        sites: that are rotated.
        seed: of what is drawn.
        means: of the inputs of all sites that projections read; {} where none are needed.
        captured: for a start that computes R1, with gradients where it needs them.

    Raises:
        InputError: where the sites do not go with the settings.
    """
    check_start(settings, sites)
    start, config = STARTS[settings.start], network.config
    rotations = random_rotations(config, seed, kind=start.kind, sites=sites)
    if start.directions is not None:
        assert captured is not None
        residual = start.directions(captured, means)
        rotations["residual"] = Dense(jnp.asarray(residual, jnp.float32))
    if settings.value_heads and "value" in rotations:
        heads = config.num_key_value_heads
        rotations["value"] = jax.tree.map(
            lambda r: jnp.broadcast_to(r[:, None], (len(r), heads, *r.shape[1:])),
            rotations["value"],
        )
    for name in settings.online:
        rotations[name] = _learnable(rotations.get(name), rotation_site(name), config)
    return Transform(
        rotations,
        _scales(network) if settings.scales else {},
        dict(means) if settings.shifts else {},
        _clips(network) if settings.clips else {},
    )


def given_start(given: Transform | None, like: Transform, means: Mapping[str, Array]) -> Transform:
    """What another run has fitted, as a start: with the means of this network's sites.

    Args:
        given: by that run.
        like: a start of the structure and shapes that the settings ask for.
        means: of the inputs of the sites; {} where there are to be no shifts.

    Raises:
        InputError: where it is of another structure, or of other shapes.
    """
    assert given is not None
    start = given.replace(shifts=dict(means))
    theirs, wanted = (
        {name: x.shape for name, x in named_arrays(t.replace(shifts={})).items()}
        for t in (start, like)
    )
    for name in sorted(theirs.keys() ^ wanted.keys()):
        what = "has" if name in theirs else "lacks"
        raise InputError(f"learn.start: what was saved {what} {name}, unlike what is to be learned")
    for name, shape in wanted.items():
        if theirs[name] != shape:
            raise InputError(
                f"learn.start: {name} was saved with shape {list(theirs[name])}, and {list(shape)} "
                "is to be learned"
            )
    return with_arrays(like.replace(shifts=start.shifts), named_arrays(start))


def check_start(settings: Learn, sites: RotationSites) -> None:
    """Raise InputError where a start computes R1 for sites that have none, or have blocks."""
    if STARTS[settings.start].directions is not None and sites.residual is not True:
        raise InputError(f"learn.start: {settings.start} needs rotations.residual to be true")


def settings_of_start(settings: Learn, sites: RotationSites) -> Learn | None:
    """The settings of the steps that make the start; None where it takes none."""
    learned = STARTS[settings.start].learned
    if learned is None:
        return None
    start = learned.whole if sites.residual is True else learned.otherwise
    return replace(settings, start=start, steps=settings.fisher_steps, **learned.settings)


def no_shifts(config: ModelConfig) -> dict[str, Float[Array, "layers width"]]:
    """Shifts of zero at all sites that projections read."""
    layers = config.num_hidden_layers
    return {name: jnp.zeros((layers, SITES[name].width(config))) for name in INPUTS}


def _learnable(rotation: Rotation | None, site: Site, config: ModelConfig) -> Rotation:
    """The random Hadamard rotation of an online site in a form that can be learned, by layer."""
    name, layers = site.rotation, config.num_hidden_layers
    if not isinstance(rotation, Hadamard):
        raise InputError(f"learn.online: {name} is not rotated (rotations.{name})")
    n, block = rotation.signs.shape[0], rotation.block
    stack = (layers, config.num_key_value_heads) if site.per_head else (layers,)

    def stacked(x: np.ndarray) -> Array:
        return jnp.asarray(np.broadcast_to(x, (*stack, *x.shape)), jnp.float32)

    if block is not None:
        whole = rotation.dense()
        blocks = [whole[i : i + block, i : i + block] for i in range(0, n, block)]
        return Blocks(stacked(np.stack(blocks)))
    if site.per_head:
        return Dense(stacked(rotation.dense()))
    left = _left_factor(n)
    parts = (np.asarray(rotation.signs), hadamard_dense(left), hadamard_dense(n // left))
    return Kronecker(*(stacked(x) for x in parts))


def _left_factor(n: int) -> int:
    """The factor of n nearest to its square root such that Hadamard matrices of both are known."""

    def known(k: int) -> bool:
        try:
            hadamard_dense(k)
        except InputError:
            return False
        return True

    for a in sorted((a for a in range(2, n) if n % a == 0), key=lambda a: a + n // a):
        if known(a) and known(n // a):
            return a
    raise InputError(f"learn.online: no two Hadamard matrices make up {n}; use blocks for down")


def _clips(network: Network) -> dict[str, Array]:
    """The clip ratio of each site's grid, by layer."""
    layers, scheme = network.config.num_hidden_layers, network.scheme
    return {
        name: jnp.full(layers, cast(float, getattr(scheme, site.grid).clip), jnp.float32)
        for name, site in SITES.items()
    }


def _scales(network: Network) -> dict[str, Array]:
    """Log-scales of zero."""
    config, shared = network.config, network.params.layers.k_norm is not None
    layers, heads = config.num_hidden_layers, config.num_key_value_heads
    return {
        "qkv": jnp.zeros((layers, config.hidden_size)),
        "gate_up": jnp.zeros((layers, config.hidden_size)),
        "down": jnp.zeros((layers, config.intermediate_size)),
        "keys": jnp.zeros((layers, 1 if shared else heads, config.head_dim // 2)),
        "values": jnp.zeros((layers, heads, config.head_dim)),
    }
