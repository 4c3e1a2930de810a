"""QuIP and QuIP#: LDLQ against GPTQ and against the least of the error; then whole models."""

import io
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import without_weights
from rich.console import Console
from runs import CALIBRATION, quiet

from qrot.errors import InputError
from qrot.run.run import run
from qrot.grid import Grid
from qrot.model.forward import forward
from qrot.network import fold_norms, fuse
from qrot.sites import PROJECTIONS
from qrot.quantize import gptq
from qrot.quantize.lattice import e8p, round_vectors
from qrot.quantize.ldlq import block_ldl, ldlq
from qrot.quantize.quip import Quip, check, layer_turns, quip, quip_sharp, solve
from qrot.quantize.rtn import round_weight, rtn
from qrot.rotation.random import random_rotations
from qrot.rotation.forms import Hadamard, as_matrix
from qrot.scheme import READERS, Override, Scheme

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
        (ours,), _ = solve((w64,), h64, (grid,), None, (None,))
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
    u, v = as_matrix(into), as_matrix(out)
    assert np.abs(u - u.T).max() > 0.1
    turned, hessian = u.T @ w @ v, damped(u.T @ h @ u)
    size = np.sqrt(np.square(w).mean())
    with jax.enable_x64(True):
        arguments = (jnp.asarray(w),), jnp.asarray(h), (Grid(2),), into, (out,)
        (found,), _ = solve(*arguments, lattice=True)
        expected = conditional(turned / size, hessian, lambda rows, _: vectors(rows, 2), 8)
        np.testing.assert_allclose(found, u @ (expected * size) @ v.T, atol=1e-9)

        (found,), _ = solve(*arguments[:2], (CHANNEL,), into, (out,))
        step = np.abs(turned).max(0) / 3

        def on_grid(rows, _):
            return np.clip(np.rint(rows / step), -4, 3) * step

        expected = conditional(turned, hessian, on_grid, 1)
    np.testing.assert_allclose(found, u @ expected @ v.T, atol=1e-9)


def test_weights_side_by_side_are_as_each_alone():
    w, h = problem(4)
    weights = tuple(jnp.asarray(w[:, a:b], jnp.float32) for a, b in ((0, 8), (8, 12), (12, 20)))
    outs, into = (signs(8, 1), signs(4, 2), signs(8, 3)), signs(IN)
    run = partial(solve, hessian=jnp.asarray(h, jnp.float32), into=into, lattice=True)
    found, _ = run(weights, grids=(Grid(2), Grid(16), Grid(2)), outs=outs)
    np.testing.assert_array_equal(found[1], weights[1])
    for i in (0, 2):
        (alone,), _ = run((weights[i],), grids=(Grid(2),), outs=(outs[i],))
        np.testing.assert_allclose(found[i], alone, atol=1e-5)


def test_incoherence_and_codebooks_each_make_the_error_smaller():
    w, h = problem(5, 64, 64)
    w[7] *= 4
    w, h = jnp.asarray(w, jnp.float32), jnp.asarray(h, jnp.float32)
    grid, into, out = Grid(2, granularity="channel", clip="mse"), signs(64, 1), signs(64, 2)

    def total(**options):
        arguments = {"into": into, "outs": (out,), **options}
        (q,), _ = solve((w,), h, (grid,), **arguments)
        return error(w, q, np.asarray(h, np.float64)).sum()

    grids = total()
    assert grids < 0.7 * total(into=None, outs=(None,))
    assert total(lattice=True) < 0.9 * grids
    plain = jax.jit(round_weight, static_argnums=1)(w, grid)
    assert grids < 0.5 * error(w, plain, np.asarray(h, np.float64)).sum()


