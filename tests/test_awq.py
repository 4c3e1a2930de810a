"""AWQ: one weight against the published formulas, then layers and whole models."""

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
from qrot.grid import Grid, fake_quantise
from qrot.model.forward import forward
from qrot.network import fold_norms, fuse
from qrot.sites import PROJECTIONS
from qrot.quantize.awq import Awq, awq, best_scale, clipped, find_scales, round_layer, scaled
from qrot.calibrate.moments import layer_by_layer
from qrot.quantize.rtn import best_clip, round_weight, rtn
from qrot.rotation.random import random_rotations
from qrot.scheme import READERS, Override, Scheme

pytestmark = pytest.mark.usefixtures("quick_compile")
IN, OUT = 20, 7
GROUPS = {"channel": None, "group": 5, "tensor": None}
KINDS = ("symmetric", "symmetric_half", "asymmetric")
nearest = jax.jit(round_weight, static_argnums=1)
clip = jax.jit(clipped, static_argnums=(2, 3))


def problem(seed=0, n=IN, outputs=OUT):
    """A weight with heavy tails, and correlated inputs of very unequal size."""
    draw = np.random.default_rng(seed)
    x = draw.standard_normal((200, n)) @ draw.standard_normal((n, n))
    x *= np.exp(draw.standard_normal(n))
    return draw.standard_t(4, (n, outputs)), x


def numpy_rounded(w, grid, ratio=1.0):
    """Q(w), where each scale's extremes are multiplied by its ratio [groups, 1, out]."""
    shape, size = w.shape, grid.group or len(w)
    w = w.reshape(-1, size, shape[1])
    axes = {"axis": (0, 1, 2) if grid.granularity == "tensor" else 1, "keepdims": True}
    if grid.kind == "asymmetric":
        low, high = np.minimum(w.min(**axes), 0) * ratio, np.maximum(w.max(**axes), 0) * ratio
        scale = (high - low) / (2**grid.bits - 1)
        first = -np.rint(-low / scale)
        last = first + 2**grid.bits - 1
    else:
        half = 2 ** (grid.bits - 1)
        scale = np.abs(w).max(**axes) * ratio / (half - (1 if grid.kind == "symmetric" else 0.5))
        first, last = -half, half - 1
    return (np.clip(np.rint(w / scale), first, last) * scale).reshape(shape)


def papers_scale(x, weights, grid, steps=20):
    """Equations 4 and 5 of the paper, on the outputs themselves, normalised as released."""
    found, least = None, np.inf
    for i in range(steps):
        s = np.maximum(np.abs(x).mean(0) ** (i / steps), 1e-4)
        s = s / np.sqrt(s.max() * s.min())
        rounded = [numpy_rounded(s[:, None] * w, grid) / s[:, None] for w in weights]
        error = sum(((x @ q - x @ w) ** 2).sum() for w, q in zip(weights, rounded, strict=True))
        if error < least:
            found, least = s, error
    return found


