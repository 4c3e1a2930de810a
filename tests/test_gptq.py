"""GPTQ: one weight against the paper's formulas and against qwix, then whole models."""

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
from qrot.network import fold_norms, fuse
from qrot.sites import PROJECTIONS
from qrot.quantize import layer_by_layer as module
from qrot.quantize.gptq import Gptq, gptq, solve
from qrot.calibrate.moments import Calibration
from qrot.quantize.rtn import round_weight, rtn
from qrot.rotation.random import random_rotations
from qrot.scheme import READERS, Override, Scheme

pytestmark = pytest.mark.usefixtures("quick_compile")
KINDS = ("symmetric", "symmetric_half", "asymmetric")
GROUPS = {"channel": None, "group": 5, "tensor": None}
IN, OUT = 20, 7


def problem(seed=0, n=IN, outputs=OUT, rank=None):
    """A weight with heavy tails, and the Hessian of correlated inputs of very unequal size."""
    draw = np.random.default_rng(seed)
    x = draw.standard_normal((200, rank or n)) @ draw.standard_normal((rank or n, n))
    x *= np.exp(draw.standard_normal(n))
    return draw.standard_t(4, (n, outputs)), x.T @ x


nearest = jax.jit(round_weight, static_argnums=1)


def error(w, q, h):
    change = np.asarray(q, np.float64) - np.asarray(w, np.float64)
    return (change * (h @ change)).sum(0)


def numpy_levels(w, grid, clip):
    """Scale, lowest and highest q of every weight."""
    shape, size = w.shape, grid.group or len(w)
    w = w.reshape(-1, size, shape[1])
    axes = {"axis": (0, 1, 2) if grid.granularity == "tensor" else 1, "keepdims": True}
    if grid.kind == "asymmetric":
        low, high = np.minimum(w.min(**axes), 0) * clip, np.maximum(w.max(**axes), 0) * clip
        scale = (high - low) / (2**grid.bits - 1)
        first = -np.rint(-low / scale)
        last = first + 2**grid.bits - 1
    else:
        half = 2 ** (grid.bits - 1)
        scale = np.abs(w).max(**axes) * clip / (half - (1 if grid.kind == "symmetric" else 0.5))
        first, last = -half, half - 1
    return [np.broadcast_to(x, w.shape).reshape(shape) for x in (scale, first, last)]


def papers(w, h, grid, *, clip=1.0, damping=0.01, act_order=True):
    """Equations 2 and 3 of the paper, input after input, with the inverse itself.

    Columns for which rounding to nearest is better are rounded to nearest.
    """
    scale, first, last = numpy_levels(w, grid, clip)
    plain = np.clip(np.rint(w / scale), first, last) * scale
    order = np.argsort(-np.diag(h), kind="stable") if act_order else np.arange(len(h))
    inverse = np.linalg.inv(h + damping * np.diag(h).mean() * np.eye(len(h)))
    now, q = w.copy(), np.zeros_like(w)
    for i in order:
        q[i] = np.clip(np.rint(now[i] / scale[i]), first[i], last[i]) * scale[i]
        now -= np.outer(inverse[:, i], (now[i] - q[i]) / inverse[i, i])
        inverse -= np.outer(inverse[:, i], inverse[i]) / inverse[i, i]
        inverse[i, i] = 1  # done with; nothing reads it again
    better = error(w, q, h) <= error(w, plain, h)
    return np.where(better, q, plain), better


@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("granularity", GROUPS)
def test_the_papers_formulas(granularity, kind, act_order):
    w, h = problem()
    grid = Grid(3, kind, granularity, GROUPS[granularity], clip=0.9)
    expected, better = papers(w, h, grid, clip=np.float64(np.float32(0.9)), act_order=act_order)
    assert better.any()
    with jax.enable_x64(True):
        found = solve(jnp.asarray(w), jnp.asarray(h), grid, act_order=act_order, block=8)
    np.testing.assert_allclose(found, expected, rtol=1e-9)


