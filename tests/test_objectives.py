from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from looked import site_inputs

from qrot.calibrate.capture import Captured, capture, capture_hidden, mean_inputs
from qrot.grid import Grid, expected_error, fake_quantise
from qrot.learn.batches import drawn
from qrot.learn.objectives import OBJECTIVES
from qrot.learn.objectives.fisher import fisher
from qrot.learn.objectives.kl import kl
from qrot.learn.objectives.kurtosis import UNIFORM, kurtosis
from qrot.learn.objectives.layer_reconstruction import layer_reconstruction
from qrot.learn.objectives.reconstruction import reconstruction
from qrot.learn.objectives.whip import whip
from qrot.learn.quantised import quantised_logits
from qrot.model.forward import forward, project
from qrot.network import fold, fuse
from qrot.quantize.rtn import rtn
from qrot.rotation.random import random_rotations
from qrot.rotation.transform import Transform
from qrot.scheme import Override, Scheme
from qrot.sites import INPUTS, PROJECTIONS, SITES

A4 = Grid(4, "asymmetric")
W16A4 = Scheme(Grid(), A4, A4, A4)
W4A4 = Scheme(Grid(4), A4, A4, A4)


@pytest.fixture(scope="module")
def network(variant):
    return fold(variant("qwen2").network)


@pytest.fixture(scope="module")
def rows(network):
    draw = np.random.default_rng(0)
    return draw.integers(0, network.config.vocab_size, (4, 16), dtype=np.int32)


@pytest.fixture(scope="module")
def captured(network, rows):
    return capture(network, rows, vectors=16, seed=0, gradients=True)[0]


# What a grid is expected to do


@pytest.mark.parametrize("clip", [1.0, 0.8])
@pytest.mark.parametrize("kind", ["symmetric", "symmetric_half", "asymmetric"])
def test_the_expected_error_is_the_mean_error(kind, clip):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(400, 256)), jnp.float32)
    grid = Grid(4, kind, clip=clip)
    expected = float(expected_error(x, grid).mean())
    actual = float(jnp.square(fake_quantise(x, grid) - x).mean())
    assert expected == pytest.approx(actual, rel=0.02)


def test_the_expected_error_keeps_to_groups_and_is_zero_where_nothing_is_rounded():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 16)), jnp.float32)
    grid = Grid(4, granularity="group", group=8)
    whole = [expected_error(x[:, i : i + 8], Grid(4)) for i in (0, 8)]
    np.testing.assert_allclose(expected_error(x, grid), jnp.concatenate(whole, 1), rtol=1e-6)
    assert not expected_error(x, Grid()).any()


# Capture


def test_captured_vectors_are_the_inputs_of_the_sites(network, rows, captured):
    _, inputs = site_inputs(network, jnp.asarray(rows))
    for name in SITES:
        x = np.asarray(inputs[name], np.float32).reshape(3, 4, 16, -1)
        mine = captured.inputs[name].astype(np.float32)
        mine = mine.reshape(*mine.shape[:2], -1)
        scale = np.abs(x).max()
        np.testing.assert_allclose(mine[:, :4], x[:, :, 0], atol=0.01 * scale)
        # All other positions of each window, in some order.
        np.testing.assert_allclose(
            mine[:, 4:].sum(1), x[:, :, 1:].sum((1, 2)), atol=0.02 * scale * 60
        )
    assert captured.first == 4
    np.testing.assert_allclose(captured.weight, 1 / 64, rtol=1e-6)


