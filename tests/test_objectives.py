from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrot.grid import Grid, expected_error, fake_quantise
from qrot.learn.batches import drawn
from qrot.calibrate.capture import Captured, capture, capture_hidden, mean_shifts
from qrot.learn.end_to_end import kl, quantised_logits
from qrot.learn.layer_wise import layer_reconstruction
from qrot.learn.site_wise import UNIFORM, fisher, kurtosis, reconstruction, whip
from qrot.model.forward import forward, forward_with_taps, project
from qrot.network import fold_norms, fuse
from qrot.quantize.rtn import rtn
from qrot.rotation.random import random_rotations
from qrot.rotation.forms import Learned, Rotations, Scales, as_matrix
from qrot.scheme import Override, Scheme

A4 = Grid(4, "asymmetric")
W16A4 = Scheme(Grid(), A4, A4, A4)
W4A4 = Scheme(Grid(4), A4, A4, A4)
SITES = ("qkv", "keys", "values", "o", "gate_up", "down")


@pytest.fixture(scope="module")
def model(variant):
    return fold_norms(variant("qwen2"))


@pytest.fixture(scope="module")
def rows(model):
    draw = np.random.default_rng(0)
    return draw.integers(0, model.config.vocab_size, (4, 16), dtype=np.int32)


@pytest.fixture(scope="module")
def captured(model, rows):
    return capture(model, rows, taps=16, seed=0, gradients=True)[0]


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


def test_captured_vectors_are_the_inputs_of_the_sites(model, rows, captured):
    tapped = forward_with_taps(model.params, jnp.asarray(rows), model.config, taps=jnp.arange(64))
    for name in SITES:
        x = np.asarray(tapped[1][name], np.float32).reshape(3, 4, 16, -1)
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


def test_captured_gradients_are_those_of_the_biases(model, rows):
    """A constant added to a site's input is a bias of what reads it."""
    config, seed = model.config, 5
    captured, _ = capture(model, rows, taps=16, seed=seed, gradients=True, batch=4)
    key = jax.random.split(jax.random.key(seed), 1)[0]
    log_p = jax.nn.log_softmax(forward(model.params, jnp.asarray(rows), config))
    labels = jax.random.categorical(key, log_p)
    readers = {"qkv": "qkv", "o": ["o"], "gate_up": ["gate", "up"], "down": ["down"]}
    layers = model.params.layers

    def nats(biases):
        moved = {
            name: getattr(layers, name).replace(
                bias=b if (old := getattr(layers, name).bias) is None else old + b
            )
            for name, b in biases.items()
        }
        params = model.params.replace(layers=layers.replace(**moved))
        log_p = jax.nn.log_softmax(forward(params, jnp.asarray(rows), config))
        return -jnp.take_along_axis(log_p, labels[..., None], -1).sum()

    names = [name for group in readers.values() for name in group]
    zero = {n: jnp.zeros(getattr(layers, n).weight.shape[::2]) for n in names}
    by_bias = jax.grad(nats)(zero)
    for site, group in readers.items():
        expected = sum(
            jnp.einsum("lo,lio->li", by_bias[n], getattr(layers, n).weight) for n in group
        )
        found = captured.gradients[site].astype(np.float32).sum(1)
        np.testing.assert_allclose(found, expected, atol=0.03 * float(jnp.abs(expected).max()))
    values = captured.gradients["values"].astype(np.float32).sum(1).reshape(len(found), -1)
    np.testing.assert_allclose(values, by_bias["v"], atol=0.03 * np.abs(values).max())


def test_weights_on_the_host_give_the_same(model, rows):
    host = model.replace(params=jax.tree.map(np.asarray, model.params))
    for a, b in zip(
        jax.tree.leaves(capture(model, rows, taps=4, seed=1, gradients=True)),
        jax.tree.leaves(capture(host, rows, taps=4, seed=1, gradients=True)),
        strict=True,
    ):
        np.testing.assert_array_equal(np.float32(a), np.float32(b))


