"""Something of every kind that can be learned, for tiny models."""

import jax.numpy as jnp
import numpy as np

from qrot.rotation.random import random_rotations
from qrot.rotation.forms import Clips, Kronecker, Scales, Shifts


def orthogonal(draw, *shape):
    return jnp.asarray(np.linalg.qr(draw.normal(size=shape))[0])


def parts(model, seed=0):
    """Something of every kind for a model: scales and rotations by name."""
    c, draw = model.config, np.random.default_rng(seed)
    layers, heads, hd = c.num_hidden_layers, c.num_key_value_heads, c.head_dim
    key_heads = 1 if model.params.layers.k_norm is not None else heads

    def log(*shape):
        return jnp.asarray(0.3 * draw.normal(size=(layers, *shape)))

    left = next(a for a in (4, 3, 2) if c.intermediate_size % a == 0)
    right = c.intermediate_size // left
    signs = jnp.asarray(draw.choice([-1.0, 1.0], (layers, c.intermediate_size)))
    blocks = orthogonal(draw, layers, c.intermediate_size // 4, 4, 4)
    rotations = {
        "value": orthogonal(draw, layers, heads, 1, hd, hd),
        "key": orthogonal(draw, layers, heads, 1, hd, hd),
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


def put(model, names):
    """Random Hadamard rotations, and of `parts` what is named."""
    rotations, scales = parts(model)
    chosen = {n.split()[0]: r for n, r in rotations.items() if f"rotation {n}" in names}
    kept = Scales(**{n: s for n, s in scales.items() if f"scale {n}" in names})
    return random_rotations(model.config, 1).replace(**chosen), kept


EACH = [
    *[[f"rotation {n}"] for n in ("value", "key", "down", "down blocks")],
    *[[f"scale {n}"] for n in ("qkv", "gate_up", "down", "keys", "values")],
]
ALL = [n for names in EACH for n in names if n != "rotation down blocks"]


def some_shifts(model, draw):
    """Small shifts at every site."""
    config = model.config
    shapes = {
        "qkv": config.hidden_size,
        "o": config.num_attention_heads * config.head_dim,
        "gate_up": config.hidden_size,
        "down": config.intermediate_size,
    }
    return Shifts(
        **{
            site: jnp.asarray(0.1 * draw.normal(size=(config.num_hidden_layers, n)), jnp.float32)
            for site, n in shapes.items()
        }
    )


def some_clips(model, draw):
    """Clip ratios between 0.8 and 1 at every site."""
    sites = ("qkv", "o", "gate_up", "down", "keys", "values")
    layers = model.config.num_hidden_layers
    return Clips(**{s: jnp.asarray(draw.uniform(0.8, 1, layers), jnp.float32) for s in sites})
