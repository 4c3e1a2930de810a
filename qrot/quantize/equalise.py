"""Cross-layer equalisation: what one weight writes and the next reads gets the same range in both.

Nagel, van Baalen, Blankevoort, Welling: Data-free quantization through weight equalization and bias
correction, ICCV 2019, arXiv 1906.04721.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from qrot.model.params import Network
from qrot.rotation.transform import Transform


@jax.jit
def equalise(network: Network) -> Transform:
    """Scales for the pairs up, down and v, o; made from the weights alone.

    With r1 the largest magnitude of the weights that write a channel and r2 that of those that read
    it, s = sqrt(r1 r2) / r2 (equation 11 of the paper): the first weight becomes W / s, the second
    s W, and both ranges sqrt(r1 r2). No channel is in two pairs, so that one pass is all. Query
    heads that share a kv head share its scales, and r2 is the largest of theirs. A channel that one
    of its weights has nothing for is left alone.

    Left out are pairs that a nonlinearity separates (gate, down) and what norms write: they have no
    first weight.

    Args:
        network: folded, with nothing on it.

    Returns:
        The log-scales named down and values.
    """
    config, layers = network.config, network.params.layers
    up, down, v, o = (layers.linear(name).weight for name in ("up", "down", "v", "o"))
    heads = (len(o), config.num_key_value_heads, -1, config.head_dim)
    shared = _rows(o).reshape(heads).max(2)
    values = _logs(_columns(v).reshape(shared.shape), shared)
    return Transform(scales={"down": _logs(_columns(up), _rows(down)), "values": values})


def _columns(weight: Float[Array, "layers in out"]) -> Float[Array, "layers out"]:
    return jnp.abs(weight).max(1)


def _rows(weight: Float[Array, "layers in out"]) -> Float[Array, "layers in"]:
    return jnp.abs(weight).max(2)


def _logs(first: Float[Array, "..."], second: Float[Array, "..."]) -> Float[Array, "..."]:
    """log 1 / s = log sqrt(r2 / r1), 0 where it is not finite."""
    wide = jnp.promote_types(first.dtype, jnp.float32)
    logs = (jnp.log(second.astype(wide)) - jnp.log(first.astype(wide))) / 2
    return jnp.where((first > 0) & (second > 0), logs, 0)
