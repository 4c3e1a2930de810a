"""GPTQ: one weight against the paper's formulas and against qwix, then whole models."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import without_weights

from qrot.calibrate.moments import Calibration, gather
from qrot.calibrate.walk import place, run
from qrot.errors import InputError
from qrot.grid import Grid
from qrot.model.forward import forward
from qrot.network import fold, fuse
from qrot.quantize.gptq import Gptq, gptq, solve
from qrot.quantize.rtn import round_weight, rtn
from qrot.rotation.random import random_rotations
from qrot.rotation.transform import Transform
from qrot.scheme import Override, Scheme
from qrot.sites import INPUTS, PROJECTIONS, SITES

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
    """A network with all rotations fused."""
    return make_fused(variant(request.param))


@pytest.fixture(scope="module")
def after(fused):
    """The network by GPTQ, and how many layers said that they were done."""
    done = []
    return rounded(fused, W3, advance=lambda: done.append(1)), len(done)


@pytest.fixture(scope="module")
def one(variant):
    return make_fused(variant("llama-biases"))


def random(network):
    return Transform(random_rotations(network.config, 0))


def make_fused(model):
    network = fold(model.network)
    return fuse(network, random(network))


@jax.jit
def _logits(network):
    return forward(network, jnp.asarray(ROWS))


def logits(network):
    """Of the weights that it has, with nothing else rounded."""
    return _logits(network.replace(scheme=Scheme()))


def rounded(network, scheme, **options):
    return gptq(network.replace(scheme=scheme), ROWS, **options)


def plainly(network, scheme):
    return rtn(network.replace(scheme=scheme))


def weights(network, name):
    return np.asarray(network.params.layers.linear(name).weight, np.float64)


def test_the_output_changes_less_than_by_plain_rounding(fused, after):
    errors = []
    for network in (after[0], plainly(fused, W3)):
        change = logits(network) - logits(fused)
        errors.append(float(jnp.square(change).mean()))
    assert errors[0] < 0.7 * errors[1]


def test_every_weight_is_on_its_grid_and_nothing_else_changes(fused, after):
    before, (after, done) = fused, after
    assert done == 3
    for name in PROJECTIONS:
        w, q = weights(before, name), weights(after, name)
        scale = np.abs(w).max(1, keepdims=True) / 3
        levels = q / scale
        np.testing.assert_allclose(levels, np.rint(levels), atol=1e-4)
        assert np.rint(levels).min() >= -4
        assert np.rint(levels).max() <= 3
        linear = after.params.layers.linear(name)
        np.testing.assert_allclose(linear.scale, scale, rtol=1e-6)
        codes = np.rint(np.asarray(linear.weight) / np.asarray(linear.scale))
        np.testing.assert_array_equal(codes * np.asarray(linear.scale), linear.weight)
    bare = (without_weights(network.params) for network in (before, after))
    for a, b in zip(*map(jax.tree.leaves, bare), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "grid", [Grid(3, granularity="group", group=4, clip="mse"), Grid(4, granularity="tensor")]
)
def test_scales_of_groups_and_of_whole_weights(one, grid):
    after = rounded(one, Scheme(grid, overrides=(Override("layers.1.up", weights=16),)))
    for name in PROJECTIONS:
        linear = after.params.layers.linear(name)
        w, scale = np.asarray(linear.weight), np.asarray(linear.scale)
        groups = w.shape[1] // grid.group if grid.group else 1
        assert scale.shape == (3, groups, w.shape[2])
        on = [i for i in range(3) if (name, i) != ("up", 1)]
        each = np.repeat(scale, w.shape[1] // groups, axis=1)
        codes = np.rint(w / each)
        np.testing.assert_array_equal((codes * each)[on], w[on])
        assert (np.abs(codes[on]) <= 2 ** (grid.bits - 1)).all()
    np.testing.assert_array_equal(after.params.layers.up.scale[1], 1)
    np.testing.assert_array_equal(weights(after, "up")[1], weights(one, "up")[1])


def test_weights_on_an_asymmetric_grid_have_no_scales(one):
    after = rounded(one, Scheme(Grid(3, "asymmetric")))
    assert all(after.params.layers.linear(name).scale is None for name in PROJECTIONS)
    assert (weights(after, "q") != weights(one, "q")).any()


def test_moments_are_of_what_the_weights_multiply(fused, monkeypatch):
    """The online rotation before down included."""
    h = np.random.default_rng(0).standard_normal((2, 16, 48)).astype(np.float32)
    read = []

    def linear(x, layer, dtype):
        read.append(np.asarray(x, np.float64).reshape(-1, x.shape[-1]))
        return x @ layer.weight + (0 if layer.bias is None else layer.bias)

    here = place(fused, 1, [h])
    found = gather(here, INPUTS)
    monkeypatch.setattr("qrot.model.layer.linear", linear)
    with jax.disable_jit():
        run(jnp.asarray(h), here.layer, here.context)
    x = dict(zip(PROJECTIONS, read, strict=True))
    for site in INPUTS:
        for name in SITES[site].readers:
            expected = x[name].T @ x[name]
            np.testing.assert_allclose(found[site].hessian, expected, atol=1e-4 * expected.max())
        size = np.abs(x[name])
        np.testing.assert_allclose(found[site].largest, size.max(0), rtol=1e-4)
        np.testing.assert_allclose(found[site].mean, size.mean(0), rtol=1e-4)


def test_a_layer_reads_what_the_rounded_layers_before_it_write(one):
    both = rounded(one, W3)
    first = Scheme(overrides=(Override("layers.[01].*", weights=3),))
    last = Scheme(overrides=(Override("layers.2.*", weights=3),))
    then = rounded(rounded(one, first), last)
    alone = rounded(one, last)
    for name in PROJECTIONS:
        np.testing.assert_array_equal(weights(then, name), weights(both, name))
    assert (weights(alone, "down")[2] != weights(both, "down")[2]).any()


def test_overrides(one):
    overrides = (Override("layers.1.*", weights=8), Override("*.down", weights=16))
    after = rounded(one, Scheme(weights=Grid(3), overrides=overrides))
    for name in PROJECTIONS:
        change = ((weights(one, name) - weights(after, name)) ** 2).mean((1, 2))
        if name == "down":
            assert (change == 0).all()
        else:
            assert 0 < change[1] < 0.05 * min(change[0], change[2])
    bare = [jax.tree.structure(without_weights(x.params)) for x in (after, one)]
    assert bare[0] == bare[1]


def test_16_bits_leave_everything_alone(one):
    for a, b in zip(*map(jax.tree.leaves, (rounded(one, Scheme()), one)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_parameters_on_the_host_and_in_bfloat16(one):
    narrow = one.replace(
        params=jax.tree.map(lambda x: np.asarray(x.astype(jnp.bfloat16)), one.params)
    )
    after = rounded(narrow, W3, batch=4)
    bare = without_scales(after.params)
    assert {x.dtype for x in jax.tree.leaves(bare)} == {jnp.dtype(jnp.bfloat16)}
    change = logits(after) - logits(narrow)
    plain = logits(plainly(narrow, W3)) - logits(narrow)
    assert jnp.square(change).mean() < jnp.square(plain).mean()


def without_scales(params):
    layers = {n: params.layers.linear(n).replace(scale=None) for n in PROJECTIONS}
    return params.replace(layers=params.layers.replace(**layers))


def test_a_model_without_rotations(variant):
    network = fold(variant("llama-biases").network)
    after = [logits(q) - logits(network) for q in (rounded(network, W3), plainly(network, W3))]
    assert jnp.square(after[0]).mean() < jnp.square(after[1]).mean()


def test_what_cannot_be_rounded(one, variant):
    network = fold(variant("llama-biases").network)
    with pytest.raises(ValueError, match="fuse first"):
        rounded(network.replace(online=random(network)), W3)
    plain = network.params
    broken = network.replace(params=plain.replace(embed=plain.embed * np.inf))
    with pytest.raises(InputError, match="the input of qkv in layer 0 is not finite"):
        rounded(broken, W3)
    grouped = Scheme(weights=Grid(4, granularity="group", group=16))  # hidden 48, intermediate 56
    with pytest.raises(InputError, match="16 does not divide 56"):
        rounded(network, grouped)


def test_settings_out_of_range():
    with pytest.raises(InputError, match=r"weights\.damping: "):
        Gptq(damping=0.0)
    with pytest.raises(InputError, match=r"calibration\.windows: "):
        Calibration(windows=0)
    with pytest.raises(InputError, match=r"calibration\.length: "):
        Calibration(length=1)