@pytest.mark.parametrize("block", [1, 7, 20, 128])
def test_blocks_of_any_size_give_the_same(block):
    w, h = problem(1)
    expected, _ = papers(w, h, Grid(4, granularity="channel"))
    with jax.enable_x64(True):
        found = solve(jnp.asarray(w), jnp.asarray(h), Grid(4, granularity="channel"), block=block)
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_qwix():
    core = pytest.importorskip("qwix.contrib.gptq_core")
    w, h = problem(2, 16, 24)
    with jax.enable_x64(True):
        how = core.qarray.HowToQuantize(qtype=jnp.int4, channelwise_axes=(0,))
        theirs, _ = core.quantize_weight(jnp.asarray(w.T), jnp.asarray(h), how, blocksize=8)
        theirs = np.asarray(core.qarray.dequantize(theirs)).T
        grid = Grid(4, "symmetric_half", "channel")
        ours = solve(jnp.asarray(w), jnp.asarray(h), grid, act_order=False, block=8)
        plain = np.asarray(nearest(jnp.asarray(w), grid))
    better = error(w, theirs, h) <= error(w, plain, h)
    assert better.mean() > 0.8
    np.testing.assert_allclose(ours, np.where(better, theirs, plain), rtol=1e-6)


@given(st.integers(0, 2**31), st.sampled_from([1, 3, IN]), st.sampled_from(KINDS))
@settings(max_examples=30, deadline=None)
def test_no_column_is_worse_than_plain_rounding(seed, rank, kind):
    w, h = problem(seed, rank=rank)
    grid = Grid(3, kind, "channel", clip="mse")
    with jax.enable_x64(True):
        found, plain = solve(jnp.asarray(w), jnp.asarray(h), grid), nearest(jnp.asarray(w), grid)
    # sums of terms that cancel
    slack = 1e-12 * np.square(np.abs(w - np.asarray(plain)).T @ np.sqrt(np.diag(h)))
    assert (error(w, found, h) <= error(w, plain, h) + slack).all()


def test_the_error_is_well_below_that_of_plain_rounding():
    w, h = problem(3, 64, 64)
    grid = Grid(4, granularity="channel", clip="mse")
    w, h = np.float32(w), np.float32(h)
    found, plain = solve(jnp.asarray(w), jnp.asarray(h), grid), nearest(jnp.asarray(w), grid)
    assert error(w, found, h).sum() < 0.5 * error(w, plain, h).sum()


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_that_do_not_correlate_are_rounded_to_nearest(kind):
    w = jnp.asarray(problem()[0], jnp.float32)
    grid = Grid(4, kind, "group", 5, clip="mse")
    np.testing.assert_array_equal(solve(w, jnp.eye(IN), grid), nearest(w, grid))


def test_the_hessians_unit_does_not_matter():
    w, h = problem(4)
    with jax.enable_x64(True):
        grid = Grid(4, granularity="channel")
        found = [solve(jnp.asarray(w), jnp.asarray(h * unit), grid) for unit in (1, 1e-9, 1e9)]
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


@pytest.mark.parametrize("act_order", [True, False])
def test_inputs_that_are_never_on(act_order):
    w, h = problem(5)
    dead = np.isin(np.arange(IN), (0, 3, IN - 1))
    h[dead] = h[:, dead] = 0
    grid = Grid(4, granularity="channel")
    found = np.asarray(
        solve(jnp.asarray(w, jnp.float32), jnp.asarray(h, jnp.float32), grid, act_order=act_order)
    )
    plain = np.asarray(nearest(jnp.asarray(w, jnp.float32), grid))
    np.testing.assert_array_equal(found[dead], plain[dead])
    assert (found[~dead] != plain[~dead]).any()
    nothing = solve(jnp.asarray(w, jnp.float32), jnp.zeros((IN, IN)), grid, act_order=act_order)
    np.testing.assert_array_equal(nothing, plain)