def test_hidden_states_lead_from_the_embedding_to_the_logits(model, rows):
    states = capture_hidden(model, rows)
    assert states.shape == (4, 4, 16, model.config.hidden_size)
    np.testing.assert_array_equal(
        states[0], np.asarray(model.params.embed)[rows].astype(states.dtype)
    )
    logits = project(jnp.asarray(states[-1], jnp.float32), model.params, model.config)
    exact = forward(model.params, jnp.asarray(rows), model.config)
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


def bases(model, rotations, layer):
    """A of each site of one layer, as dense matrices over the site's whole input."""
    c = model.config
    r1, r4 = as_matrix(rotations.residual), as_matrix(rotations.down)
    r2, r3 = as_matrix(rotations.value)[layer], as_matrix(rotations.key)
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


def test_fisher_is_its_formula(model, captured):
    rotations, total = random_rotations(model.config, 2), 0.0
    for i in range(model.config.num_hidden_layers):
        for name, a in bases(model, rotations, i).items():
            x = captured.inputs[name][i].astype(np.float64)
            g = captured.gradients[name][i].astype(np.float64)
            y = (x.reshape(len(x), -1) @ a).reshape(x.shape)
            h = (g.reshape(len(x), -1) @ np.linalg.inv(a).T).reshape(x.shape)
            step, low, high = scales_of(y)
            error = step**2 / 12 + (y - np.clip(y, low, high)) ** 2
            total += (error * h**2).reshape(len(x), -1).sum(-1) @ captured.weight / 2
    loss = fisher(Learned(rotations), model.params, captured, model.config, W16A4)
    assert float(loss) == pytest.approx(total, rel=1e-4)


def test_fisher_foretells_kl(model, captured, rows):
    """Where rounding is fine, the estimate without running the network is what running it shows."""
    fine = Grid(6, "asymmetric")
    scheme = Scheme(Grid(), fine, fine, fine)
    foretold, seen = [], []
    for seed in range(4):
        learned = Learned(random_rotations(model.config, seed))
        foretold.append(float(fisher(learned, model.params, captured, model.config, scheme)))
        seen.append(float(kl(learned, model.params, jnp.asarray(rows), model.config, scheme)))
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
def test_whip_and_kurtosis_by_hand(model, objective, vector, each):
    learned, captured = Learned(Rotations()), by_hand(vector)
    config = replace(model.config, head_dim=4)
    loss = objective(learned, model.params, captured, config, W16A4)
    assert float(loss) == pytest.approx(3 * len(SITES) * each, rel=1e-5)
    fewer = replace(W16A4, keys=Grid(), overrides=(Override("layers.0.*", activations=16),))
    loss = objective(learned, model.params, captured, config, fewer)
    assert float(loss) == pytest.approx((1 + 5 + 5) * each, rel=1e-5)  # values; all but keys