def test_captured_gradients_are_those_of_the_biases(network, rows):
    """A constant added to a site's input is a bias of what reads it."""
    seed = 5
    captured, _ = capture(network, rows, vectors=16, seed=seed, gradients=True, batch=4)
    key = jax.random.split(jax.random.key(seed), 1)[0]
    log_p = jax.nn.log_softmax(forward(network, jnp.asarray(rows)))
    labels = jax.random.categorical(key, log_p)
    layers = network.params.layers

    def nats(biases):
        moved = {
            name: layers.linear(name).replace(
                bias=b if (old := layers.linear(name).bias) is None else old + b
            )
            for name, b in biases.items()
        }
        params = network.params.replace(layers=layers.replace(**moved))
        log_p = jax.nn.log_softmax(forward(network.replace(params=params), jnp.asarray(rows)))
        return -jnp.take_along_axis(log_p, labels[..., None], -1).sum()

    zero = {n: jnp.zeros(layers.linear(n).weight.shape[::2]) for n in PROJECTIONS}
    by_bias = jax.grad(nats)(zero)
    for site in INPUTS:
        expected = sum(
            jnp.einsum("lo,lio->li", by_bias[n], layers.linear(n).weight)
            for n in SITES[site].readers
        )
        found = captured.gradients[site].astype(np.float32).sum(1)
        np.testing.assert_allclose(found, expected, atol=0.03 * float(jnp.abs(expected).max()))
    values = captured.gradients["values"].astype(np.float32).sum(1).reshape(len(found), -1)
    np.testing.assert_allclose(values, by_bias["v"], atol=0.03 * np.abs(values).max())


def test_weights_on_the_host_give_the_same(network, rows):
    host = network.replace(params=jax.tree.map(np.asarray, network.params))
    for a, b in zip(
        jax.tree.leaves(capture(network, rows, vectors=4, seed=1, gradients=True)),
        jax.tree.leaves(capture(host, rows, vectors=4, seed=1, gradients=True)),
        strict=True,
    ):
        np.testing.assert_array_equal(np.float32(a), np.float32(b))


def test_hidden_states_lead_from_the_embedding_to_the_logits(network, rows):
    states = capture_hidden(network, rows)
    assert states.shape == (4, 4, 16, network.config.hidden_size)
    np.testing.assert_array_equal(
        states[0], np.asarray(network.params.embed)[rows].astype(states.dtype)
    )
    logits = project(network, jnp.asarray(states[-1], jnp.float32))
    exact = forward(network, jnp.asarray(rows))
    assert float(jnp.abs(logits - exact).max()) < 0.05 * float(jnp.abs(exact).max())


def test_a_batch_has_its_share_of_first_tokens(captured):
    batch = drawn(captured, 32, 0, 0)
    assert batch.first == 2
    assert batch.inputs["qkv"].shape[1] == 32
    assert float(batch.weight.sum()) == pytest.approx(1)
    assert float(batch.weight[:2].sum()) == pytest.approx(4 / 64)
    firsts = captured.inputs["qkv"][:, :4].astype(np.float32)
    for vector in np.asarray(batch.inputs["qkv"][:, :2], np.float32).swapaxes(0, 1):
        assert any((vector == firsts[:, i]).all() for i in range(4))


# Site-wise objectives


def bases(network, rotations, layer):
    """A of each site of one layer, as dense matrices over the site's whole input."""
    c = network.config
    r1, r4 = rotations["residual"].dense(), rotations["down"].dense()
    r2, r3 = rotations["value"].dense()[layer], rotations["key"].dense()
    return {
        "qkv": r1,
        "gate_up": r1,
        "down": r4,
        "o": np.kron(np.eye(c.num_attention_heads), r2),
        "values": np.kron(np.eye(c.num_key_value_heads), r2),
        "keys": np.kron(np.eye(c.num_key_value_heads), r3),
    }


def scales_of(y, clip=1.0):
    """Step, low and high end of the asymmetric 4-bit grid, in numpy."""
    low, high = np.minimum(y.min(-1, keepdims=True), 0), np.maximum(y.max(-1, keepdims=True), 0)
    return (high - low) * clip / 15, low * clip, high * clip


