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
from qrot.network import fold_norms, fuse
from qrot.quantize.rtn import rtn
from qrot.rotation.forms import (
    Kronecker,
    Rotations,
    Scales,
    as_matrix,
    per_head,
    rotate,
    unrotate,
)
from qrot.rotation.basis import layer_sites
from qrot.scheme import Scheme

A4 = Grid(4, "asymmetric")
W16A4 = Scheme(Grid(), A4, A4, A4)


@pytest.mark.parametrize("names", [*EACH, ALL], ids=[*(n[0] for n in EACH), "all"])
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
@pytest.mark.usefixtures("quick_compile")
def test_fusing_changes_nothing_in_float64(variant, name, names):
    with jax.enable_x64(True):
        model = fold_norms(variant(name, "float64"))
        tokens = jnp.asarray(np.random.default_rng(0).integers(0, 90, (2, 12)))
        rotations, scales = put(model, names)
        params, online, _ = fuse(model.params, rotations, model.config, None, scales)
        same = forward(params, tokens, model.config, rotations=online)
        exact = forward(model.params, tokens, model.config)
        assert float(jnp.abs(same - exact).max() / jnp.abs(exact).max()) < 1e-10
        # Below 16 bits the online rotations act, and what is not fused goes there and back.
        fine = Grid(15, "asymmetric")
        scheme = Scheme(Grid(), fine, fine, fine)
        near = forward(params, tokens, model.config, rotations=online, scheme=scheme)
        assert float(jnp.abs(near - exact).max() / jnp.abs(exact).max()) < 1e-2


@pytest.mark.parametrize("name", sorted(VARIANTS))
@pytest.mark.usefixtures("quick_compile")
def test_the_fused_network_is_the_one_that_is_trained(variant, name):
    """With everything on at 4 bits: sites turned there and back, or turned in the weights."""
    model = fold_norms(variant(name))
    config = model.config
    draw = np.random.default_rng(3)
    tokens = jnp.asarray(draw.integers(0, 90, (2, 12)))
    rotations, scales = jax.tree.map(jnp.float32, put(model, ALL))
    shifts = some_shifts(model, draw)
    exact = forward(model.params, tokens, config)
    trained = forward(
        model.params,
        tokens,
        config,
        rotations=rotations,
        shifts=shifts,
        scales=scales,
        scheme=W16A4,
    )
    params, online, moved = fuse(model.params, rotations, config, shifts, scales)
    fused = forward(
        rtn(params, W16A4), tokens, config, rotations=online, shifts=moved, scheme=W16A4
    )
    # A value that lies on the edge between two levels may fall to either side.
    assert float(jnp.median(jnp.abs(fused - trained))) < 1e-4
    assert float(jnp.abs(trained - exact).max()) > 0.01


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_back_undoes_go_and_dual_keeps_products(seed):
    draw = np.random.default_rng(seed)
    n, hd, heads, kv = 24, 8, 6, 2

    def log(*shape):
        return jnp.asarray(draw.normal(size=shape), jnp.float32)

    def matrix(*shape):
        return orthogonal(draw, *shape).astype(jnp.float32)

    sites = layer_sites(
        Rotations(
            matrix(n, n),
            matrix(kv, 1, hd, hd),
            matrix(kv, 1, hd, hd),
            Kronecker(jnp.ones(15), matrix(3, 3), matrix(5, 5)),
        ),
        Scales(log(n), log(n), log(15), log(kv, hd // 2), log(kv, hd)),
        hd,
    )
    shapes = {"qkv": (n,), "gate_up": (n,), "down": (15,), "o": (heads * hd,)}
    for name, site in sites.items():
        shape = (4, *shapes.get(name, (kv, hd)))
        x, g = log(*shape), log(*shape)
        np.testing.assert_allclose(site.back(site.go(x)), x, atol=2e-4)
        np.testing.assert_allclose(
            (site.go(x) * site.dual(g)).sum(-1), (x * g).sum(-1), rtol=1e-3, atol=2e-3
        )


def test_a_kronecker_rotation_is_its_matrix():
    draw = np.random.default_rng(0)
    signs = jnp.asarray(draw.choice([-1.0, 1.0], 15), jnp.float32)
    left, right = (orthogonal(draw, k, k).astype(jnp.float32) for k in (3, 5))
    rotation = Kronecker(signs, left, right)
    x = jnp.asarray(draw.normal(size=(7, 15)), jnp.float32)
    dense = np.diag(signs) @ np.kron(left, right)
    np.testing.assert_allclose(as_matrix(rotation), dense, atol=1e-7)
    np.testing.assert_allclose(rotate(x, rotation), x @ dense, atol=1e-5)
    np.testing.assert_allclose(unrotate(x, rotation), x @ dense.T, atol=1e-5)


def test_query_heads_share_the_rotation_of_their_kv_head():
    draw = np.random.default_rng(0)
    turns = orthogonal(draw, 2, 1, 4, 4).astype(jnp.float32)
    x = jnp.asarray(draw.normal(size=(3, 24)), jnp.float32)  # 6 heads of 4
    turned = per_head(rotate, x, turns, 4).reshape(3, 6, 4)
    for head in range(6):
        expected = x.reshape(3, 6, 4)[:, head] @ turns[head // 3, 0]
        np.testing.assert_allclose(turned[:, head], expected, atol=1e-6)
