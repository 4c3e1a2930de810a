"""How far values are from being easy to round: outliers by channel and by token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float


class Outliers(struct.PyTreeNode):
    """Of vectors x [tokens, n].

    Attributes:
        largest: max |x| of each channel.
        tops: max |x| of each token.
        ratio: the largest channel maximum by the median one.
        crest: max / rms of a token, median.
        incoherence: max |x| / ||x|| of a token, median: 1 / sqrt(n) if all values are equal in
            size, 1 if there is but one.
        kurtosis: mean x^4 / (mean x^2)^2 of all values: 3 of normal ones.
    """

    largest: Float[Array, " n"]
    tops: Float[Array, " tokens"]
    ratio: Float[Array, ""]
    crest: Float[Array, ""]
    incoherence: Float[Array, ""]
    kurtosis: Float[Array, ""]


FIGURES = ("ratio", "crest", "incoherence", "kurtosis")


@jax.jit
def outliers(x: Float[Array, "tokens n"]) -> Outliers:
    """Measure them, at least in float32; a token of zeros has no outlier."""
    wide = jnp.abs(x.astype(jnp.promote_types(x.dtype, jnp.float32)))
    tiny = jnp.finfo(wide.dtype).tiny
    largest, tops = wide.max(0), wide.max(1)
    norm = jnp.linalg.norm(wide, axis=1)
    # Divided first, so that a fourth power does not overflow.
    square = jnp.square(wide / jnp.maximum(wide.max(), tiny))
    share = tops / jnp.maximum(norm, tiny)
    return Outliers(
        largest,
        tops,
        wide.max() / jnp.maximum(jnp.median(largest), tiny),
        jnp.median(share) * jnp.sqrt(x.shape[1]),
        jnp.median(share),
        jnp.square(square).mean() / jnp.maximum(jnp.square(square.mean()), tiny),
    )