def papers_clip(x, w, grid, steps=20):
    """The ratio by which each group's own outputs change least; plainly where that loses."""
    size = grid.group or len(w)
    parts = x.reshape(len(x), -1, size)
    found, least = 1.0, np.inf
    for i in range(steps // 2 + 1):
        ratio = 1 - i / steps
        change = (numpy_rounded(w, grid, ratio) - w).reshape(-1, size, w.shape[1])
        error = (np.einsum("tgi,gio->tgo", parts, change) ** 2).sum(0)[:, None]
        if grid.granularity == "tensor":
            error = error.sum(keepdims=True)
        better = error < least
        found, least = np.where(better, ratio, found), np.where(better, error, least)
    tried, plain = numpy_rounded(w, grid, found), numpy_rounded(w, grid)
    now, before = (((x @ q - x @ w) ** 2).sum(0) for q in (tried, plain))
    if grid.granularity == "tensor":
        now, before = now.sum(), before.sum()
    return np.where(now < before, tried, plain), np.asarray(now < before)


def statistics(x):
    return jnp.asarray(x.T @ x), jnp.asarray(np.abs(x).mean(0))


# On the third kind the largest weight is halfway between two levels, and its last bit decides.
@pytest.mark.parametrize("kind", ["symmetric", "asymmetric"])
@pytest.mark.parametrize("granularity", GROUPS)
def test_the_papers_scale(granularity, kind):
    grid = Grid(3, kind, granularity, GROUPS[granularity])
    moved = []
    for seed in range(3):
        w, x = problem(seed)
        weights = (w[:, :4], w[:, 4:])
        expected = papers_scale(x, weights, grid)
        with jax.enable_x64(True):
            found = best_scale(tuple(map(jnp.asarray, weights)), *statistics(x), (grid, grid))
        np.testing.assert_allclose(np.exp(-np.asarray(found)), expected, rtol=1e-9)
        moved.append(expected.max() / expected.min() > 1.1)
    assert any(moved)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("granularity", GROUPS)
def test_the_clip_search(granularity, kind):
    grid = Grid(3, kind, granularity, GROUPS[granularity])
    w, x = problem(3)
    expected, better = papers_clip(x, w, grid)
    with jax.enable_x64(True):
        # the candidates are float32 numbers in a weight's dtype
        found = clip(jnp.asarray(w), statistics(x)[0], grid, 20)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert better.any()


def error(x, w, q):
    return ((x @ (np.asarray(q, np.float64) - w)) ** 2).sum(0)


@pytest.mark.parametrize(
    "grid",
    [
        Grid(3, "symmetric", "channel", clip="mse"),
        Grid(3, "asymmetric", "group", 5),
        Grid(3, "symmetric_half", "tensor"),
    ],
    ids=lambda grid: grid.granularity,
)
def test_never_worse_than_plain_rounding(grid):
    @given(st.integers(0, 2**31))
    @settings(max_examples=15, deadline=None)
    def check(seed):
        w, x = problem(seed)
        hessian, mean = statistics(x)
        plain = error(x, w, nearest(jnp.asarray(w), grid))
        s = np.exp(-np.asarray(best_scale((jnp.asarray(w),), hessian, mean, (grid,), 5)))
        scaled = error(x, w, nearest(jnp.asarray(s[:, None] * w), grid) / s[:, None])
        assert scaled.sum() <= plain.sum() * (1 + 1e-9)
        clipped = error(x, w, clip(jnp.asarray(w), hessian, grid, 20))
        if grid.granularity == "tensor":
            clipped, plain = clipped.sum(), plain.sum()
        assert (clipped <= plain * (1 + 1e-9)).all()

    with jax.enable_x64(True):
        check()


@pytest.mark.parametrize("kind", KINDS)
def test_white_inputs_are_rounded_as_without_inputs(kind):
    w = jnp.asarray(problem()[0], jnp.float32)
    grid = Grid(4, kind, "group", 5, clip="mse")
    scale = best_scale((w,), 200 * jnp.eye(IN), jnp.full(IN, 0.8), (grid,))
    np.testing.assert_array_equal(scale, 0)
    grid = replace(grid, clip=1.0)  # then the clip ratios of least squared error are best
    expected = fake_quantise(w, grid, axis=-2, clip=best_clip(w, grid, lowest=0.5, step=0.05))
    np.testing.assert_array_equal(clip(w, jnp.eye(IN), grid, 20), expected)


def test_inputs_that_are_never_on():
    w, x = problem(5)
    x[:, [0, 3]] = 0
    with jax.enable_x64(True):
        grid = Grid(3, granularity="channel")
        found = best_scale((jnp.asarray(w),), *statistics(x), (grid,))
        np.testing.assert_allclose(np.exp(-found), papers_scale(x, (w,), grid), rtol=1e-9)


def test_settings_out_of_range():
    with pytest.raises(InputError, match=r"awq\.steps: "):
        Awq(steps=0)


# Layers and whole models

ROWS = np.random.default_rng(7).integers(0, 97, (6, 16), np.int32)
FEW = ("llama-mha", "qwen3-biases")
W3 = Scheme(weights=Grid(3))
GRIDS = dict.fromkeys(PROJECTIONS, Grid(3, granularity="channel"))


@partial(jax.jit, static_argnames="config")
def logits(params, config, online=None):
    return forward(params, jnp.asarray(ROWS), config, rotations=online)


def collected(model, rotations=None, params=None):
    """Layers and what is seen of each."""
    found = []

    def look(i, layer, seen):
        found.append((layer, seen))
        return layer

    params = model.params if params is None else params
    layer_by_layer(params, model.config, ROWS, look, rotations=rotations)
    return found


@pytest.mark.parametrize("name", FEW)
def test_scales_leave_the_function_alone_and_no_site_is_worse_than_plain_rounding(variant, name):
    with jax.enable_x64(True):
        model = fold_norms(variant(name, "float64"))
        config, layers = model.config, []
        for layer, seen in collected(model):
            scales = find_scales(layer, seen, GRIDS, config, 10)
            assert {n for n, x in vars(scales).items() if x is not None} == {
                "qkv", "gate_up", "down", "values",
            }  # fmt: skip
            layers.append(scaled(layer, scales, config))
            done = round_layer(layers[-1], seen, scales, GRIDS, config, Awq())
            factor = {n: np.exp(np.asarray(x)) for n, x in vars(scales).items() if x is not None}
            queries = config.num_attention_heads // config.num_key_value_heads
            factor["o"] = np.repeat(factor["values"], queries, 0)
            written = {"v": factor["values"].ravel(), "up": factor["down"]}
            for site, names in READERS.items():
                lost = []
                for n in names:
                    h, w = np.asarray(seen[site].hessian), np.asarray(getattr(layer, n).weight)
                    q = np.asarray(getattr(done, n).weight) * factor[site].ravel()[:, None]
                    plain = np.asarray(nearest(jnp.asarray(w), GRIDS[n]))
                    changes = (q / written.get(n, 1.0) - w, plain - w)
                    lost.append([np.sum(e * (h @ e)) for e in changes])
                lost = np.sum(lost, axis=0)
                assert lost[0] <= lost[1] * (1 + 1e-9), site
                assert lost[0] < 0.95 * lost[1], site
        params = model.params.replace(layers=jax.tree.map(lambda *x: jnp.stack(x), *layers))
        before, after = logits(model.params, config), logits(params, config)
        np.testing.assert_allclose(after, before, atol=1e-12 * np.abs(before).max())


@pytest.fixture(scope="module")
def model(variant):
    return fold_norms(variant("llama-biases"))


@pytest.fixture(scope="module")
def after(model):
    told = []
    return awq(model.params, W3, model.config, ROWS, advance=lambda: told.append(1)), len(told)


def lost(params, model, online=None, before=None):
    before = model.params if before is None else before
    change = logits(params, model.config, online) - logits(before, model.config, online)
    return float(jnp.square(change).mean())


def weights(params, name):
    return np.asarray(getattr(params.layers, name).weight, np.float64)


def test_the_output_changes_less_than_by_plain_rounding(model, after):
    after, told = after
    assert told == 3
    plain = lost(rtn(model.params, W3), model)
    assert lost(after, model) < 0.75 * plain
    params = after.layers.up.weight, rtn(model.params, W3).layers.up.weight
    ratio = np.divide(*(np.abs(np.asarray(w)).max(1) for w in params))
    assert np.ptp(np.log(ratio)) > 0.3  # some outputs of up are scaled


def test_every_weight_is_on_its_grid(model, after):
    for name in PROJECTIONS:
        q = weights(after[0], name)
        for column in np.moveaxis(q, 1, 2).reshape(-1, q.shape[1]):
            assert len(np.unique(np.round(column, 6))) <= 8
    before = without_weights(model.params)
    found = without_weights(after[0])
    np.testing.assert_array_equal(found.embed, before.embed)
    np.testing.assert_array_equal(found.head, before.head)
    np.testing.assert_array_equal(found.layers.o.bias, before.layers.o.bias)


def test_a_layer_reads_what_the_full_precision_layers_before_it_write(model, after):
    last = Scheme(overrides=(Override("layers.2.*", weights=3),))
    alone = awq(model.params, last, model.config, ROWS)
    for name in PROJECTIONS:
        np.testing.assert_array_equal(weights(alone, name)[2], weights(after[0], name)[2])
        np.testing.assert_array_equal(weights(alone, name)[:2], weights(model.params, name)[:2])


def test_overrides(model):
    """Projections at 16 bits are scaled with those that share their input, and not rounded."""
    overrides = (Override("*.[kq]", weights=16), Override("*.down", weights=16))
    found = awq(model.params, Scheme(weights=Grid(8), overrides=overrides), model.config, ROWS)
    np.testing.assert_array_equal(weights(found, "down"), weights(model.params, "down"))
    norm = np.asarray(found.layers.attention_norm, np.float64)[:, :, None]
    assert np.abs(norm - 1).max() > 0.1
    for name in "qk":
        np.testing.assert_allclose(
            norm * weights(found, name), weights(model.params, name), rtol=1e-6
        )
    assert (norm * weights(found, "v") != weights(model.params, "v")).any()
    none = awq(model.params, Scheme(), model.config, ROWS)
    for a, b in zip(*map(jax.tree.leaves, (none, model.params)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_online_rotation_before_down(model):
    """Its input cannot be scaled, but all else can."""
    rotations = random_rotations(model.config, 0)
    params, online, _ = fuse(model.params, rotations, model.config)
    settings, scheme = Awq(clip=False, steps=4), Scheme(weights=Grid(8))
    found = awq(params, scheme, model.config, ROWS, rotations=online, settings=settings)
    assert 0 < lost(found, model, online, params) < 1e-2 * lost(rtn(params, W3), model, online,
                                                                params)  # fmt: skip
    assert np.abs(found.layers.attention_norm - 1).max() > 0.01


def test_parameters_on_the_host_and_in_bfloat16(model):
    narrow = jax.tree.map(lambda x: np.asarray(x.astype(jnp.bfloat16)), model.params)
    channel = np.where(np.arange(48) == 5, 20, 1).astype(jnp.bfloat16)
    narrow = narrow.replace(embed=narrow.embed * channel)
    settings = Awq(clip=False, steps=10)
    found = awq(narrow, W3, model.config, ROWS, batch=4, settings=settings)
    assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype(jnp.bfloat16)}
    assert lost(found, model, None, narrow) < 0.8 * lost(rtn(narrow, W3), model, None, narrow)


def test_what_cannot_be_rounded(model):
    with pytest.raises(ValueError, match="fuse first"):
        awq(model.params, W3, model.config, ROWS, rotations=random_rotations(model.config, 0))
    grouped = Scheme(weights=Grid(4, granularity="group", group=16))  # hidden 48, intermediate 56
    with pytest.raises(InputError, match="16 does not divide 56"):
        awq(model.params, grouped, model.config, ROWS)