def test_fisher_is_its_formula(network, captured):
    rotations, total = random_rotations(network.config, 2), 0.0
    for i in range(network.config.num_hidden_layers):
        for name, a in bases(network, rotations, i).items():
            x = captured.inputs[name][i].astype(np.float64)
            g = captured.gradients[name][i].astype(np.float64)
            y = (x.reshape(len(x), -1) @ a).reshape(x.shape)
            h = (g.reshape(len(x), -1) @ np.linalg.inv(a).T).reshape(x.shape)
            step, low, high = scales_of(y)
            error = step**2 / 12 + (y - np.clip(y, low, high)) ** 2
            total += (error * h**2).reshape(len(x), -1).sum(-1) @ captured.weight / 2
    loss = fisher(Transform(rotations), network.replace(scheme=W16A4), captured)
    assert float(loss) == pytest.approx(total, rel=1e-4)


def test_fisher_foretells_kl(network, captured, rows):
    """Where rounding is fine, the estimate without running the network is what running it shows."""
    fine = Grid(6, "asymmetric")
    network = network.replace(scheme=Scheme(Grid(), fine, fine, fine))
    foretold, seen = [], []
    for seed in range(4):
        transform = Transform(random_rotations(network.config, seed))
        foretold.append(float(fisher(transform, network, captured)))
        seen.append(float(kl(transform, network, jnp.asarray(rows))))
    assert np.mean(foretold) == pytest.approx(np.mean(seen), rel=0.35)


def by_hand(vector):
    """Captured inputs that are all the same vector, for a model of 3 layers."""
    x = np.tile(np.asarray(vector, np.float32), (3, 6, 1))
    inputs = {n: x[:, :, None] if n in ("keys", "values") else x for n in SITES}
    return Captured(inputs, None, np.full(6, 1 / 6, np.float32), 2)


@pytest.mark.parametrize(
    ("objective", "vector", "each"),
    [
        (whip, [2.0, -2.0, 2.0, 2.0], np.exp(-1)),
        (whip, [3.0, 0.0, 0.0, 0.0], (3 + np.exp(-2)) / 4),
        (kurtosis, [2.0, -2.0, 2.0, 2.0], UNIFORM - 1),
        (kurtosis, [3.0, 0.0, 0.0, 0.0], 4 - UNIFORM),
    ],
)
def test_whip_and_kurtosis_by_hand(network, objective, vector, each):
    captured = by_hand(vector)
    network = network.replace(config=replace(network.config, head_dim=4))
    loss = objective(Transform(), network.replace(scheme=W16A4), captured)
    assert float(loss) == pytest.approx(3 * len(SITES) * each, rel=1e-5)
    fewer = replace(W16A4, keys=Grid(), overrides=(Override("layers.0.*", activations=16),))
    loss = objective(Transform(), network.replace(scheme=fewer), captured)
    assert float(loss) == pytest.approx((1 + 5 + 5) * each, rel=1e-5)  # values; all but keys


@pytest.mark.parametrize("scheme", [W16A4, W4A4], ids=["w16", "w4"])
def test_reconstruction_is_its_formula(network, captured, scheme):
    config, rotations = network.config, random_rotations(network.config, 2)
    network = network.replace(scheme=scheme)
    layers = network.params.layers
    turned = fuse(network, Transform(rotations)) if scheme.weights.on else network
    q = rtn(turned).params.layers

    def rounded(y):
        step, low, _ = scales_of(y)
        zero = np.round(-low / step)
        return (np.clip(np.round(y / step) + zero, 0, 15) - zero) * step

    def weight(tree, name, i):
        return np.asarray(tree.linear(name).weight[i], np.float64)

    total = 0.0
    for i in range(config.num_hidden_layers):
        a = bases(network, rotations, i)
        for site in SITES:
            x = captured.inputs[site][i, captured.first :].astype(np.float64)
            y = rounded((x.reshape(len(x), -1) @ a[site]).reshape(x.shape)).reshape(len(x), -1)
            x = x.reshape(len(x), -1)
            if site in ("keys", "values"):
                exact, found = x, y @ a[site].T
            else:
                readers = SITES[site].readers
                exact = [x @ weight(layers, n, i) for n in readers]
                if scheme.weights.on:
                    out = {"v": a["values"], "o": a["qkv"], "down": a["qkv"]}
                    pairs = zip(exact, readers, strict=True)
                    exact = [z @ out.get(n, np.eye(z.shape[1])) for z, n in pairs]
                    found = [y @ weight(q, n, i) for n in readers]
                else:
                    found = [y @ a[site].T @ weight(layers, n, i) for n in readers]
                exact, found = np.concatenate(exact, -1), np.concatenate(found, -1)
            total += np.square(found - exact).sum() / np.square(exact).sum()
    loss = reconstruction(Transform(rotations), network, captured)
    assert float(loss) == pytest.approx(total / config.num_hidden_layers, rel=5e-3)


