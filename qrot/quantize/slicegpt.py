"""SliceGPT: rotate the residual stream to its principal directions, and cut off the last of them.

Ashkboos, Croci, do Nascimento, Hoefler, Hensman: SliceGPT, ICLR 2024, arXiv 2401.15024.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from qrot.calibrate.moments import Moments, gather_layers
from qrot.errors import InputError
from qrot.model.params import Linear, Network
from qrot.quantize.method import Advance, Rows
from qrot.sites import PROJECTIONS

_MULTIPLE = 8  # of which the size that is kept is one
_BEHIND_NORMS = ("qkv", "gate_up")
_WRITERS = ("o", "down")  # of the residual stream, which all others read


@dataclass(frozen=True)
class SliceGpt:
    """How much SliceGPT cuts off.

    Attributes:
        fraction: of the directions of the residual stream; 0 only rotates.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    fraction: float = 0.0

    def __post_init__(self):
        if not 0 <= self.fraction < 1:
            raise InputError(f"slicegpt.fraction: {self.fraction} is outside 0 to 1")

    def kept(self, hidden: int) -> int:
        """Directions that are left of `hidden`: a multiple of 8 where any are cut off."""
        if self.fraction == 0:
            return hidden
        return max(_MULTIPLE, round(hidden * (1 - self.fraction) / _MULTIPLE) * _MULTIPLE)


def principal_directions(
    network: Network, rows: Rows, *, batch: int = 2, advance: Advance = lambda: None
) -> Float[np.ndarray, "hidden hidden"]:
    """R1 = eigenvectors of the second moment of what all norms write, the largest first.

    The second moments of the inputs of q, k, v and of gate, up are added up over all layers: one
    rotation for the whole network, so that nothing but it is in the residual stream. (The paper has
    one for each, and a product between them in every residual connection.)

    Args:
        network: folded and not rotated.
        rows: tokens to calibrate on.
        batch: windows that run at once.
        advance: called after each layer.
    """
    total = np.zeros((network.config.hidden_size, network.config.hidden_size))

    def add(i: int, moments: dict[str, Moments]) -> None:
        for site in _BEHIND_NORMS:
            total[...] += np.asarray(moments[site].hessian, np.float64)

    gather_layers(network, rows, _BEHIND_NORMS, add, batch=batch, advance=advance)
    return np.linalg.eigh(total)[1][:, ::-1]


def cut(network: Network, kept: int) -> Network:
    """The network of the first directions of the residual stream.

    It computes what the whole one does when all that is written to the other directions is 0: a
    norm divides by the mean square over all of the old directions, hence its scale sqrt(n / kept)
    and eps n / kept over the new ones. (Norms of q and k, where there are any, get that eps as
    well, though nothing is cut there: it is the one eps of a configuration.)

    Args:
        network: folded, and fused with the directions; with weights that are not rounded yet.
        kept: directions that are not cut off.

    Raises:
        ValueError: where there are not so many, the embedding is tied, or weights are rounded.
    """
    config, params = network.config, network.params
    n, layers = config.hidden_size, params.layers
    if not 0 < kept <= n:
        raise ValueError(f"{kept} of {n} directions")
    if params.head is None:
        raise ValueError("the embedding is tied: fold the norms first")
    if any(layers.linear(name).scale is not None for name in PROJECTIONS):
        raise ValueError("these weights are on their grid: cut first")

    def narrow(name: str) -> Linear:
        linear = layers.linear(name)
        if name in _WRITERS:
            return jax.tree.map(lambda x: x[..., :kept], linear)
        return linear.replace(weight=linear.weight[:, :kept])

    def norm(scale):
        return jnp.asarray(scale)[..., :kept] * np.sqrt(n / kept).astype(scale.dtype)

    layers = layers.replace(
        **{name: narrow(name) for name in PROJECTIONS},
        attention_norm=norm(layers.attention_norm),
        mlp_norm=norm(layers.mlp_norm),
    )
    params = params.replace(
        embed=params.embed[:, :kept], layers=layers, norm=norm(params.norm), head=params.head[:kept]
    )
    eps = config.rms_norm_eps * n / kept
    return network.replace(
        params=params, config=replace(config, hidden_size=kept, rms_norm_eps=eps)
    )
