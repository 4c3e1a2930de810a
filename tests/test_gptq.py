"""GPTQ: one weight against the paper's formulas and against qwix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qrot.calibrate.moments import Calibration
from qrot.errors import InputError
from qrot.grid import Grid
from qrot.quantize.gptq import Gptq, solve
from qrot.quantize.rtn import round_weight

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


def test_settings_out_of_range():
    with pytest.raises(InputError, match=r"weights\.damping: "):
        Gptq(damping=0.0)
    with pytest.raises(InputError, match=r"calibration\.windows: "):
        Calibration(windows=0)
    with pytest.raises(InputError, match=r"calibration\.length: "):
        Calibration(length=1)
