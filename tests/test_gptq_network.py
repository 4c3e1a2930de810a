"""GPTQ of whole models."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import without_weights

from qrot.calibrate.moments import gather
from qrot.calibrate.walk import place, run
from qrot.errors import InputError
from qrot.grid import Grid
from qrot.model.forward import forward
from qrot.network import fold, fuse
from qrot.quantize.gptq import gptq
from qrot.quantize.rtn import rtn
from qrot.rotation.random import random_rotations
from qrot.rotation.transform import Transform
from qrot.scheme import Override, Scheme
from qrot.sites import INPUTS, PROJECTIONS, SITES

pytestmark = pytest.mark.usefixtures("quick_compile")
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