def test_damping_grows_where_it_is_too_little():
    w, h = problem(6)
    h /= np.sqrt(np.outer(np.diag(h), np.diag(h)))
    h -= (np.linalg.eigvalsh(h)[0] + 0.03) * np.eye(IN)  # the lowest eigenvalue is -0.03 now
    grid = Grid(4, granularity="channel")
    with jax.enable_x64(True):
        arguments = jnp.asarray(w), jnp.asarray(h), grid
        with pytest.warns(UserWarning, match=r"no Cholesky factor at damping 0\.01; 0\.1 was used"):
            found = solve(*arguments)
        np.testing.assert_array_equal(found, solve(*arguments, damping=0.1))
    expected, _ = papers(w, h, grid, damping=0.1)
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_what_no_damping_helps_is_rounded_to_nearest():
    w = jnp.asarray(problem()[0], jnp.float32)
    hessian = jnp.full((IN, IN), -1e6) + jnp.eye(IN) * (1e6 + 1)
    grid = Grid(4, granularity="channel")
    with pytest.warns(UserWarning, match="at damping 1; it was rounded to nearest"):
        found = solve(w, hessian, grid, damping=1.0)
    np.testing.assert_array_equal(found, nearest(w, grid))


def test_a_group_has_to_divide():
    with pytest.raises(InputError, match="8 does not divide 20"):
        solve(jnp.ones((IN, 3)), jnp.eye(IN), Grid(4, granularity="group", group=8))


# Whole models

ROWS = np.random.default_rng(7).integers(0, 97, (6, 16), np.int32)
FEW = ("llama-biases", "mistral-window", "qwen3-biases")
W3 = Scheme(weights=Grid(3))


@pytest.fixture(scope="module", params=FEW)
def fused(request, variant):
    """(folded model, its parameters with all rotations fused, what is left online)."""
    return make_fused(variant(request.param))


@pytest.fixture(scope="module")
def after(fused):
    """The parameters by GPTQ, and how many layers told that they were done."""
    told = []
    return rounded(fused, W3, advance=lambda: told.append(1)), len(told)


@pytest.fixture(scope="module")
def one(variant):
    return make_fused(variant("llama-biases"))


def make_fused(model):
    model = fold_norms(model)
    params, online, _ = fuse(model.params, random_rotations(model.config, 0), model.config)
    return model, params, online


@partial(jax.jit, static_argnames="config")
def logits(params, config, online):
    return forward(params, jnp.asarray(ROWS), config, rotations=online)


def rounded(fused, scheme, **options):
    model, params, online = fused
    return gptq(params, scheme, model.config, ROWS, rotations=online, **options)


def weights(params, name):
    return np.asarray(getattr(params.layers, name).weight, np.float64)


def test_the_output_changes_less_than_by_plain_rounding(fused, after):
    model, params, online = fused
    errors = []
    for q in (after[0], rtn(params, W3)):
        change = logits(q, model.config, online) - logits(params, model.config, online)
        errors.append(float(jnp.square(change).mean()))
    assert errors[0] < 0.7 * errors[1]


def test_every_weight_is_on_its_grid_and_nothing_else_changes(fused, after):
    before, (after, told) = fused[1], after
    assert told == 3
    for name in PROJECTIONS:
        w, q = weights(before, name), weights(after, name)
        scale = np.abs(w).max(1, keepdims=True) / 3
        levels = q / scale
        np.testing.assert_allclose(levels, np.rint(levels), atol=1e-4)
        assert np.rint(levels).min() >= -4
        assert np.rint(levels).max() <= 3
    bare = map(without_weights, (before, after))
    for a, b in zip(*map(jax.tree.leaves, bare), strict=True):
        np.testing.assert_array_equal(a, b)