@pytest.mark.parametrize("scheme", [W16A4, W4A4], ids=["w16", "w4"])
def test_reconstruction_is_its_formula(model, captured, scheme):
    config, rotations = model.config, random_rotations(model.config, 2)
    layers = model.params.layers
    turned = fuse(model.params, rotations, config)[0].layers if scheme.weights.on else layers
    q = rtn(model.params.replace(layers=turned), scheme).layers
    readers = {"qkv": "qkv", "o": ["o"], "gate_up": ["gate", "up"], "down": ["down"]}

    def rounded(y):
        step, low, _ = scales_of(y)
        zero = np.round(-low / step)
        return (np.clip(np.round(y / step) + zero, 0, 15) - zero) * step

    def weight(tree, name, i):
        return np.asarray(getattr(tree, name).weight[i], np.float64)

    total = 0.0
    for i in range(config.num_hidden_layers):
        a = bases(model, rotations, i)
        for site in SITES:
            x = captured.inputs[site][i, captured.first :].astype(np.float64)
            y = rounded((x.reshape(len(x), -1) @ a[site]).reshape(x.shape)).reshape(len(x), -1)
            x = x.reshape(len(x), -1)
            if site in ("keys", "values"):
                exact, found = x, y @ a[site].T
            else:
                exact = [x @ weight(layers, n, i) for n in readers[site]]
                if scheme.weights.on:
                    out = {"v": a["values"], "o": a["qkv"], "down": a["qkv"]}
                    pairs = zip(exact, readers[site], strict=True)
                    exact = [z @ out.get(n, np.eye(z.shape[1])) for z, n in pairs]
                    found = [y @ weight(q, n, i) for n in readers[site]]
                else:
                    found = [y @ a[site].T @ weight(layers, n, i) for n in readers[site]]
                exact, found = np.concatenate(exact, -1), np.concatenate(found, -1)
            total += np.square(found - exact).sum() / np.square(exact).sum()
    loss = reconstruction(Learned(rotations), model.params, captured, config, scheme)
    assert float(loss) == pytest.approx(total / config.num_hidden_layers, rel=5e-3)


# Objectives of layers and of the network


@pytest.mark.parametrize("scheme", [W16A4, W4A4], ids=["w16", "w4"])
def test_layer_reconstruction_sees_each_layer_alone(model, rows, scheme):
    config, learned = model.config, Learned(random_rotations(model.config, 0))
    states = jnp.asarray(capture_hidden(model, rows), jnp.float32)

    def loss(scheme):
        return float(layer_reconstruction(learned, model.params, states, config, scheme))

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


def test_kl_is_its_formula(model, rows):
    config, tokens = model.config, jnp.asarray(rows)
    learned = Learned(random_rotations(config, 0), mean_shifts(model, rows))
    exact = np.asarray(forward(model.params, tokens, config), np.float64)
    found = np.asarray(quantised_logits(learned, model.params, tokens, config, W4A4), np.float64)

    def softmax(x):
        p = np.exp(x - x.max(-1, keepdims=True))
        return p / p.sum(-1, keepdims=True)

    p, q = softmax(exact), softmax(found)
    loss = kl(learned, model.params, tokens, config, W4A4)
    assert float(loss) == pytest.approx((p * np.log(p / q)).sum(-1).mean(), rel=1e-4)
    assert abs(float(kl(learned, model.params, tokens, config, Scheme()))) < 1e-6
    best = np.argsort(-exact, axis=-1)[..., :5]
    p, q = (softmax(np.take_along_axis(x, best, -1)) for x in (exact, found))
    top = kl(learned, model.params, tokens, config, W4A4, top=5)
    assert float(top) == pytest.approx((p * np.log(p / q)).sum(-1).mean(), rel=1e-4)


def test_every_objective_feels_the_rotations_and_what_is_beside(model, captured, rows):
    from qrot.learn.objectives import OBJECTIVES

    config, layers = model.config, model.config.num_hidden_layers
    shapes = {"qkv": config.hidden_size, "down": config.intermediate_size}
    scales = Scales(**{n: jnp.zeros((layers, size)) for n, size in shapes.items()})
    learned = Learned(random_rotations(config, 0), None, None, scales)
    states = jnp.asarray(capture_hidden(model, rows))
    batches = {"tokens": jnp.asarray(rows), "hidden": states, "captured": captured}
    for name, objective in OBJECTIVES.items():
        gradient = jax.grad(objective.loss)(
            learned, model.params, batches[objective.batch], config, W16A4
        )
        assert jnp.abs(gradient.rotations.residual).max() > 0, name
        assert jnp.abs(gradient.rotations.value).max() > 0, name
        if objective.scales:
            assert jnp.abs(gradient.scales.qkv).max() > 0, name
            assert jnp.abs(gradient.scales.down).max() > 0, name
