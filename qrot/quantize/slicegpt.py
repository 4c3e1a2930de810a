"""SliceGPT: turn the residual stream to its principal directions, and cut off the last of them.

Ashkboos, Croci, do Nascimento, Hoefler, Hensman: SliceGPT, ICLR 2024, arXiv 2401.15024.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from qrot.errors import InputError
from qrot.model.config import ModelConfig
from qrot.model.params import Linear, Params
from qrot.calibrate.moments import Seen, layer_by_layer

_MULTIPLE = 8  # of which the size that is kept is one


@dataclass(frozen=True)
class SliceGpt:
    """How much SliceGPT cuts off.

    fraction: of the directions of the residual stream; 0 only rotates.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    fraction: float = 0.0

    def __post_init__(self):
        if not 0 <= self.fraction < 1:
            raise InputError(f"slicegpt.fraction: {self.fraction} is outside 0 to 1")

    def kept(self, hidden: int) -> int:
        """Directions that are left of `hidden`; a multiple of 8 where any are cut off."""
        if self.fraction == 0:
            return hidden
        return max(_MULTIPLE, round(hidden * (1 - self.fraction) / _MULTIPLE) * _MULTIPLE)


def principal_directions(
    params: Params,
    config: ModelConfig,
    rows: Int[np.ndarray, "count length"],
    *,
    batch: int = 2,
    advance: Callable[[], None] = lambda: None,
) -> Float[np.ndarray, "hidden hidden"]:
    """R1 = eigenvectors of the second moment of what all norms write, the largest first.

    params: folded and not rotated. The second moments of the inputs of q, k, v and of gate, up are
    added up over all layers: one rotation for the whole network, so that nothing but it is in the
    residual stream. (The paper has one for each, and a product between them in every residual
    connection.)
    """
    sites, total = ("qkv", "gate_up"), np.zeros((config.hidden_size, config.hidden_size))

    def add(i: int, layer, seen: dict[str, Seen]):
        for site in sites:
            total[...] += np.asarray(seen[site].hessian, np.float64)
        return layer

    each = [sites] * config.num_hidden_layers
    layer_by_layer(params, config, rows, add, sites=each, batch=batch, advance=advance)
    return np.linalg.eigh(total)[1][:, ::-1]


def cut(params: Params, config: ModelConfig, kept: int) -> tuple[Params, ModelConfig]:
    """The network of the first `kept` directions of the residual stream, and its configuration.

    It computes what the whole one does when all that is written to the other directions is 0: a
    norm divides by the mean square over all of the old directions, hence its scale sqrt(n / kept)
    and eps n / kept over the new ones. (Norms of q and k, where there are any, get that eps as
    well, though nothing is cut there: it is the one eps of a configuration.)
    """
    n = config.hidden_size
    if not 0 < kept <= n:
        raise ValueError(f"{kept} of {n} directions")

    def read(linear: Linear) -> Linear:
        return linear.replace(weight=linear.weight[:, :kept])

    def write(linear: Linear) -> Linear:
        return jax.tree.map(lambda x: x[..., :kept], linear)

    def norm(scale):
        return jnp.asarray(scale)[..., :kept] * np.sqrt(n / kept).astype(scale.dtype)

    layers, head = params.layers, params.head
    if head is None:
        raise ValueError("the embedding is tied: fold the norms first")
    layers = layers.replace(
        q=read(layers.q),
        k=read(layers.k),
        v=read(layers.v),
        gate=read(layers.gate),
        up=read(layers.up),
        o=write(layers.o),
        down=write(layers.down),
        attention_norm=norm(layers.attention_norm),
        mlp_norm=norm(layers.mlp_norm),
    )
    params = params.replace(
        embed=params.embed[:, :kept], layers=layers, norm=norm(params.norm), head=head[:kept]
    )
    eps = config.rms_norm_eps * n / kept
    return params, replace(config, hidden_size=kept, rms_norm_eps=eps)
