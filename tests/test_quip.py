"""QuIP and QuIP#: LDLQ against GPTQ and against the least of the error; then whole models."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import without_weights

from qrot.errors import InputError
from qrot.grid import Grid
from qrot.model.forward import forward
from qrot.network import fold, fuse
from qrot.quantize import gptq
from qrot.quantize.lattice import e8p, round_vectors
from qrot.quantize.ldlq import block_ldl, ldlq
from qrot.quantize.quip import GRID, Quip, check, layer_rotations, quip, solve
from qrot.quantize.quip_sharp import LATTICE, QuipSharp, quip_sharp
from qrot.quantize.quip_sharp import check as check_sharp
from qrot.quantize.rtn import round_weight, rtn
from qrot.rotation.forms import Hadamard
from qrot.rotation.random import random_rotations
from qrot.rotation.transform import Transform
from qrot.scheme import Override, Scheme
from qrot.sites import INPUTS, PROJECTIONS, SITES

pytestmark = pytest.mark.usefixtures("quick_compile")
GRIDS = (Grid(3, "symmetric_half", "channel"), Grid(2, "asymmetric", "group", 8, clip="mse"))
IN, OUT = 24, 20  # Hadamard matrices of either are not symmetric
CHANNEL = Grid(3, granularity="channel")


def problem(seed=0, n=IN, outputs=OUT):
    """A weight with heavy tails, and the Hessian of correlated inputs of very unequal size."""
    draw = np.random.default_rng(seed)
    x = draw.standard_normal((200, n)) @ draw.standard_normal((n, n))
    x *= np.exp(draw.standard_normal(n))
    return draw.standard_t(4, (n, outputs)), x.T @ x


def error(w, q, h):
    change = np.asarray(q, np.float64) - np.asarray(w, np.float64)
    return (change * (h @ change)).sum(0)


def signs(n, seed=0):
    return Hadamard(jnp.asarray(np.random.default_rng(seed).choice([-1.0, 1.0], n)))


def damped(h, damping=0.01):
    return h + damping * np.diag(h).mean() * np.eye(len(h))


def vectors(rows, bits):
    """Eight rows at a time to the codebook."""
    return np.asarray(jax.jit(round_vectors, static_argnums=1)(jnp.asarray(rows.T), bits)).T


def conditional(w, h, quantise, block):
    """Rounding block after block what the rest should be, given the errors made so far.

    That is the minimiser of tr(E^T H E) over all that is not rounded yet; no factor of H.
    """
    q = np.zeros_like(w)
    for k in range(0, len(w), block):
        known, rest = slice(0, k), slice(k, None)
        pull = np.linalg.solve(h[rest, rest], h[rest, known] @ (w - q)[known])
        here = slice(k, k + block)
        q[here] = quantise(w[here] + pull[:block], here)
    return q


@pytest.mark.parametrize("block", [1, 8])
def test_the_factors_are_those_of_the_hessian(block):
    _, h = problem()
    with jax.enable_x64(True):
        above, used = block_ldl(jnp.asarray(h), 0.01, block)
    above, which = np.asarray(above), np.arange(IN) // block
    assert used == pytest.approx(0.01)
    assert (above[which[:, None] >= which] == 0).all()
    inverse = np.linalg.inv(above + np.eye(IN))
    middle = inverse @ damped(h) @ inverse.T
    outside = which[:, None] != which
    np.testing.assert_allclose(middle[outside], 0, atol=1e-12 * np.abs(middle).max())


@given(st.integers(0, 2**31), st.sampled_from(GRIDS))
@settings(max_examples=20, deadline=None)
def test_with_a_grid_it_is_gptq(seed, grid):
    w, h = problem(seed)
    with jax.enable_x64(True):
        w64, h64 = jnp.asarray(w), jnp.asarray(h)
        theirs = gptq.solve(w64, h64, grid, act_order=False)
        (ours,), _ = solve((w64,), h64, (grid,), None, (None,), codebook=GRID)
        plain = jax.jit(round_weight, static_argnums=1)(w64, grid)
    better = error(w, ours, h) <= error(w, plain, h)
    assert better.any()  # the others GPTQ rounds to nearest
    np.testing.assert_allclose(theirs, np.where(better, ours, plain), rtol=1e-9)


def test_blocks_of_a_codebook():
    (w, h), bits = problem(1, 40), 3
    with jax.enable_x64(True):
        feedback, _ = block_ldl(jnp.asarray(h), 0.01, 8)
        found = jax.jit(
            lambda w: ldlq(w, feedback, lambda rows, _: round_vectors(rows.T, bits).T, block=8)
        )(jnp.asarray(w))
        expected = conditional(w, damped(h), lambda rows, _: vectors(rows, bits), 8)
    np.testing.assert_allclose(found, expected, rtol=1e-9)


@pytest.mark.parametrize("together", [8, 16, 1000])
def test_how_many_are_rounded_before_the_others_hear_of_it_does_not_matter(together, monkeypatch):
    w, h = problem(2, 48)
    monkeypatch.setattr("qrot.quantize.ldlq.TOGETHER", together)
    with jax.enable_x64(True):
        feedback, _ = block_ldl(jnp.asarray(h), 0.01)
        found = ldlq(jnp.asarray(w), feedback, lambda rows, step: jnp.round(rows / step) * step,
                     jnp.full((48, 1), 0.5))  # fmt: skip
    expected = conditional(w, damped(h), lambda rows, _: np.rint(rows / 0.5) * 0.5, 1)
    np.testing.assert_allclose(found, expected, atol=1e-9)


def test_the_transforms_of_both_sides():
    """Against dense matrices: y = x W = (x U)(U^T W V) V^T, rounded in the middle."""
    w, h = problem(3)
    into, out = signs(IN, 1), signs(OUT, 2)
    u, v = into.dense(), out.dense()
    assert np.abs(u - u.T).max() > 0.1
    turned, hessian = u.T @ w @ v, damped(u.T @ h @ u)
    size = np.sqrt(np.square(w).mean())
    with jax.enable_x64(True):
        arguments = (jnp.asarray(w),), jnp.asarray(h), (Grid(2),), into, (out,)
        (found,), _ = solve(*arguments, codebook=LATTICE)
        expected = conditional(turned / size, hessian, lambda rows, _: vectors(rows, 2), 8)
        np.testing.assert_allclose(found, u @ (expected * size) @ v.T, atol=1e-9)

        (found,), _ = solve(*arguments[:2], (CHANNEL,), into, (out,), codebook=GRID)
        step = np.abs(turned).max(0) / 3

        def on_grid(rows, _):
            return np.clip(np.rint(rows / step), -4, 3) * step

        expected = conditional(turned, hessian, on_grid, 1)
    np.testing.assert_allclose(found, u @ expected @ v.T, atol=1e-9)


def test_weights_side_by_side_are_as_each_alone():
    w, h = problem(4)
    weights = tuple(jnp.asarray(w[:, a:b], jnp.float32) for a, b in ((0, 8), (8, 12), (12, 20)))
    outs, into = (signs(8, 1), signs(4, 2), signs(8, 3)), signs(IN)
    solved = partial(solve, hessian=jnp.asarray(h, jnp.float32), into=into, codebook=LATTICE)
    found, _ = solved(weights, grids=(Grid(2), Grid(16), Grid(2)), outs=outs)
    np.testing.assert_array_equal(found[1], weights[1])
    for i in (0, 2):
        (alone,), _ = solved((weights[i],), grids=(Grid(2),), outs=(outs[i],))
        np.testing.assert_allclose(found[i], alone, atol=1e-5)


def test_incoherence_and_codebooks_each_make_the_error_smaller():
    w, h = problem(5, 64, 64)
    w[7] *= 4
    w, h = jnp.asarray(w, jnp.float32), jnp.asarray(h, jnp.float32)
    grid, into, out = Grid(2, granularity="channel", clip="mse"), signs(64, 1), signs(64, 2)

    def total(**options):
        arguments = {"into": into, "outs": (out,), "codebook": GRID, **options}
        (q,), _ = solve((w,), h, (grid,), **arguments)
        return error(w, q, np.asarray(h, np.float64)).sum()

    grids = total()
    assert grids < 0.7 * total(into=None, outs=(None,))
    assert total(codebook=LATTICE) < 0.9 * grids
    plain = jax.jit(round_weight, static_argnums=1)(w, grid)
    assert grids < 0.5 * error(w, plain, np.asarray(h, np.float64)).sum()


@pytest.mark.parametrize("lattice", [False, True])
def test_inputs_that_are_never_on_and_weights_of_zero(lattice):
    w, _ = problem(6)
    w32, none = jnp.asarray(w, jnp.float32), jnp.zeros((IN, IN))
    (found, zero), _ = solve(
        (w32, 0 * w32),
        none,
        (CHANNEL, CHANNEL),
        None,
        (None, None),
        codebook=LATTICE if lattice else GRID,
    )
    size = np.float32(np.sqrt(np.square(w).mean()))
    each = [vectors(np.float32(w[i : i + 8]) / size, 3) * size for i in range(0, IN, 8)]
    plain = jax.jit(round_weight, static_argnums=1)(w32, CHANNEL)
    np.testing.assert_allclose(found, np.concatenate(each) if lattice else plain, atol=1e-5)
    assert np.isfinite(zero).all()


# Whole models

ROWS = np.random.default_rng(7).integers(0, 97, (6, 16), np.int32)
BOTH = {"quip": (quip, Quip), "quip_sharp": (quip_sharp, QuipSharp)}
W2 = Scheme(weights=Grid(2, clip="mse"))


@pytest.fixture(scope="module")
def one(variant):
    """A folded network with nothing on it."""
    return fold(variant("llama-biases").network)


@pytest.fixture(scope="module")
def fused(one):
    """The same with all rotations fused."""
    return fuse(one, Transform(random_rotations(one.config, 0)))


def rounded(network, method, scheme=W2, seed=0, **options):
    function, settings = BOTH[method]
    return function(network.replace(scheme=scheme), ROWS, settings(seed=seed), **options)


@jax.jit
def _logits(network):
    return forward(network, jnp.asarray(ROWS))


def logits(network):
    """Of the weights that it has, with nothing else rounded."""
    return _logits(network.replace(scheme=Scheme()))


def weights(network, name):
    return np.asarray(network.params.layers.linear(name).weight, np.float64)


@pytest.mark.parametrize("method", BOTH)
def test_the_output_changes_less_than_by_plain_rounding(fused, method):
    done, errors = [], []
    after = rounded(fused, method, advance=lambda: done.append(1))
    for network in (after, rtn(fused.replace(scheme=W2))):
        errors.append(float(jnp.square(logits(network) - logits(fused)).mean()))
    assert errors[0] < 0.9 * errors[1]
    assert len(done) == 3
    assert all(after.params.layers.linear(name).scale is None for name in PROJECTIONS)
    bare = (without_weights(network.params) for network in (fused, after))
    for a, b in zip(*map(jax.tree.leaves, bare), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("method", BOTH)
def test_in_the_basis_of_the_signs_every_weight_is_a_level(fused, method):
    after, book = rounded(fused, method, seed=5), e8p()
    for i in range(3):
        layer = jax.tree.map(lambda x, i=i: x[i], fused.params.layers)
        into, out = layer_rotations(layer, 5, i)
        for site in INPUTS:
            for name in SITES[site].readers:
                u, v = into[site].dense(), out[name].dense()
                w, q = weights(fused, name)[i], u.T @ weights(after, name)[i] @ v
                if method == "quip":
                    steps = np.diff(np.sort(q, axis=0), axis=0) > 1e-4 * np.abs(q).max()
                    assert steps.sum(0).max() == 3
                    continue
                q = (q / np.sqrt(np.square(w).mean()) * 1.04).T.reshape(-1, 8)
                entries = np.rint((q - 0.25) * 2) / 2 + 0.25
                np.testing.assert_allclose(q, entries, atol=1e-3)
                assert {row.tobytes() for row in entries} <= {row.tobytes() for row in book}


def test_layers_and_sites_have_signs_of_their_own(one):
    layer = jax.tree.map(lambda x: x[0], one.params.layers)
    all_signs = [
        np.asarray(rotation.signs).tobytes()
        for seed in (0, 1)
        for i in (0, 1)
        for rotations in layer_rotations(layer, seed, i)
        for rotation in rotations.values()
    ]
    assert len(set(all_signs)) == len(all_signs) == 4 * 11


def test_its_signs_are_not_those_of_the_rotations_of_the_same_seed(one):
    """R1 of seed 0 and U of the first layer were once drawn from one stream."""
    layer = jax.tree.map(lambda x: x[0], one.params.layers)
    residual, size = random_rotations(one.config, 0)["residual"].dense(), one.config.hidden_size
    hadamard = Hadamard(jnp.ones(size)).dense()
    theirs = np.rint((residual / hadamard)[:, 0])
    np.testing.assert_allclose(residual, theirs[:, None] * hadamard, atol=1e-6)
    streams = np.random.default_rng(0), np.random.default_rng((0, 0))
    others = [theirs, *(draw.choice([-1.0, 1.0], size) for draw in streams)]
    into, _ = layer_rotations(layer, 0, 0)
    for site in ("qkv", "gate_up"):
        for other in others:
            assert 0.2 < (np.asarray(into[site].signs) == other).mean() < 0.8


def test_a_seed_names_a_result(one):
    first, same, other = (rounded(one, "quip_sharp", seed=seed) for seed in (0, 0, 1))
    for name in PROJECTIONS:
        np.testing.assert_array_equal(weights(first, name), weights(same, name))
        assert (weights(first, name) != weights(other, name)).any()


def test_overrides(one):
    overrides = (Override("layers.1.*", weights=16), Override("*.down", weights=4))
    after = rounded(one, "quip_sharp", replace(W2, overrides=overrides))
    for name in PROJECTIONS:
        change = ((weights(one, name) - weights(after, name)) ** 2).mean((1, 2))
        change /= (weights(one, name) ** 2).mean((1, 2))
        low, high = (0.005, 0.03) if name == "down" else (0.06, 0.3)
        assert (change[1] == 0) == (name != "down")
        assert (change[[0, 2]] > low).all()
        assert (change[[0, 2]] < high).all()


def test_a_hessian_without_a_factor():
    w, _ = problem(7)
    w = jnp.asarray(w, jnp.float32)
    bad = jnp.full((IN, IN), -1e6) + jnp.eye(IN) * (1e6 + 1)
    (found,), used = solve((w,), bad, (CHANNEL,), None, (None,), codebook=GRID)
    assert used == np.inf
    plain = jax.jit(round_weight, static_argnums=1)(w, CHANNEL)
    np.testing.assert_array_equal(found, plain)


def test_damping_that_is_not_enough_is_warned_of(one, monkeypatch):
    monkeypatch.setattr(
        "qrot.quantize.quip.solve", lambda weights, *_, **__: (weights, jnp.asarray(0.1))
    )
    sentence = "QuIP#: the Hessian of .* has no Cholesky factor at damping 0.01; 0.1 was used"
    with pytest.warns(UserWarning, match=sentence) as said:
        rounded(one, "quip_sharp")
    assert len({str(each.message) for each in said}) == 12


def test_sizes_that_cannot_be_rounded(variant):
    network = variant("llama", intermediate_size=60).network.replace(scheme=W2)
    check(network, Quip())
    with pytest.raises(InputError, match=r"8 inputs together, .* 60 of layers\.0\.down"):
        check_sharp(network, QuipSharp())
    others = replace(W2, overrides=(Override("*.down", weights=16),))
    check_sharp(network.replace(scheme=others), QuipSharp())
    odd = variant("llama", intermediate_size=58).network.replace(scheme=W2)
    with pytest.raises(
        InputError, match=r"weights\.method: gate cannot be transformed: no Hadamard"
    ):
        check(odd, Quip())


def test_settings_out_of_range():
    for kind in (Quip, QuipSharp):
        with pytest.raises(InputError, match=r"weights\.damping: "):
            kind(damping=0.0)
        with pytest.raises(InputError, match=r"weights\.seed: "):
            kind(seed=-1)
