"""Something of every kind that can be put on a network, for tiny models."""

import jax.numpy as jnp
import numpy as np

from qrot.rotation.forms import Blocks, Dense, Kronecker
from qrot.rotation.random import random_rotations
from qrot.rotation.transform import Transform
from qrot.sites import INPUTS, SITES


def orthogonal(draw, *shape):
    return jnp.asarray(np.linalg.qr(draw.normal(size=shape))[0])


def parts(network, seed=0):
    """Something of every kind for a network: scales and rotations by name."""
    c, draw = network.config, np.random.default_rng(seed)
    layers, heads, hd = c.num_hidden_layers, c.num_key_value_heads, c.head_dim
    key_heads = 1 if network.params.layers.k_norm is not None else heads

    def log(*shape):
        return jnp.asarray(0.3 * draw.normal(size=(layers, *shape)))

    left = next(a for a in (4, 3, 2) if c.intermediate_size % a == 0)
    right = c.intermediate_size // left
    signs = jnp.asarray(draw.choice([-1.0, 1.0], (layers, c.intermediate_size)))
    blocks = Blocks(orthogonal(draw, layers, c.intermediate_size // 4, 4, 4))
    rotations = {
        "value": Dense(orthogonal(draw, layers, heads, hd, hd)),
        "key": Dense(orthogonal(draw, layers, heads, hd, hd)),
        "down": Kronecker(
            signs, orthogonal(draw, layers, left, left), orthogonal(draw, layers, right, right)
        ),
        "down blocks": blocks,
    }
    scales = {
        "qkv": log(c.hidden_size),
        "gate_up": log(c.hidden_size),
        "down": log(c.intermediate_size),
        "keys": log(key_heads, hd // 2),
        "values": log(heads, hd),
    }
    return rotations, scales


def put(network, names):
    """Random Hadamard rotations, and of `parts` what is named."""
    rotations, scales = parts(network)
    chosen = {n.split()[0]: r for n, r in rotations.items() if f"rotation {n}" in names}
    kept = {n: s for n, s in scales.items() if f"scale {n}" in names}
    return Transform({**random_rotations(network.config, 1), **chosen}, kept)


EACH = [
    *[[f"rotation {n}"] for n in ("value", "key", "down", "down blocks")],
    *[[f"scale {n}"] for n in ("qkv", "gate_up", "down", "keys", "values")],
]
ALL = [n for names in EACH for n in names if n != "rotation down blocks"]


def some_shifts(network, draw):
    """Small shifts at every site that projections read."""
    config = network.config
    layers = config.num_hidden_layers
    return {
        site: jnp.asarray(0.1 * draw.normal(size=(layers, SITES[site].width(config))), jnp.float32)
        for site in INPUTS
    }


def some_clips(network, draw):
    """Clip ratios between 0.8 and 1 at every site."""
    layers = network.config.num_hidden_layers
    return {site: jnp.asarray(draw.uniform(0.8, 1, layers), jnp.float32) for site in SITES}