@pytest.mark.parametrize("lattice", [False, True])
def test_inputs_that_are_never_on_and_weights_of_zero(lattice):
    w, _ = problem(6)
    w32, none = jnp.asarray(w, jnp.float32), jnp.zeros((IN, IN))
    (found, zero), _ = solve(
        (w32, 0 * w32), none, (CHANNEL, CHANNEL), None, (None, None), lattice=lattice
    )
    size = np.float32(np.sqrt(np.square(w).mean()))
    each = [vectors(np.float32(w[i : i + 8]) / size, 3) * size for i in range(0, IN, 8)]
    plain = jax.jit(round_weight, static_argnums=1)(w32, CHANNEL)
    np.testing.assert_allclose(found, np.concatenate(each) if lattice else plain, atol=1e-5)
    assert np.isfinite(zero).all()


# Whole models

ROWS = np.random.default_rng(7).integers(0, 97, (6, 16), np.int32)
BOTH = {"quip": quip, "quip_sharp": quip_sharp}
W2 = Scheme(weights=Grid(2, clip="mse"))


@pytest.fixture(scope="module")
def one(variant):
    """(folded model, its parameters, no rotations)."""
    model = fold_norms(variant("llama-biases"))
    return model, model.params, None


@pytest.fixture(scope="module")
def fused(one):
    """The same with all rotations fused, and what is left online."""
    model = one[0]
    return model, *fuse(model.params, random_rotations(model.config, 0), model.config)[:2]


def rounded(fused, method, scheme=W2, **options):
    model, params, online = fused
    return BOTH[method](params, scheme, model.config, ROWS, rotations=online, **options)


@partial(jax.jit, static_argnames="config")
def logits(params, config, online):
    return forward(params, jnp.asarray(ROWS), config, rotations=online)


def weights(params, name):
    return np.asarray(getattr(params.layers, name).weight, np.float64)