def test_hessians_are_of_what_the_weights_multiply(fused, monkeypatch):
    """The online rotation before down included."""
    model, params, online = fused
    layer = jax.tree.map(lambda x: x[1], params.layers)
    h = jnp.asarray(np.random.default_rng(0).standard_normal((2, 16, 48)), jnp.float32)
    read = []

    def linear(x, layer, dtype):
        read.append(np.asarray(x, np.float64).reshape(-1, x.shape[-1]))
        return x @ layer.weight + (0 if layer.bias is None else layer.bias)

    windows = model.config.sliding_window
    window = None if windows is None else jnp.asarray(windows[1])
    more = {"turns": {}, "window": window, "rotations": online, "config": model.config}
    found = module._run(h, layer, **more, sites=tuple(READERS))
    monkeypatch.setattr("qrot.model.forward.linear", linear)
    with jax.disable_jit():
        module._run(h, layer, **more, sites=tuple(READERS))
    x = dict(zip(PROJECTIONS, read, strict=True))
    for site, names in READERS.items():
        for name in names:
            expected = x[name].T @ x[name]
            np.testing.assert_allclose(found[site].hessian, expected, atol=1e-4 * expected.max())
        size = np.abs(x[name])
        np.testing.assert_allclose(found[site].largest, size.max(0), rtol=1e-4)
        np.testing.assert_allclose(found[site].mean, size.sum(0), rtol=1e-4)


def test_a_layer_reads_what_the_rounded_layers_before_it_write(one):
    model, _, online = one
    both = rounded(one, W3)
    first = Scheme(overrides=(Override("layers.[01].*", weights=3),))
    last = Scheme(overrides=(Override("layers.2.*", weights=3),))
    prefix = rounded(one, first)
    then = rounded((model, prefix, online), last)
    alone = rounded(one, last)
    for name in PROJECTIONS:
        np.testing.assert_array_equal(weights(then, name), weights(both, name))
    assert (weights(alone, "down")[2] != weights(both, "down")[2]).any()


def test_overrides(one):
    overrides = (Override("layers.1.*", weights=8), Override("*.down", weights=16))
    after = rounded(one, Scheme(weights=Grid(3), overrides=overrides))
    for name in PROJECTIONS:
        change = ((weights(one[1], name) - weights(after, name)) ** 2).mean((1, 2))
        if name == "down":
            assert (change == 0).all()
        else:
            assert 0 < change[1] < 0.05 * min(change[0], change[2])
    assert jax.tree.structure(after) == jax.tree.structure(one[1])


def test_16_bits_leave_everything_alone(one):
    for a, b in zip(*map(jax.tree.leaves, (rounded(one, Scheme()), one[1])), strict=True):
        np.testing.assert_array_equal(a, b)


def test_parameters_on_the_host_and_in_bfloat16(one):
    model, params, online = one
    narrow = jax.tree.map(lambda x: np.asarray(x.astype(jnp.bfloat16)), params)
    after = rounded((model, narrow, online), W3, batch=4)
    assert {x.dtype for x in jax.tree.leaves(after)} == {jnp.dtype(jnp.bfloat16)}
    change = logits(after, model.config, online) - logits(narrow, model.config, online)
    plain = logits(rtn(narrow, W3), model.config, online) - logits(narrow, model.config, online)
    assert jnp.square(change).mean() < jnp.square(plain).mean()


def test_a_model_without_rotations(variant):
    model = fold_norms(variant("llama-biases"))
    after = [
        logits(q, model.config, None) - logits(model.params, model.config, None)
        for q in (gptq(model.params, W3, model.config, ROWS), rtn(model.params, W3))
    ]
    assert jnp.square(after[0]).mean() < jnp.square(after[1]).mean()


def test_what_cannot_be_rounded(one):
    model, params, _ = one
    with pytest.raises(ValueError, match="fuse first"):
        gptq(params, W3, model.config, ROWS, rotations=random_rotations(model.config, 0))
    broken = params.replace(embed=params.embed * np.inf)
    with pytest.raises(InputError, match="the input of qkv in layer 0 is not finite"):
        gptq(broken, W3, model.config, ROWS)
    grouped = Scheme(weights=Grid(4, granularity="group", group=16))  # hidden 48, intermediate 56
    with pytest.raises(InputError, match="16 does not divide 56"):
        gptq(params, grouped, model.config, ROWS)


def test_settings_out_of_range():
    with pytest.raises(InputError, match=r"gptq\.damping: "):
        Gptq(damping=0.0)
    with pytest.raises(InputError, match=r"calibration\.windows: "):
        Calibration(windows=0)
    with pytest.raises(InputError, match=r"calibration\.length: "):
        Calibration(length=1)
