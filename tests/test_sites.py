"""Scales, rotations by head and learned online rotations do not change the network's function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from learned import ALL, EACH, orthogonal, put, some_shifts
from models import VARIANTS

from qrot.grid import Grid
from qrot.model.forward import forward
from qrot.network import fold, fuse
from qrot.rotation.basis import per_head, site_bases
from qrot.rotation.forms import Dense, Kronecker, rotate
from qrot.rotation.transform import Transform
from qrot.scheme import Scheme

A4 = Grid(4, "asymmetric")
W16A4 = Scheme(Grid(), A4, A4, A4)


@pytest.mark.parametrize("names", [*EACH, ALL], ids=[*(n[0] for n in EACH), "all"])
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
@pytest.mark.usefixtures("quick_compile")
def test_fusing_changes_nothing_in_float64(variant, name, names):
    with jax.enable_x64(True):
        network = fold(variant(name, "float64").network)
        tokens = jnp.asarray(np.random.default_rng(0).integers(0, 90, (2, 12)))
        fused = fuse(network, put(network, names))
        same, exact = forward(fused, tokens), forward(network, tokens)
        assert float(jnp.abs(same - exact).max() / jnp.abs(exact).max()) < 1e-10
        # Below 16 bits the online rotations act, and what is not fused goes there and back.
        fine = Grid(15, "asymmetric")
        scheme = Scheme(Grid(), fine, fine, fine)
        near = forward(fused.replace(scheme=scheme), tokens)
        assert float(jnp.abs(near - exact).max() / jnp.abs(exact).max()) < 1e-2


@pytest.mark.parametrize("name", sorted(VARIANTS))
@pytest.mark.usefixtures("quick_compile")
def test_the_fused_network_is_the_one_that_is_trained(variant, name):
    """With everything on at 4 bits: sites turned there and back, or turned in the weights."""
    network = fold(variant(name).network)
    draw = np.random.default_rng(3)
    tokens = jnp.asarray(draw.integers(0, 90, (2, 12)))
    transform = jax.tree.map(jnp.float32, put(network, ALL))
    transform = transform.replace(shifts=some_shifts(network, draw))
    exact = forward(network, tokens)
    trained = forward(network.replace(online=transform, scheme=W16A4), tokens)
    fused = forward(fuse(network, transform).replace(scheme=W16A4), tokens)
    # A value that lies on the edge between two levels may fall to either side.
    assert float(jnp.median(jnp.abs(fused - trained))) < 1e-4
    assert float(jnp.abs(trained - exact).max()) > 0.01


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_inverse_undoes_forward_and_cotangent_keeps_products(seed):
    draw = np.random.default_rng(seed)
    n, hd, heads, kv = 24, 8, 6, 2

    def log(*shape):
        return jnp.asarray(draw.normal(size=shape), jnp.float32)

    def matrix(*shape):
        return orthogonal(draw, *shape).astype(jnp.float32)

    rotations = {
        "residual": Dense(matrix(n, n)),
        "value": Dense(matrix(kv, hd, hd)),
        "key": Dense(matrix(kv, hd, hd)),
        "down": Kronecker(jnp.ones(15), matrix(3, 3), matrix(5, 5)),
    }
    scales = {
        "qkv": log(n),
        "gate_up": log(n),
        "down": log(15),
        "keys": log(kv, hd // 2),
        "values": log(kv, hd),
    }
    # Arrays without the axis of layers, as `site_bases` takes them.
    bases = site_bases(Transform(rotations, scales), hd)
    shapes = {"qkv": (n,), "gate_up": (n,), "down": (15,), "o": (heads * hd,)}
    for name, basis in bases.items():
        shape = (4, *shapes.get(name, (kv, hd)))
        x, g = log(*shape), log(*shape)
        np.testing.assert_allclose(basis.inverse(basis.forward(x)), x, atol=2e-4)
        np.testing.assert_allclose(
            (basis.forward(x) * basis.cotangent(g)).sum(-1), (x * g).sum(-1), rtol=1e-3, atol=2e-3
        )


def test_query_heads_share_the_rotation_of_their_kv_head():
    draw = np.random.default_rng(0)
    matrices = orthogonal(draw, 2, 4, 4).astype(jnp.float32)
    x = jnp.asarray(draw.normal(size=(3, 24)), jnp.float32)  # 6 heads of 4
    rotated = per_head(rotate, x, Dense(matrices), 4).reshape(3, 6, 4)
    for head in range(6):
        expected = x.reshape(3, 6, 4)[:, head] @ matrices[head // 3]
        np.testing.assert_allclose(rotated[:, head], expected, atol=1e-6)
