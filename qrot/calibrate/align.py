"""Rotations carried over to a network whose activations lie in another basis."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float64, Int

from qrot.calibrate.capture import Captured
from qrot.rotation.forms import Dense
from qrot.rotation.transform import Transform

_RESIDUAL = ("qkv", "gate_up")  # the sites that see the residual stream, normed


def aligned(transform: Transform, before: Captured, after: Captured) -> Transform:
    """A transform that sees in a network what it saw in the one that it was fitted to.

    Both are looked at on the same tokens. With Q the orthogonal matrix that takes the new inputs
    closest to the old ones, X' Q ~ X (Procrustes: Schoenemann, 1966), R becomes Q R, since then
    X' Q R ~ X R: of the residual stream, and of the values by layer. Scales of the input of down
    act before its rotation, channel by channel, and go where their channels have gone. Whatever has
    another form than a dense matrix stays, and so do clip ratios. Shifts are to be measured anew.

    Args:
        transform: that was fitted to the first network.
        before: of that network, at the same places of the same tokens.
        after: of the other.
    """
    rotations, scales = dict(transform.rotations), dict(transform.scales)
    residual, value = rotations.get("residual"), rotations.get("value")
    if isinstance(residual, Dense) and not residual.stack:
        products = sum(_products(before, after, name).sum(0) for name in _RESIDUAL)
        rotations["residual"] = _turned(residual, np.asarray(products))
    if isinstance(value, Dense):
        products = _head_products(before, after)
        shared = len(value.stack) == 1  # one rotation for the heads of a layer
        rotations["value"] = _turned(value, products.sum(1) if shared else products)
    if "down" in scales:
        moved = [
            _sources(*x) for x in zip(_wide(before, "down"), _wide(after, "down"), strict=True)
        ]
        old = np.asarray(scales["down"])
        scales["down"] = jnp.asarray(np.take_along_axis(old, np.stack(moved), axis=1))
    return transform.replace(rotations=rotations, scales=scales)


def _wide(captured: Captured, name: str) -> Float[np.ndarray, "layers vectors n"]:
    """Vectors of a site, each times the square root of the share of tokens that it stands for."""
    x = np.asarray(captured.inputs[name], np.float32)
    root = np.sqrt(np.asarray(captured.weight, np.float32))
    return x.reshape(*x.shape[:2], -1) * root[:, None]


def _products(before: Captured, after: Captured, name: str) -> Float64[np.ndarray, "layers n n"]:
    """X'^T X of each layer."""
    pairs = zip(_wide(before, name), _wide(after, name), strict=True)
    return np.stack([(new.T @ old).astype(np.float64) for old, new in pairs])


def _head_products(before: Captured, after: Captured) -> Float64[np.ndarray, "layers heads d d"]:
    """The same of each kv head's values."""
    layers, vectors, heads, d = before.inputs["values"].shape
    old, new = (
        _wide(x, "values").reshape(layers, vectors, heads, d).astype(np.float64)
        for x in (before, after)
    )
    return np.einsum("lvhi,lvhj->lhij", new, old)


def _turned(rotation: Dense, products: Float64[np.ndarray, "*stack n n"]) -> Dense:
    """Q R, with Q the orthogonal matrix of largest trace with X'^T X."""
    u, _, vt = np.linalg.svd(products)
    matrix = u @ vt @ np.asarray(rotation.matrix, np.float64)
    return Dense(jnp.asarray(matrix, rotation.matrix.dtype))


def _sources(
    old: Float[np.ndarray, "vectors n"], new: Float[np.ndarray, "vectors n"]
) -> Int[np.ndarray, " n"]:
    """The old channel that each new channel is most like, by correlation about zero."""
    lengths = (np.maximum(np.linalg.norm(x, axis=0), 1e-30) for x in (new, old))
    new, old = (x / length for x, length in zip((new, old), lengths, strict=True))
    return np.abs(new.T @ old).argmax(1)
