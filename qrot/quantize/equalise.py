"""Cross-layer equalisation: what one weight writes and the next reads gets the same range in both.

Nagel, van Baalen, Blankevoort, Welling: Data-free quantization through weight equalization and bias
correction, ICCV 2019, arXiv 1906.04721.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from qrot.model.config import ModelConfig
from qrot.model.params import Params
from qrot.rotation.forms import Scales


@partial(jax.jit, static_argnames="config")
def equalise(params: Params, config: ModelConfig) -> Scales:
    """Scales for the pairs up, down and v, o; made from the weights alone.

    With r1 the largest magnitude of the weights that write a channel and r2 that of those that read
    it, s = sqrt(r1 r2) / r2 (equation 11 of the paper): the first weight becomes W / s, the second
    s W, and both ranges sqrt(r1 r2). No channel is in two pairs, so that one pass is all. Query
    heads that share a kv head share its scales, and r2 is the largest of theirs. A channel that one
    of its weights has nothing for is left alone.

    Left out are pairs that a nonlinearity separates (gate, down) and what norms write: they have no
    first weight.
    """
    layers, kv_heads = params.layers, config.num_key_value_heads
    count = layers.v.weight.shape[0]
    shared = _rows(layers.o.weight).reshape(count, kv_heads, -1, config.head_dim).max(2)
    values = _logs(_columns(layers.v.weight).reshape(shared.shape), shared)
    return Scales(down=_logs(_columns(layers.up.weight), _rows(layers.down.weight)), values=values)


def _columns(weight: Float[Array, "layers in out"]) -> Float[Array, "layers out"]:
    return jnp.abs(weight).max(1)


def _rows(weight: Float[Array, "layers in out"]) -> Float[Array, "layers in"]:
    return jnp.abs(weight).max(2)


def _logs(first: Float[Array, "..."], second: Float[Array, "..."]) -> Float[Array, "..."]:
    """log 1 / s = log sqrt(r2 / r1), 0 where it is not finite."""
    wide = jnp.promote_types(first.dtype, jnp.float32)
    logs = (jnp.log(second.astype(wide)) - jnp.log(first.astype(wide))) / 2
    return jnp.where((first > 0) & (second > 0), logs, 0)
