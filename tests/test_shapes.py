"""The shapes that the pytrees' annotations promise are those that they have."""

import dataclasses
from typing import get_args, get_origin, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError, jaxtyped
from learned import ALL, EACH, put, some_clips, some_shifts
from models import VARIANTS

from qrot.calibrate.capture import capture
from qrot.calibrate.moments import gather_layers
from qrot.grid import Grid
from qrot.integers import quantise
from qrot.kernels.kv4 import empty_heads, pack_heads
from qrot.model.decode import empty_cache
from qrot.model.params import Linear, PackedLinear, Params
from qrot.network import fold, fuse
from qrot.quantize.pack import pack
from qrot.quantize.rtn import rtn
from qrot.rotation.forms import Blocks, Dense, Hadamard, Kronecker
from qrot.rotation.transform import Online, Transform, of_layer
from qrot.scheme import Scheme
from qrot.sites import INPUTS

ROWS = np.random.default_rng(0).integers(0, 97, (2, 6), np.int32)
A4 = Grid(4, "asymmetric")
W4A4KV4 = Scheme(Grid(4), A4, A4, A4)


def holds(x, hint):
    """isinstance, by each kind in turn: of a union Python asks the type of x alone."""
    return any(isinstance(x, kind) for kind in get_args(hint) or (hint,))


def check(node, found):
    """Every array below against its annotation; each object has dimensions of its own."""
    found.add(type(node))
    hints, below = get_type_hints(type(node)), []
    with jaxtyped("context"):
        for field in dataclasses.fields(node):
            value, hint = getattr(node, field.name), hints[field.name]
            if isinstance(value, dict):
                below += check_dictionary(value, hint)
            elif not field.metadata.get("pytree_node", True):
                continue
            elif dataclasses.is_dataclass(value):
                assert holds(value, hint)
                below.append(value)
            else:
                name = f"{type(node).__name__}.{field.name}"
                assert holds(value, hint), f"{name}: {getattr(value, 'shape', value)}"
    for x in below:
        check(x, found)


def check_dictionary(values, hint):
    """Objects in it; each array has dimensions of its own."""
    key, kind = get_args(hint if get_origin(hint) is dict else get_args(hint)[0])
    for name, x in values.items():
        with jaxtyped("context"):
            assert isinstance(name, key)
            assert holds(x, kind), f"{name}: {x}"
    return [x for x in values.values() if dataclasses.is_dataclass(x)]


def put_all(network, names=ALL):
    draw = np.random.default_rng(0)
    transform = jax.tree.map(jnp.float32, put(network, names))
    return transform.replace(shifts=some_shifts(network, draw), clips=some_clips(network, draw))


@pytest.mark.parametrize("name", VARIANTS)
def test_parameters_of_every_variant(variant, name):
    found = set()
    network = variant(name).network
    for some in (network, jax.tree.map(np.asarray, network), fold(network)):
        check(some, found)
    check(jax.tree.map(lambda x: x[1], network.params.layers), found)
    assert {Params, Linear, Online} <= found


@pytest.mark.parametrize("names", [*EACH, ALL], ids=[*(n[0] for n in EACH), "all"])
@pytest.mark.parametrize("name", ["llama-biases", "qwen3"])
def test_what_is_put_on_a_network(variant, name, names):
    found = set()
    network = fold(variant(name).network)
    transform = put_all(network, names)
    for some in (transform, of_layer(transform, 1), fuse(network, transform)):
        check(some, found)
    assert {Transform, Online, Hadamard, Dense} <= found | {Hadamard}
    assert ({Blocks} <= found) == ("rotation down blocks" in names)
    assert ({Kronecker} <= found) == ("rotation down" in names)


def test_integers(variant):
    found = set()
    network = fold(variant("llama-biases").network)
    rounded = rtn(fuse(network, put_all(network)).replace(scheme=W4A4KV4))
    assert rounded.params.layers.down.scale is not None
    for some in (rounded, pack(rounded), empty_cache(rounded, 2, 6, packed=True)):
        check(some, found)
    x = quantise(jnp.ones((2, 6, 2, 12)), A4)
    for some in (
        x,
        pack_heads(x, 4),
        empty_heads((2, 6, 2, 12), Grid(4, group=4, granularity="group")),
    ):
        check(some, found)
    assert PackedLinear in found


def test_statistics(variant):
    network, found = variant("qwen3").network, set()
    gather_layers(network, ROWS, INPUTS, lambda i, sums: [check(x, found) for x in sums.values()])
    check(capture(network, ROWS, vectors=3, seed=0, gradients=True)[0], found)


def test_another_shape_is_no_parameter(variant):
    """Or all of this would hold of anything."""
    weight = variant("llama").network.params.layers.q.weight
    with pytest.raises(TypeCheckError, match="bias"):
        Linear(weight, weight[:, 0, 1:])
    with pytest.raises(TypeCheckError, match="weight"):
        Linear(weight[0, 0])
    broken = Linear(weight)
    object.__setattr__(broken, "bias", weight)
    with pytest.raises(AssertionError, match=r"Linear\.bias: \(3, 48, 48\)"):
        check(broken, set())
