"""The one way through the layers: forwards, and back with derivatives; one layer at a time.

The device holds one layer, and one batch of windows, if the parameters are numpy arrays on the
host. Hidden states are on the host. Nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from qrot.model.forward import layer_context, project, windows
from qrot.model.layer import Context, decoder_layer, rope_table
from qrot.model.params import Layers, Network
from qrot.rotation.transform import Transform, of_layer
from qrot.scheme import Scheme, layer_scheme

Hidden = list[np.ndarray]  # [batch, length, hidden], for each batch of windows
Advance = Callable[[], None]


class Place(NamedTuple):
    """One layer on the way.

    Attributes:
        index: of the layer.
        layer: its weights.
        context: what acts beside them.
        hidden: what enters it.
    """

    index: int
    layer: Layers
    context: Context
    hidden: Hidden

    def run(self, *arguments: Any, layer: Layers | None = None, **options: Any) -> list[Any]:
        """`run` of all that enters, each batch with its own of the arguments (lists as long).

        Args:
            arguments: for the statistic.
            layer: instead of the place's own.
            options: names and statistic of `run`.
        """
        weights = self.layer if layer is None else layer
        return [
            run(h, weights, self.context, *own, **options)
            for h, *own in zip(self.hidden, *arguments, strict=True)
        ]


def forwards(
    network: Network,
    rows: Int[np.ndarray, "count length"],
    visit: Callable[[Place], Hidden],
    *,
    batch: int = 2,
    advance: Advance = lambda: None,
) -> Hidden:
    """Take windows of text through the layers, one after the other.

    Args:
        network: what is calibrated are the weights that it has: fused, or with nothing on it.
        rows: tokens of the windows.
        visit: told each place; returns what enters the next one.
        batch: windows that run at once.
        advance: called after each layer.

    Returns:
        What leaves the last layer.

    Raises:
        ValueError: where a transform is online that is not fused.
    """
    embed = np.asarray(network.params.embed)
    hidden = [embed[rows[i : i + batch]] for i in range(0, len(rows), batch)]
    for i in range(network.config.num_hidden_layers):
        hidden = visit(place(network, i, hidden))
        advance()
    return hidden


def backwards(
    network: Network,
    entered: Sequence[Hidden],
    gradients: Hidden,
    visit: Callable[[Place, Hidden], Hidden],
    *,
    advance: Advance = lambda: None,
) -> Hidden:
    """Take derivatives back through the layers, the last one first.

    Args:
        network: as `forwards` had it.
        entered: what entered each layer.
        gradients: derivatives by what left the last layer.
        visit: told each place and the derivatives by what leaves it; returns those by what enters.
        advance: called after each layer.

    Returns:
        Derivatives by what entered the first layer.
    """
    for i in reversed(range(network.config.num_hidden_layers)):
        gradients = visit(place(network, i, entered[i]), gradients)
        advance()
    return gradients


def place(network: Network, i: int, hidden: Hidden) -> Place:
    """Layer i of a network, nothing rounded; raises ValueError as `forwards` does."""
    if isinstance(network.online, Transform) and jax.tree.leaves(network.online):
        raise ValueError("what is calibrated are the weights that the network has: fuse first")
    plain = network.replace(scheme=Scheme())
    layer, online = jax.tree.map(lambda x: x[i], network.params.layers), of_layer(network.online, i)
    window, length = windows(network.config), hidden[0].shape[1]
    rope = rope_table(network.config, length, jnp.promote_types(hidden[0].dtype, jnp.float32))
    grids = layer_scheme(plain.scheme, 0)
    window = None if window is None else window[i]
    return Place(i, layer, layer_context(plain, online, window, rope, grids), hidden)


@partial(jax.jit, static_argnames=("names", "statistic"))
def run(
    h: Float[Array, "batch length hidden"],
    layer: Layers,
    context: Context,
    *arguments: Any,
    names: tuple[str, ...] = (),
    statistic: Callable[..., Any] = lambda seen: None,
) -> tuple[Float[Array, "batch length hidden"], Any]:
    """One layer.

    Args:
        h: what enters it.
        layer: its weights.
        context: what acts beside them.
        arguments: more for the statistic.
        names: of what is looked at, as `decoder_layer` tells its hook.
        statistic: of {name: what is there}.

    Returns:
        What leaves the layer, and the statistic.
    """
    seen: dict[str, Array] = {}

    def look(name: str, x: Array) -> Array:
        if name in names:
            seen[name] = x
        return x

    out = decoder_layer(h, layer, context, hook=look if names else None)
    return out, statistic(seen, *arguments)


@partial(jax.jit, static_argnames=("names", "wrt", "statistic"))
def pull(
    h: Float[Array, "batch length hidden"],
    g: Float[Array, "batch length hidden"],
    layer: Layers,
    context: Context,
    *arguments: Any,
    names: tuple[str, ...],
    wrt: tuple[str, ...],
    statistic: Callable[..., Any],
) -> tuple[Float[Array, "batch length hidden"], Any]:
    """One layer backwards.

    Args:
        h: what enters it.
        g: the derivative by what leaves it.
        layer: its weights.
        context: what acts beside them.
        arguments: more for the statistic.
        names: of what is looked at.
        wrt: names of what derivatives are taken by ("with respect to").
        statistic: of {name: what is there}, {name: derivative by it}.

    Returns:
        The derivative by what enters the layer, and the statistic.
    """

    def perturbed(h: Array, changes: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
        seen: dict[str, Array] = {}

        def hook(name: str, x: Array) -> Array:
            if name in names or name in wrt:
                seen[name] = x
            return x + changes[name] if name in changes else x

        return decoder_layer(h, layer, context, hook=hook), seen

    shapes = jax.eval_shape(lambda: perturbed(h, {})[1])
    none = {name: jnp.zeros(shapes[name].shape, shapes[name].dtype) for name in wrt}
    _, back, seen = jax.vjp(perturbed, h, none, has_aux=True)
    to_input, gradients = back(g)
    return to_input, statistic({name: seen[name] for name in names}, gradients, *arguments)


def predicted_gradients(network: Network, hidden: Hidden, seed: int) -> Hidden:
    """Derivatives by what leaves the last layer of the nats of tokens drawn from the predictions.

    Args:
        network: whose predictions they are.
        hidden: what leaves its last layer.
        seed: of the drawn tokens.
    """
    keys = jax.random.split(jax.random.key(seed), len(hidden))
    return [np.asarray(_drawn(network, h, key)) for h, key in zip(hidden, keys, strict=True)]


@jax.jit
def _drawn(network: Network, h, key):
    def nats(h):
        logits = project(network, h)
        log_p = jax.nn.log_softmax(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)))
        drawn = jax.random.categorical(key, jax.lax.stop_gradient(log_p))
        return -jnp.take_along_axis(log_p, drawn[..., None], axis=-1).sum()

    return jax.grad(nats)(h)
