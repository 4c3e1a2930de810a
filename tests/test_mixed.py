"""Bits by what rounding costs: the allocation, the cost, and runs that use both."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qrot.errors import InputError
from qrot.grid import Grid
from qrot.model.forward import embedded, forward, project, run_layers
from qrot.network import fold, fuse
from qrot.quantize.mixed import (
    Mixed,
    allocate,
    bits_per_weight,
    check_scheme,
    with_bits,
)
from qrot.quantize.rtn import round_weight, rtn
from qrot.quantize.sensitivity import RUN, sensitivity
from qrot.rotation.random import random_rotations
from qrot.rotation.transform import Transform
from qrot.scheme import Override, Scheme, layer_scheme
from qrot.sites import PROJECTIONS

pytestmark = pytest.mark.usefixtures("quick_compile")
CHOICES = (2, 3, 5)


def brute_force(costs, sizes, choices, bits):
    """The least cost of all allocations within the budget."""
    layers, names = costs.shape[:2]
    weights = np.tile(sizes, layers)
    flat = costs.reshape(-1, len(choices))
    least = np.inf
    for picks in product(range(len(choices)), repeat=layers * names):
        spent = sum(int(w) * choices[c] for w, c in zip(weights, picks, strict=True))
        if spent <= bits * int(weights.sum()) + 1e-9:
            least = min(least, sum(flat[i, c] for i, c in enumerate(picks)))
    return least


@given(
    st.integers(0, 2**31),
    st.sampled_from([(1, 5), (2, 3), (3, 2)]),
    st.floats(2, 5),
    st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_the_allocation_is_the_best_of_all(seed, shape, bits, falling):
    draw = np.random.default_rng(seed)
    sizes = draw.integers(1, 9, shape[1]) * 4
    costs = draw.exponential(size=(*shape, len(CHOICES)))
    if falling:
        costs = np.sort(costs)[..., ::-1]
    found = allocate(costs, sizes, CHOICES, bits)
    assert (found * sizes).sum() <= bits * sizes.sum() * shape[0] + 1e-6
    at = np.searchsorted(CHOICES, found)
    cost = np.take_along_axis(costs, at[..., None], 2).sum()
    assert cost == pytest.approx(brute_force(costs, sizes, CHOICES, bits), rel=1e-12)


def test_a_large_problem_spends_the_whole_budget():
    draw = np.random.default_rng(0)
    sizes = np.array([3, 1, 1, 3, 8, 8, 8]) * 110592
    costs = draw.lognormal(size=(30, 7, 1)) * 4.0 ** -np.array([2, 3, 4, 6, 8])
    found = allocate(costs, sizes, (2, 3, 4, 6, 8), 3.5)
    assert (found * sizes).sum() == 3.5 * sizes.sum() * 30
    np.testing.assert_array_equal(found, allocate(costs, sizes, (2, 3, 4, 6, 8), 3.5))


def test_of_equal_costs_the_fewer_bits():
    found = allocate(np.ones((2, 3, 3)), np.array([4, 8, 4]), CHOICES, 5.0)
    assert (found == 2).all()


def test_the_least_and_the_most_bits():
    costs = np.tile([3.0, 2.0, 1.0], (2, 2, 1))
    sizes = np.array([4, 8])
    assert (allocate(costs, sizes, CHOICES, 2.0) == 2).all()
    assert (allocate(costs, sizes, CHOICES, 5.0) == 5).all()
    assert (allocate(costs[..., :1], sizes, (2,), 2.0) == 2).all()
    with pytest.raises(ValueError, match="below 2"):
        allocate(costs, sizes, CHOICES, 1.9)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"bits": 9.0}, "mixed.bits: 9 is outside the choices, 2 to 8"),
        ({"bits": 1.5}, "mixed.bits: 1.5 is outside the choices, 2 to 8"),
        ({"choices": (4, 2)}, r"mixed.choices: \[4, 2\] are not rising numbers from 2 to 16"),
        ({"choices": ()}, r"mixed.choices: \[\] are not rising"),
        ({"choices": (1, 8)}, r"mixed.choices: \[1, 8\] are not rising"),
        ({"windows": 0}, "mixed.windows: 0 is not positive"),
    ],
)
def test_settings_out_of_range(change, sentence):
    with pytest.raises(InputError, match=sentence):
        Mixed(**change)


def test_schemes_that_leave_no_choice():
    with pytest.raises(InputError, match="no weight is rounded"):
        check_scheme(Scheme())
    with pytest.raises(InputError, match="no override can set any"):
        check_scheme(Scheme(Grid(4), overrides=(Override("*.q", weights=8),)))
    check_scheme(Scheme(Grid(4), overrides=(Override("*.q", activations=8),)))


# Whole models

ROWS = np.random.default_rng(7).integers(0, 97, (4, RUN + 6), np.int32)
GRIDS = (Grid(2, granularity="channel"), Grid(4, granularity="channel", clip="mse"))


def weight(network, name):
    return network.params.layers.linear(name).weight


def test_the_scheme_says_what_was_chosen(variant):
    network = fold(variant("llama").network)
    bits = np.random.default_rng(0).choice([2, 4, 16], (3, 7))
    scheme = with_bits(Scheme(Grid(3), activations=Grid(4)), bits)
    for i, row in enumerate(bits):
        grids = layer_scheme(scheme, i)
        assert [grids.weights[n].bits for n in PROJECTIONS] == list(row)
        assert grids.sites["down"].bits == 4
    after = rtn(network.replace(scheme=scheme))
    for j, name in enumerate(PROJECTIONS):
        before, now = (jnp.asarray(weight(x, name)) for x in (network, after))
        for i, b in enumerate(bits[:, j]):
            expected = round_weight(before[i], Grid(int(b), granularity="channel"))
            np.testing.assert_array_equal(now[i], expected)
            assert (now[i] == before[i]).all() == (b == 16)


@pytest.mark.parametrize("kind", ["symmetric", "asymmetric"])
@pytest.mark.parametrize(("granularity", "group"), [("channel", None), ("group", 4), ("tensor", 0)])
def test_bits_per_weight(variant, granularity, group, kind):
    params = variant("llama").network.params
    grid = Grid(3, kind, granularity, group or None)
    bits = np.random.default_rng(0).choice([2, 5, 16], (3, 7))
    weights = alone = more = 0
    for j, name in enumerate(PROJECTIONS):
        for i in range(3):
            inputs, outputs = params.layers.linear(name).weight.shape[1:]
            scales = {"channel": outputs, "group": inputs * outputs // 4, "tensor": 1}[granularity]
            weights += inputs * outputs
            alone += inputs * outputs * bits[i, j]
            if bits[i, j] < 16:
                more += scales * (16 + (bits[i, j] if kind == "asymmetric" else 0))
    expected = alone / weights, (alone + more) / weights
    assert bits_per_weight(params, grid, bits) == pytest.approx(expected)


@pytest.fixture(scope="module", params=["mistral-window", "qwen3-biases"])
def fused(request, variant):
    """A network in float64, all rotations fused."""
    model = variant(request.param, "float64")
    with jax.enable_x64(True):
        network = fold(model.network)
        return fuse(network, Transform(random_rotations(network.config, 0)))


def test_the_cost_is_half_the_square_of_the_derivative_along_the_change(fused, monkeypatch):
    """Against jax.grad of the whole network, where each projection computes x (W + s E) with an s
    for each token."""
    seed = 3
    with jax.enable_x64(True):
        found = sensitivity(fused, ROWS, GRIDS, seed=seed)
        keys = jax.random.split(jax.random.key(seed), 2)
        monkeypatch.setattr("qrot.model.layer.linear", moving)
        derivatives = jax.jit(along)
        for j, grid in enumerate(GRIDS):
            expected = np.zeros((3, 7))
            for key, rows in zip(keys, (ROWS[:2], ROWS[2:]), strict=True):
                gradients = derivatives(fused, jnp.asarray(rows), key, changes(fused, grid))
                for k, name in enumerate(PROJECTIONS):
                    for start in range(0, ROWS.shape[1], RUN):
                        run = np.asarray(gradients[name])[:, :, start : start + RUN].sum(2)
                        expected[:, k] += (run**2).sum(1) / 2
            np.testing.assert_allclose(found[..., j], expected / ROWS.size, rtol=1e-9)


def changes(network, grid):
    weights = {n: jnp.asarray(weight(network, n)) for n in PROJECTIONS}
    return {n: jax.lax.map(lambda x: round_weight(x, grid) - x, w) for n, w in weights.items()}


QUEUE = []  # (E, s) of the projections of one layer, in their order


def enqueue(layer, online, grids, changes, s):
    QUEUE[:] = [(changes[name], s[name]) for name in PROJECTIONS]
    return layer, online


def moving(x, layer, dtype):
    change, s = QUEUE.pop(0)
    y = x @ layer.weight + s[..., None] * (x @ change)
    return y if layer.bias is None else y + layer.bias


def along(network, rows, key, changes):
    """{projection: [layers, batch, length]}, d nats / d s at s = 0."""

    def log_p(s):
        hidden = run_layers(network, embedded(network, rows), prepare=enqueue, beside=(changes, s))
        return jax.nn.log_softmax(project(network, hidden))

    none = dict.fromkeys(PROJECTIONS, jnp.zeros((3, *rows.shape)))
    drawn = jax.random.categorical(key, log_p(none))[..., None]
    return jax.grad(lambda s: -jnp.take_along_axis(log_p(s), drawn, -1).sum())(none)


def test_what_it_predicts_is_measured(variant):
    network, grid = fold(variant("llama").network), Grid(4, granularity="channel")
    rows = np.random.default_rng(1).integers(0, 97, (32, 32), np.int32)
    costs = sensitivity(network, rows, (grid,), batch=32)[..., 0]
    run = jax.jit(lambda network: jax.nn.log_softmax(forward(network, jnp.asarray(rows))))
    plain, measured, layers = run(network), np.zeros_like(costs), network.params.layers
    for i, (j, name) in product(range(3), enumerate(PROJECTIONS)):
        w = jnp.asarray(weight(network, name))
        linear = layers.linear(name).replace(weight=w.at[i].set(round_weight(w[i], grid)))
        params = network.params.replace(layers=layers.replace(**{name: linear}))
        change = plain - run(network.replace(params=params))
        measured[i, j] = (jnp.exp(plain) * change).sum(-1).mean()
    ratio = np.log(costs / measured)
    assert abs(np.median(ratio)) < 0.2
    assert abs(ratio).max() < 1.2  # one k that few positions attend by


def test_a_grid_that_is_off_costs_nothing_and_fuse_comes_first(variant):
    network, done = fold(variant("llama").network), []
    costs = sensitivity(network, ROWS, (Grid(16), Grid(2)), advance=lambda: done.append(1))
    assert (costs[..., 0] == 0).all()
    assert (costs[..., 1] > 0).all()
    assert len(done) == 6
    unfused = network.replace(online=Transform(random_rotations(network.config, 0)))
    with pytest.raises(ValueError, match="fuse first"):
        sensitivity(unfused, ROWS, GRIDS)
