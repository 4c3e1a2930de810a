"""Where learning starts: rotations, and the shifts, scales and clip ratios beside them.

`hadamard`, `orthogonal`, `identity`: see `qrot.rotation.random`.
`pca`: R1 = the principal directions of the normalised residual stream (SliceGPT, 2024).
`balanced`: R1 = the directions that balance how large the residual stream is along them against how
  much the network's predictions feel there (`balancing`).
`fisher`: what `FISHER_STEPS` steps of the fisher objective make of `balanced` (of `hadamard` where
  R1 is not one whole matrix); takes a minute.
Each but the first three draws what it does not say, R2 to R4, as `hadamard`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, cast

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from qrot.errors import InputError
from qrot.hadamard.factors import hadamard_dense
from qrot.calibrate.capture import Captured
from qrot.learn.settings import Learn
from qrot.model.config import ModelConfig
from qrot.network import fuse
from qrot.model.params import Model
from qrot.quantize.rtn import mean_best_clip
from qrot.rotation.random import RotationSites, random_rotations
from qrot.rotation.forms import (
    Clips,
    Hadamard,
    Kronecker,
    Learned,
    Rotations,
    Scales,
    Shifts,
    as_matrix,
)
from qrot.scheme import Scheme

FISHER_STEPS = 60


def training_scheme(
    model: Model, scheme: Scheme, settings: Learn, sites: RotationSites, seed: int
) -> Scheme:
    """The scheme that training sees: `weight_bits`, and one clip ratio in place of a search.

    Searching a clip ratio for every channel at every step would cost more than the step. The mean
    ratio that the search finds on a random rotation's weights stands in for it.
    """
    if settings.weight_bits is not None:
        weights = replace(scheme.weights, bits=settings.weight_bits)
        overrides = tuple(replace(o, weights=None) for o in scheme.overrides)
        overrides = tuple(o for o in overrides if o.changes)
        scheme = replace(scheme, weights=weights, overrides=overrides)
    if scheme.weights.on and scheme.weights.clip == "mse":
        start = random_rotations(model.config, seed, sites=sites)
        params, _, _ = fuse(model.params, start, model.config)
        clip = round(float(mean_best_clip(params, scheme)), 3)
        scheme = replace(scheme, weights=replace(scheme.weights, clip=clip))
    return scheme


def starting_point(
    model: Model,
    settings: Learn,
    scheme: Scheme,
    sites: RotationSites,
    seed: int,
    shifts: Shifts | None,
    captured: Captured | None,
) -> Learned:
    """What learning moves from there on, for every start but `fisher`.

    captured: for `pca` and, with gradients, for `balanced`. Raises InputError where the sites do
    not go with the settings.
    """
    check_start(settings, sites)
    config, computed = model.config, settings.start in ("pca", "balanced")
    kind: Any = "hadamard" if computed else settings.start
    rotations = random_rotations(config, seed, kind=kind, sites=sites)
    if computed:
        residual = _directions(captured, shifts, settings.start == "balanced")
        rotations = rotations.replace(residual=jnp.asarray(residual, jnp.float32))
    if settings.value_heads and rotations.value is not None:
        rotations = rotations.replace(value=_for_heads(rotations.value, config))
    for name in settings.online:
        rotations = rotations.replace(**{name: _learnable(name, rotations, config)})
    return Learned(
        rotations,
        shifts if settings.shifts else None,
        _clips(config, scheme) if settings.clips else None,
        _scales(model) if settings.scales else None,
    )


def check_start(settings: Learn, sites: RotationSites) -> None:
    """Raise InputError where a start computes R1 for sites that have none, or have blocks."""
    if settings.start in ("pca", "balanced") and sites.residual is not True:
        raise InputError(f"learn.start: {settings.start} needs rotations.residual to be true")


def balancing(
    size: Float[np.ndarray, "n n"], felt: Float[np.ndarray, "n n"]
) -> Float[np.ndarray, "n n"]:
    """The geometric mean of size^-1 and felt, both symmetric positive definite.

    Rounding x A with one step for all channels makes an error of covariance ~ tr(A^T size A)
    (A A^T)^-1, which costs tr(felt (A A^T)^-1). Among all invertible A the product is least where
    A A^T is this mean M, since then M size M = felt (as in balanced truncation of linear systems).
    A rotation with scales has A = R f: eigenvectors of M, and the square roots of its eigenvalues.
    """
    root, inverse = _powers(size)
    middle, _ = _powers(root @ felt @ root)
    return inverse @ middle @ inverse


def _powers(matrix) -> tuple[np.ndarray, np.ndarray]:
    """Square root and inverse square root of a symmetric matrix; tiny eigenvalues are raised."""
    values, vectors = np.linalg.eigh(matrix)
    values = np.maximum(values, 1e-6 * values.max())
    return (vectors * np.sqrt(values)) @ vectors.T, (vectors / np.sqrt(values)) @ vectors.T


def _directions(captured: Captured | None, shifts: Shifts | None, balanced: bool) -> np.ndarray:
    """Orthonormal directions of the residual stream, from the inputs of qkv and gate_up."""
    assert captured is not None
    n = captured.inputs["qkv"].shape[-1]
    size, felt = np.zeros((n, n)), np.zeros((n, n))
    for name in ("qkv", "gate_up"):
        means = None if shifts is None else np.asarray(getattr(shifts, name))
        for i in range(len(captured.inputs[name])):
            x = captured.inputs[name][i].astype(np.float32)
            x = x if means is None else x - means[i]
            now = (x.T * captured.weight) @ x
            if not balanced:
                size = size + now
                continue
            assert captured.gradients is not None
            g = captured.gradients[name][i].astype(np.float32)
            there = (g.T * captured.weight) @ g
            # Each site counts by what isotropic errors of its size would cost.
            share = np.sqrt(np.trace(now) * np.trace(there))
            size = size + share * now / np.trace(now)
            felt = felt + share * there / np.trace(there)
    return np.linalg.eigh(balancing(size, felt) if balanced else size)[1]


def _for_heads(value, config: ModelConfig):
    """A value rotation a layer as equal ones for its kv heads."""
    if value.ndim == 3:
        value = value[:, None]
    shape = (value.shape[0], config.num_key_value_heads, *value.shape[1:])
    return jnp.broadcast_to(value[:, None], shape)


def _learnable(name: Literal["key", "down"], rotations: Rotations, config: ModelConfig):
    """The random Hadamard rotation of an online site in a form that can be learned, by layer."""
    rotation, layers = getattr(rotations, name), config.num_hidden_layers
    if not isinstance(rotation, Hadamard):
        raise InputError(f"learn.online: {name} is not rotated (rotations.{name})")
    n, block = rotation.signs.shape[0], rotation.block
    if name == "key" or block is not None:
        whole = as_matrix(rotation)
        b = block or n
        blocks = np.stack([whole[i : i + b, i : i + b] for i in range(0, n, b)])
        heads = (config.num_key_value_heads,) if name == "key" else ()
        return jnp.asarray(np.broadcast_to(blocks, (layers, *heads, *blocks.shape)), jnp.float32)
    left = _left_factor(n)
    parts = (np.asarray(rotation.signs), hadamard_dense(left), hadamard_dense(n // left))
    return Kronecker(
        *(jnp.asarray(np.broadcast_to(x, (layers, *x.shape)), jnp.float32) for x in parts)
    )


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


def no_shifts(config: ModelConfig) -> Shifts:
    """Shifts of zero."""
    layers, hidden = config.num_hidden_layers, config.hidden_size
    heads = config.num_attention_heads * config.head_dim
    return Shifts(
        qkv=jnp.zeros((layers, hidden)),
        o=jnp.zeros((layers, heads)),
        gate_up=jnp.zeros((layers, hidden)),
        down=jnp.zeros((layers, config.intermediate_size)),
    )


def _clips(config: ModelConfig, scheme: Scheme) -> Clips:
    of = {"keys": scheme.keys.clip, "values": scheme.values.clip}
    names = ("qkv", "o", "gate_up", "down", "keys", "values")
    start = {n: cast(float, of.get(n, scheme.activations.clip)) for n in names}
    return Clips(
        **{n: jnp.full(config.num_hidden_layers, ratio, jnp.float32) for n, ratio in start.items()}
    )


def _scales(model: Model) -> Scales:
    config, shared = model.config, model.params.layers.k_norm is not None
    layers, heads = config.num_hidden_layers, config.num_key_value_heads
    head_dim = config.head_dim
    return Scales(
        qkv=jnp.zeros((layers, config.hidden_size)),
        gate_up=jnp.zeros((layers, config.hidden_size)),
        down=jnp.zeros((layers, config.intermediate_size)),
        keys=jnp.zeros((layers, 1 if shared else heads, head_dim // 2)),
        values=jnp.zeros((layers, heads, head_dim)),
    )


def fisher_settings(settings: Learn, sites: RotationSites) -> Learn:
    """The settings of the steps that make a `fisher` start."""
    return replace(
        settings,
        objective="fisher",
        optimiser="cayley_muon",
        learning_rate=0.05,
        schedule="cosine",
        steps=FISHER_STEPS,
        batch=64,
        accumulate=1,
        start="balanced" if sites.residual is True else "hadamard",
        evaluate_every=20,
        checkpoint_every=20,
    )
