"""What an export holds: a network, whole in memory or a layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from qrot.grid import Grid
from qrot.model.config import ModelConfig
from qrot.model.io.load import Opened
from qrot.model.params import Layers, Linear, Network, Params
from qrot.network import fold_ends, fold_layers, fuse_layers, fuse_table, left_online
from qrot.quantize.rtn import round_with_scale
from qrot.rotation.transform import Online, Transform, of_layer
from qrot.scheme import LayerScheme, Scheme, layer_schemes
from qrot.sites import PROJECTIONS, SITES, rotation_site

# What is done to a layer (a stack of one), told what acts beside it and its grids.
Change = Callable[[Layers, Online, LayerScheme], Layers]


class Content(NamedTuple):
    """A network in parts, none of which is in memory before it is asked for.

    Attributes:
        embed: reads the embedding.
        layers: reads the layers one after the other, each a stack of one.
        norm: the scale of the last norm.
        head: reads the output projection as PyTorch has it, like the embedding.
        online: what acts beside them.
        config: sizes and switches.
        scheme: the grids that they are on.
    """

    embed: Callable[[], Float[Any, "vocab hidden"]]
    layers: Callable[[], Iterator[Layers]]
    norm: Float[Any, " hidden"]
    head: Callable[[], Float[Any, "vocab hidden"]]
    online: Online
    config: ModelConfig
    scheme: Scheme

    def changed(self, change: Change) -> Content:
        """The same with something done to each layer as it is read."""
        grids = layer_schemes(self.scheme, self.config.num_hidden_layers)

        def layers() -> Iterator[Layers]:
            for i, layer in enumerate(self.layers()):
                yield change(layer, of_layer(self.online, slice(i, i + 1)), grids[i])

        return self._replace(layers=layers)

    def network(self) -> Network:
        """All of it in memory."""
        embed, head = jnp.asarray(self.embed()), jnp.asarray(self.head()).T
        layers = jax.tree.map(lambda *x: jnp.concatenate(x), *self.layers())
        params = Params(embed, layers, self.norm, head)
        return Network(params, self.online, self.config, self.scheme)


def whole(network: Network) -> Content:
    """A network that is in memory: folded, with its transform fused."""
    params = network.params

    def layers() -> Iterator[Layers]:
        for i in range(network.config.num_hidden_layers):
            yield jax.tree.map(lambda x, i=i: x[i : i + 1], params.layers)

    if params.head is None:
        raise ValueError("a network with tied embeddings is not exported: fold it first")
    head = params.head.T
    return Content(
        lambda: params.embed,
        layers,
        params.norm,
        lambda: head,
        fused_online(network),
        network.config,
        network.scheme,
    )


def streamed(opened: Opened, transform: Transform, scheme: Scheme) -> Content:
    """A model that is read, folded and fused a layer at a time; its weights are not rounded.

    Args:
        opened: the model.
        transform: that is fused.
        scheme: the grids that it is to have.
    """
    config = replace(opened.config, tie_word_embeddings=False)

    def ends() -> Params:
        return opened.read(range(0))

    def layers() -> Iterator[Layers]:
        for i in range(config.num_hidden_layers):
            layer = fold_layers(opened.read(range(i, i + 1), ends=False).layers)
            yield fuse_layers(layer, of_layer(transform, slice(i, i + 1)), config)

    def head() -> Float[Array, "vocab hidden"]:
        folded = fold_ends(ends()).head
        assert folded is not None
        return fuse_table(folded.T, transform)

    return Content(
        lambda: fuse_table(ends().embed, transform),
        layers,
        jnp.ones(config.hidden_size),
        head,
        left_online(transform, config),
        config,
        scheme,
    )


def change_rounded(
    layer: Layers, grids: LayerScheme, change: Callable[[Linear, Grid], Linear]
) -> Layers:
    """A layer (a stack of one) with its rounded projections changed, each told its grid."""
    on = {name: grid for name, grid in grids.weights.items() if grid.on}
    return layer.replace(**{n: change(layer.linear(n), grid) for n, grid in on.items()})


def to_nearest(layer: Layers, online: Online, grids: LayerScheme) -> Layers:
    """A layer (a stack of one) with its weights on the nearest levels of their grids."""

    def rounded(linear: Linear, grid: Grid) -> Linear:
        weight, scale = _nearest(linear.weight[0], grid)
        return linear.replace(weight=weight[None], scale=None if scale is None else scale[None])

    return layer.replace(**{n: rounded(layer.linear(n), g) for n, g in grids.weights.items()})


_nearest = jax.jit(round_with_scale, static_argnums=1)


def fused_online(network: Network) -> Online:
    """What acts beside a network's weights; raises ValueError where they hold nothing of it."""
    if not isinstance(network.online, Online):
        raise ValueError("what is exported are the weights that the network has: fuse first")
    return network.online


def acting(network: Network) -> Online:
    """What of `network.online` changes what it computes.

    At a site that is not rounded that is only a rotation whose inverse is in the weights.
    """
    online, rounded = fused_online(network), rounded_sites(network)
    rotations = {
        name: rotation
        for name, rotation in online.rotations.items()
        if (site := rotation_site(name)).readers or site.name in rounded
    }
    shifts, clips = (
        {site: x for site, x in by_site.items() if site in rounded}
        for by_site in (online.shifts, online.clips)
    )
    return Online(rotations, shifts, clips)


def rounded_sites(network: Network) -> set[str]:
    """The sites that are rounded in any layer."""
    grids = layer_schemes(network.scheme, network.config.num_hidden_layers)
    return {name for name in SITES if any(own.sites[name].on for own in grids)}


def in_integers(network: Network) -> bool:
    """Whether all weights that are rounded are integers times scales (`Linear.scale`)."""
    grids = layer_schemes(network.scheme, network.config.num_hidden_layers)
    rounded = [name for name in PROJECTIONS if any(own.weights[name].on for own in grids)]
    return all(network.params.layers.linear(name).scale is not None for name in rounded)


def as_numpy(x: Any, dtype: Any) -> np.ndarray:
    """An array on the host, cast once, in one piece; infinite where the dtype is too narrow."""
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(np.asarray(x).astype(dtype))