@pytest.mark.parametrize("method", BOTH)
def test_the_output_changes_less_than_by_plain_rounding(fused, method):
    model, params, online = fused
    told, errors = [], []
    after = rounded(fused, method, advance=lambda: told.append(1))
    for q in (after, rtn(params, W2)):
        change = logits(q, model.config, online) - logits(params, model.config, online)
        errors.append(float(jnp.square(change).mean()))
    assert errors[0] < 0.9 * errors[1]
    assert len(told) == 3
    bare = map(without_weights, (params, after))
    for a, b in zip(*map(jax.tree.leaves, bare), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("method", BOTH)
def test_in_the_basis_of_the_signs_every_weight_is_a_level(fused, method):
    _, before, _ = fused
    after, book = rounded(fused, method, settings=Quip(seed=5)), e8p()
    for i in range(3):
        layer = jax.tree.map(lambda x, i=i: x[i], before.layers)
        into, out = layer_turns(layer, 5, i)
        for site, names in READERS.items():
            for name in names:
                u, v = as_matrix(into[site]), as_matrix(out[name])
                w, q = weights(before, name)[i], u.T @ weights(after, name)[i] @ v
                if method == "quip":
                    steps = np.diff(np.sort(q, axis=0), axis=0) > 1e-4 * np.abs(q).max()
                    assert steps.sum(0).max() == 3
                    continue
                q = (q / np.sqrt(np.square(w).mean()) * 1.04).T.reshape(-1, 8)
                entries = np.rint((q - 0.25) * 2) / 2 + 0.25
                np.testing.assert_allclose(q, entries, atol=1e-3)
                assert {row.tobytes() for row in entries} <= {row.tobytes() for row in book}


def test_layers_and_sites_have_signs_of_their_own(one):
    layer = jax.tree.map(lambda x: x[0], one[1].layers)
    all_signs = [
        np.asarray(turn.signs).tobytes()
        for seed in (0, 1)
        for i in (0, 1)
        for turns in layer_turns(layer, seed, i)
        for turn in turns.values()
    ]
    assert len(set(all_signs)) == len(all_signs) == 4 * 11


def test_a_seed_names_a_result(one):
    first, same, other = (
        rounded(one, "quip_sharp", settings=Quip(seed=seed)) for seed in (0, 0, 1)
    )
    for name in PROJECTIONS:
        np.testing.assert_array_equal(weights(first, name), weights(same, name))
        assert (weights(first, name) != weights(other, name)).any()


def test_overrides(one):
    overrides = (Override("layers.1.*", weights=16), Override("*.down", weights=4))
    after = rounded(one, "quip_sharp", replace(W2, overrides=overrides))
    for name in PROJECTIONS:
        change = ((weights(one[1], name) - weights(after, name)) ** 2).mean((1, 2))
        change /= (weights(one[1], name) ** 2).mean((1, 2))
        low, high = (0.005, 0.03) if name == "down" else (0.06, 0.3)
        assert (change[1] == 0) == (name != "down")
        assert (change[[0, 2]] > low).all()
        assert (change[[0, 2]] < high).all()


def test_a_hessian_without_a_factor():
    w, _ = problem(7)
    w = jnp.asarray(w, jnp.float32)
    bad = jnp.full((IN, IN), -1e6) + jnp.eye(IN) * (1e6 + 1)
    (found,), used = solve((w,), bad, (CHANNEL,), None, (None,))
    assert used == np.inf
    plain = jax.jit(round_weight, static_argnums=1)(w, CHANNEL)
    np.testing.assert_array_equal(found, plain)


def test_what_is_not_enough_damping_is_told_of(one, monkeypatch):
    monkeypatch.setattr(
        "qrot.quantize.quip.solve", lambda weights, *_, **__: (weights, jnp.asarray(0.1))
    )
    sentence = "QuIP#: the Hessian of .* has no Cholesky factor at damping 0.01; 0.1 was used"
    with pytest.warns(UserWarning, match=sentence) as told:
        rounded(one, "quip_sharp")
    assert len({str(each.message) for each in told}) == 12


@pytest.mark.parametrize("method", BOTH)
def test_a_run(config, method):
    config = replace(config, methods=("full_precision", "random_hadamard"))
    config = replace(config, seeds=(0,), scheme=W2, quip=Quip(seed=3), calibration=CALIBRATION)
    shown = io.StringIO()
    found = run(replace(config, weight_method=method), Console(file=shown))
    title = {"quip": "QuIP", "quip_sharp": "QuIP#"}[method]
    assert f"random hadamard, seed 0: {title}" in shown.getvalue()
    full, row = found["rows"]
    assert "sign_seed" not in full
    assert (row["weight_method"], row["sign_seed"]) == (method, 3)
    assert row["nll"] != full["nll"]


@pytest.mark.parametrize(
    ("scheme", "sentence"),
    [
        (Scheme(Grid(5)), "scheme.weights.bits: quip_sharp has codebooks of 2, 3, 4 bits, and "
         "layers.0.q is to have 5"),
        (Scheme(Grid(2), overrides=(Override("layers.1.up", weights=8),)),
         "scheme.overrides: quip_sharp .*, and layers.1.up is to have 8"),
        (Scheme(Grid(2, granularity="group", group=8)), "scheme.weights.group: quip_sharp has one"),
    ],
)  # fmt: skip
def test_what_has_no_codebook_is_refused_before_anything_is_written(config, scheme, sentence):
    config = replace(config, methods=("no_rotation",), scheme=scheme, calibration=CALIBRATION)
    with pytest.raises(InputError, match=sentence):
        run(replace(config, weight_method="quip_sharp"), quiet())
    assert not Path(config.out).exists()


def test_sizes_that_cannot_be_rounded(variant):
    layers = variant("llama", intermediate_size=60).params.layers
    check(layers, W2, lattice=False)
    with pytest.raises(InputError, match=r"8 inputs together, .* 60 of layers\.0\.down"):
        check(layers, W2, lattice=True)
    check(layers, replace(W2, overrides=(Override("*.down", weights=16),)), lattice=True)
    with pytest.raises(InputError, match="weight_method: gate cannot be transformed: no Hadamard"):
        check(variant("llama", intermediate_size=58).params.layers, W2, lattice=False)


def test_settings_out_of_range():
    with pytest.raises(InputError, match=r"quip\.damping: "):
        Quip(damping=0.0)
    with pytest.raises(InputError, match=r"quip\.seed: "):
        Quip(seed=-1)
