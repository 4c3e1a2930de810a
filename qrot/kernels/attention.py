"""Causal attention with grouped heads, in plain JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def attention(
    q: Float[Array, "batch length heads head_dim"],
    k: Float[Array, "batch before kv_heads head_dim"],
    v: Float[Array, "batch before kv_heads head_dim"],
    window: Int[Array, ""] | None = None,
    *,
    first: Int[Array, ""] | None = None,
) -> Float[Array, "batch length features"]:
    """Causal softmax attention with grouped heads.

    Args:
        q: queries.
        k: keys of the positions from 0 on.
        v: values of the same.
        window: tokens that may be looked back on, a query's own included; 0 or None for no limit.
        first: the position of the first query; 0 if None.
    """
    position = jnp.arange(q.shape[1])
    if first is not None:
        position = position + first
    distance = position[:, None] - jnp.arange(k.shape[1])[None, :]
    mask = None if window is None else (distance < window) | (window == 0)
    if q.dtype == jnp.float64:  # JAX's softmax is in float32 whatever comes in
        causal = distance >= 0 if mask is None else mask & (distance >= 0)
        grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
        scores = jnp.einsum("btkgd,bskd->bkgts", grouped, k) / np.sqrt(q.shape[3])
        shares = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
        out = jnp.einsum("bkgts,bskd->btkgd", shares, v)
    else:
        if first is not None:
            mask = (distance >= 0) if mask is None else mask & (distance >= 0)
        mask = None if mask is None else mask[None, None]
        out = jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=first is None)
    return out.reshape(*q.shape[:2], -1)
