"""AWQ: one weight against the published formulas, then layers and whole models."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import without_weights

from qrot.calibrate.moments import change_layers
from qrot.errors import InputError
from qrot.grid import Grid, fake_quantise
from qrot.model.forward import forward
from qrot.network import fold, fuse
from qrot.quantize.awq import Awq, awq, best_scale, clipped, find_scales, round_layer, scaled
from qrot.quantize.rtn import best_clip, round_weight, rtn
from qrot.rotation.random import random_rotations
from qrot.rotation.transform import Transform
from qrot.scheme import Override, Scheme
from qrot.sites import INPUTS, PROJECTIONS, SITES

pytestmark = pytest.mark.usefixtures("quick_compile")
IN, OUT = 20, 7
GROUPS = {"channel": None, "group": 5, "tensor": None}
KINDS = ("symmetric", "symmetric_half", "asymmetric")
nearest = jax.jit(round_weight, static_argnums=1)
clip_and_scale = jax.jit(clipped, static_argnums=(2, 3))


def clip(*arguments):
    return clip_and_scale(*arguments)[0]


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
    with pytest.raises(InputError, match=r"weights\.steps: "):
        Awq(steps=0)


# Layers and whole models

ROWS = np.random.default_rng(7).integers(0, 97, (6, 16), np.int32)
FEW = ("llama-mha", "qwen3-biases")
W3 = Scheme(weights=Grid(3))
GRIDS = dict.fromkeys(PROJECTIONS, Grid(3, granularity="channel"))


@jax.jit
def _logits(network):
    return forward(network, jnp.asarray(ROWS))


def logits(network):
    """Of the weights that it has, with nothing else rounded."""
    return _logits(network.replace(scheme=Scheme()))


def collected(network):
    """Layers and the moments of each."""
    found = []

    def look(i, layer, moments):
        found.append((layer, moments))
        return layer

    change_layers(network, ROWS, look)
    return found


@pytest.mark.parametrize("name", FEW)
def test_scales_leave_the_function_alone_and_no_site_is_worse_than_plain_rounding(variant, name):
    with jax.enable_x64(True):
        network = fold(variant(name, "float64").network)
        config, layers = network.config, []
        for layer, moments in collected(network):
            scales = find_scales(layer, moments, GRIDS, config, 10)
            assert {*scales} == {"qkv", "gate_up", "down", "values"}
            layers.append(scaled(layer, scales, config))
            done = round_layer(layers[-1], moments, scales, GRIDS, config, Awq())
            factor = {n: np.exp(np.asarray(x)) for n, x in scales.items()}
            queries = config.num_attention_heads // config.num_key_value_heads
            factor["o"] = np.repeat(factor["values"], queries, 0)
            written = {"v": factor["values"].ravel(), "up": factor["down"]}
            for site in INPUTS:
                lost = []
                for n in SITES[site].readers:
                    h, w = np.asarray(moments[site].hessian), np.asarray(layer.linear(n).weight)
                    q = np.asarray(done.linear(n).weight) * factor[site].ravel()[:, None]
                    plain = np.asarray(nearest(jnp.asarray(w), GRIDS[n]))
                    changes = (q / written.get(n, 1.0) - w, plain - w)
                    lost.append([np.sum(e * (h @ e)) for e in changes])
                lost = np.sum(lost, axis=0)
                assert lost[0] <= lost[1] * (1 + 1e-9), site
                assert lost[0] < 0.95 * lost[1], site
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *layers)
        before = logits(network)
        after = logits(network.replace(params=network.params.replace(layers=stacked)))
        np.testing.assert_allclose(after, before, atol=1e-12 * np.abs(before).max())


@pytest.fixture(scope="module")
def network(variant):
    return fold(variant("llama-biases").network)


def rounded(network, scheme, settings=None, **options):
    return awq(network.replace(scheme=scheme), ROWS, settings, **options)


def plainly(network, scheme=W3):
    return rtn(network.replace(scheme=scheme))


@pytest.fixture(scope="module")
def after(network):
    done = []
    return rounded(network, W3, advance=lambda: done.append(1)), len(done)


def lost(found, before):
    return float(jnp.square(logits(found) - logits(before)).mean())


def weights(network, name):
    return np.asarray(network.params.layers.linear(name).weight, np.float64)


def test_the_output_changes_less_than_by_plain_rounding(network, after):
    after, done = after
    assert done == 3
    plain = plainly(network)
    assert lost(after, network) < 0.75 * lost(plain, network)
    ratio = np.divide(*(np.abs(weights(each, "up")).max(1) for each in (after, plain)))
    assert np.ptp(np.log(ratio)) > 0.3  # some outputs of up are scaled


def test_every_weight_is_on_its_grid(network, after):
    for name in PROJECTIONS:
        q = weights(after[0], name)
        for column in np.moveaxis(q, 1, 2).reshape(-1, q.shape[1]):
            assert len(np.unique(np.round(column, 6))) <= 8
    before = without_weights(network.params)
    found = without_weights(after[0].params)
    np.testing.assert_array_equal(found.embed, before.embed)
    np.testing.assert_array_equal(found.head, before.head)
    np.testing.assert_array_equal(found.layers.o.bias, before.layers.o.bias)


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize(
    "grid",
    [Grid(3), Grid(4, "symmetric_half", "group", 4, clip="mse"), Grid(5, granularity="tensor")],
)
def test_weights_are_integers_times_the_scales_that_they_carry(network, grid, clip):
    overrides = (Override("layers.1.*", weights=2), Override("layers.2.up", weights=16))
    after = rounded(network, Scheme(grid, overrides=overrides), Awq(clip=clip, steps=4))
    for name in PROJECTIONS:
        linear = after.params.layers.linear(name)
        w, scale = np.asarray(linear.weight), np.asarray(linear.scale)
        groups = w.shape[1] // grid.group if grid.group else 1
        assert scale.shape == (3, groups, w.shape[2])
        each = np.repeat(scale, w.shape[1] // groups, axis=1)
        codes = np.rint(w / each)
        on = [i for i in range(3) if (name, i) != ("up", 2)]
        np.testing.assert_array_equal((codes * each)[on], w[on])
        for i in on:
            assert np.abs(codes[i]).max() <= 2 ** ((2 if i == 1 else grid.bits) - 1)
    np.testing.assert_array_equal(after.params.layers.up.scale[2], 1)
    other = rounded(network, Scheme(Grid(4, "asymmetric")), Awq(clip=clip, steps=4))
    assert other.params.layers.q.scale is None


def test_a_layer_reads_what_the_full_precision_layers_before_it_write(network, after):
    last = Scheme(overrides=(Override("layers.2.*", weights=3),))
    alone = rounded(network, last)
    for name in PROJECTIONS:
        np.testing.assert_array_equal(weights(alone, name)[2], weights(after[0], name)[2])
        np.testing.assert_array_equal(weights(alone, name)[:2], weights(network, name)[:2])


def test_overrides(network):
    """Projections at 16 bits are scaled with those that share their input, and not rounded."""
    overrides = (Override("*.[kq]", weights=16), Override("*.down", weights=16))
    found = rounded(network, Scheme(weights=Grid(8), overrides=overrides))
    np.testing.assert_array_equal(weights(found, "down"), weights(network, "down"))
    norm = np.asarray(found.params.layers.attention_norm, np.float64)[:, :, None]
    assert np.abs(norm - 1).max() > 0.1
    for name in "qk":
        np.testing.assert_allclose(norm * weights(found, name), weights(network, name), rtol=1e-6)
    assert (norm * weights(found, "v") != weights(network, "v")).any()
    none = rounded(network, Scheme())
    for a, b in zip(*map(jax.tree.leaves, (none, network)), strict=True):
        np.testing.assert_array_equal(a, b)


def random(network):
    return Transform(random_rotations(network.config, 0))


def test_an_online_rotation_before_down(network):
    """Its input cannot be scaled, but all else can."""
    fused = fuse(network, random(network))
    found = rounded(fused, Scheme(weights=Grid(8)), Awq(clip=False, steps=4))
    assert 0 < lost(found, fused) < 1e-2 * lost(plainly(fused), fused)
    assert np.abs(found.params.layers.attention_norm - 1).max() > 0.01


def test_parameters_on_the_host_and_in_bfloat16(network):
    narrow = jax.tree.map(lambda x: np.asarray(x.astype(jnp.bfloat16)), network.params)
    channel = np.where(np.arange(48) == 5, 20, 1).astype(jnp.bfloat16)
    narrow = network.replace(params=narrow.replace(embed=narrow.embed * channel))
    found = rounded(narrow, W3, Awq(clip=False, steps=10), batch=4)
    layers = found.params.layers
    layers = layers.replace(**{n: layers.linear(n).replace(scale=None) for n in PROJECTIONS})
    leaves = jax.tree.leaves(found.params.replace(layers=layers))
    assert {x.dtype for x in leaves} == {jnp.dtype(jnp.bfloat16)}
    assert lost(found, narrow) < 0.8 * lost(plainly(narrow), narrow)


def test_what_cannot_be_rounded(network):
    with pytest.raises(ValueError, match="fuse first"):
        rounded(network.replace(online=random(network)), W3)
    grouped = Scheme(weights=Grid(4, granularity="group", group=16))  # hidden 48, intermediate 56
    with pytest.raises(InputError, match="16 does not divide 56"):
        rounded(network, grouped)
