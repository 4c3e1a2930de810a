"""What the weights of each layer read, summed up over all tokens, and layers changed by it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from qrot.calibrate.walk import Advance, Hidden, Place, forwards
from qrot.errors import InputError
from qrot.model.params import Layers, Network
from qrot.records import check_count
from qrot.sites import INPUTS

EXACT = jax.lax.Precision.HIGHEST  # a TPU would round the products to bfloat16


@dataclass(frozen=True)
class Calibration:
    """The windows of the calibration text, from all over it, and their length in tokens."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    windows: int = 64
    length: int = 512

    def __post_init__(self):
        check_count(self.windows, "calibration.windows")
        if self.length < 2:
            raise InputError(f"calibration.length: a window of {self.length} tokens is none")


class Moments(struct.PyTreeNode):
    """What the weights at one site of one layer read, over all tokens.

    Attributes:
        hessian: X^T X; None where it was not asked for.
        largest: the largest |x| of each channel.
        mean: the mean |x| of each channel.
    """

    hessian: Float[Array, "n n"] | None
    largest: Float[Array, " n"]
    mean: Float[Array, " n"]


def gather(place: Place, sites: tuple[str, ...], *, hessians: bool = True) -> dict[str, Moments]:
    """The moments at some sites of a layer; raises InputError where they are not finite."""
    statistic = _with_hessian if hessians else _without_hessian
    found = (sums for _, sums in place.run(names=sites, statistic=statistic))
    total = reduce(_together, found)
    tokens = sum(h.shape[0] * h.shape[1] for h in place.hidden)
    moments = {site: x.replace(mean=x.mean / tokens) for site, x in total.items()}
    for site in sites:
        if not np.isfinite(np.asarray(moments[site].mean)).all():
            raise InputError(
                f"calibration: the input of {site} in layer {place.index} is not finite"
            )
    return moments


def change_layers(
    network: Network,
    rows: Int[np.ndarray, "count length"],
    change: Callable[[int, Layers, dict[str, Moments]], Layers],
    *,
    sites: Sequence[tuple[str, ...]] | None = None,
    through_changed: bool = True,
    batch: int = 2,
    advance: Advance = lambda: None,
) -> Network:
    """The network with every layer replaced by `change(i, layer, {site: its moments})`.

    All windows run through a layer, it is changed, then they run through it once more. Activations
    and cache are not quantised.

    Args:
        network: fused, or with nothing on it.
        rows: tokens to calibrate on.
        change: of one layer (no `layers` axis).
        sites: of each layer, those to look at; all that projections read where it is None.
        through_changed: whether the next layer sees what the changed one makes of the windows, or
            what the one that was makes of them.
        batch: windows that run at once.
        advance: called after each layer.

    Raises:
        InputError: where what is read is not finite.
        ValueError: where rotations are not fused.
    """
    done: list[Layers] = []

    def visit(place: Place) -> Hidden:
        here = INPUTS if sites is None else sites[place.index]
        moments = gather(place, here) if here else {}
        changed = change(place.index, place.layer, moments)
        done.append(changed)
        if place.index + 1 == network.config.num_hidden_layers:
            return place.hidden
        return outputs(place, changed if through_changed else place.layer)

    forwards(network, rows, visit, batch=batch, advance=advance)
    layers = jax.tree.map(lambda *x: jnp.stack(x), *done)
    return network.replace(params=network.params.replace(layers=layers))


def gather_layers(
    network: Network,
    rows: Int[np.ndarray, "count length"],
    sites: tuple[str, ...],
    look: Callable[[int, dict[str, Moments]], None],
    *,
    hessians: bool = True,
    batch: int = 2,
    advance: Advance = lambda: None,
) -> None:
    """Tell `look` the moments of each layer in turn. Arguments as for `change_layers`."""

    def visit(place: Place) -> Hidden:
        look(place.index, gather(place, sites, hessians=hessians))
        return outputs(place)

    forwards(network, rows, visit, batch=batch, advance=advance)


def outputs(place: Place, layer: Layers | None = None) -> Hidden:
    """What leaves a layer, on the host."""
    return [np.asarray(out) for out, _ in place.run(layer=layer)]


def _with_hessian(seen: dict[str, Array]) -> dict[str, Moments]:
    return {site: _sums(x, hessian=True) for site, x in seen.items()}


def _without_hessian(seen: dict[str, Array]) -> dict[str, Moments]:
    return {site: _sums(x, hessian=False) for site, x in seen.items()}


def _sums(x: Array, *, hessian: bool) -> Moments:
    x = x.reshape(-1, x.shape[-1])
    size = jnp.abs(x).astype(jnp.promote_types(x.dtype, jnp.float32))
    return Moments(_hessian(x) if hessian else None, size.max(0), size.sum(0))


@jax.jit
def _together(some: dict[str, Moments], more: dict[str, Moments]) -> dict[str, Moments]:
    sums = jax.tree.map(jnp.add, some, more)
    return {
        site: x.replace(largest=jnp.maximum(some[site].largest, more[site].largest))
        for site, x in sums.items()
    }


def _hessian(x: Float[Array, "tokens n"]) -> Float[Array, "n n"]:
    """X^T X. It is symmetric: four strips of its upper half are 5/8 of the work."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    product = partial(jnp.matmul, precision=EXACT, preferred_element_type=wide)
    edges = [x.shape[1] * i // 4 for i in range(5)]
    strips = [jnp.pad(product(x[:, a:b].T, x[:, a:]), ((0, 0), (a, 0))) for a, b in pairwise(edges)]
    upper = jnp.concatenate(strips)
    return jnp.triu(upper) + jnp.triu(upper, 1).T