# Objectives of layers and of the network


@pytest.mark.parametrize("scheme", [W16A4, W4A4], ids=["w16", "w4"])
def test_layer_reconstruction_sees_each_layer_alone(network, rows, scheme):
    config, transform = network.config, Transform(random_rotations(network.config, 0))
    states = jnp.asarray(capture_hidden(network, rows), jnp.float32)

    def loss(scheme):
        return float(layer_reconstruction(transform, network.replace(scheme=scheme), states))

    assert loss(Scheme()) < 1e-4  # bfloat16 states
    layers = range(config.num_hidden_layers)
    weights = 16 if scheme.weights.on else None

    def only(layer):
        return tuple(
            Override(f"layers.{i}.*", weights=weights, activations=16, keys=16, values=16)
            for i in layers
            if i != layer
        )

    alone = [loss(replace(scheme, overrides=only(i))) for i in layers]
    assert min(alone) > 0.001
    assert loss(scheme) == pytest.approx(sum(alone), rel=0.02)


def test_kl_is_its_formula(network, rows):
    tokens, rounded = jnp.asarray(rows), network.replace(scheme=W4A4)
    transform = Transform(random_rotations(network.config, 0), shifts=mean_inputs(network, rows))
    exact = np.asarray(forward(network, tokens), np.float64)
    found = np.asarray(quantised_logits(transform, rounded, tokens), np.float64)

    def softmax(x):
        p = np.exp(x - x.max(-1, keepdims=True))
        return p / p.sum(-1, keepdims=True)

    p, q = softmax(exact), softmax(found)
    loss = kl(transform, rounded, tokens)
    assert float(loss) == pytest.approx((p * np.log(p / q)).sum(-1).mean(), rel=1e-4)
    assert abs(float(kl(transform, network, tokens))) < 1e-6
    best = np.argsort(-exact, axis=-1)[..., :5]
    p, q = (softmax(np.take_along_axis(x, best, -1)) for x in (exact, found))
    top = kl(transform, rounded, tokens, top=5)
    assert float(top) == pytest.approx((p * np.log(p / q)).sum(-1).mean(), rel=1e-4)


def test_every_objective_feels_the_rotations_and_what_is_beside(network, captured, rows):
    config, layers = network.config, network.config.num_hidden_layers
    shapes = {"qkv": config.hidden_size, "down": config.intermediate_size}
    scales = {n: jnp.zeros((layers, size)) for n, size in shapes.items()}
    transform = Transform(random_rotations(config, 0), scales)
    states = jnp.asarray(capture_hidden(network, rows))
    batches = {"tokens": jnp.asarray(rows), "hidden": states, "captured": captured}
    network = network.replace(scheme=W16A4)
    for name, objective in OBJECTIVES.items():
        gradient = jax.grad(objective.loss)(transform, network, batches[objective.batch])
        assert jnp.abs(gradient.rotations["residual"].matrix).max() > 0, name
        assert jnp.abs(gradient.rotations["value"].matrix).max() > 0, name
        if objective.scales:
            assert jnp.abs(gradient.scales["qkv"]).max() > 0, name
            assert jnp.abs(gradient.scales["down"]).max() > 0, name
