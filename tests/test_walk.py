"""The way through the layers, forwards and backwards, against the whole network at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learned import ALL, put, some_shifts
from looked import site_inputs

from qrot.calibrate.capture import capture, capture_hidden
from qrot.calibrate.moments import change_layers, gather_layers, outputs
from qrot.calibrate.walk import backwards, forwards, predicted_gradients, pull
from qrot.errors import InputError
from qrot.grid import Grid
from qrot.model.forward import embedded, forward, layer_context, project, windows
from qrot.model.layer import decoder_layer, rope_table
from qrot.network import fold, fuse
from qrot.rotation.transform import Transform, of_layer
from qrot.scheme import Scheme, layer_scheme
from qrot.sites import INPUTS, PROJECTIONS, SITES

pytestmark = pytest.mark.usefixtures("quick_compile")
ROWS = np.random.default_rng(3).integers(0, 97, (3, 10), np.int32)
NAMES = tuple(SITES)
VARIANTS = ["llama-biases", "qwen3-window"]


def relative(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.abs(a - b).max() / np.abs(b).max()


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def fused(variant, x64):
    """(name) -> a network in float64 with everything fused, on grids that a walk leaves aside."""

    def make(name):
        network = fold(variant(name, "float64").network)
        shifts = some_shifts(network, np.random.default_rng(0))
        fused = fuse(network, put(network, ALL).replace(shifts=shifts))
        return fused.replace(scheme=Scheme(activations=Grid(2), keys=Grid(2)))

    return make


def plain(network):
    return network.replace(scheme=Scheme())


@pytest.mark.parametrize("name", VARIANTS)
def test_forwards_is_the_forward_pass(fused, name):
    network, steps, indices = fused(name), [], []

    def visit(place):
        indices.append(place.index)
        return outputs(place)

    last = forwards(network, ROWS, visit, advance=lambda: steps.append(None))
    assert [h.shape for h in last] == [(2, 10, 48), (1, 10, 48)]
    found = project(network, jnp.asarray(np.concatenate(last)))
    assert relative(found, forward(plain(network), jnp.asarray(ROWS))) < 1e-12
    assert indices == [0, 1, 2]
    assert len(steps) == 3


def perturbed(network, hidden, changes):
    """Logits with something added at every site of every layer, by hand; not scanned."""
    config, grids = network.config, layer_scheme(Scheme(), 0)
    rope, limits = rope_table(config, hidden.shape[1], hidden.dtype), windows(config)
    for i in range(config.num_hidden_layers):
        layer, window = jax.tree.map(lambda x: x[i], (network.params.layers, limits))  # noqa: B023
        context = layer_context(network, of_layer(network.online, i), window, rope, grids)

        def hook(name, x, i=i):
            return x + changes[i][name] if name in changes[i] else x

        hidden = decoder_layer(hidden, layer, context, hook=hook)
    return project(network, hidden)


@pytest.mark.parametrize("name", VARIANTS)
def test_backwards_is_the_derivative(fused, name):
    """At every site, by what enters, and by what a projection writes: against jax.grad."""
    network = plain(fused(name))
    wrt = (*NAMES, *(f"{name}_output" for name in PROJECTIONS))
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(*ROWS.shape, 97)))
    entered, found = [], {}

    def forth(place):
        entered.append(place.hidden)
        return outputs(place)

    def loss(hidden, changes):
        return (perturbed(network, hidden, changes) * weights).sum()

    def back(place, gradients):
        options = {"names": NAMES, "wrt": wrt, "statistic": both}
        done = [
            pull(h, g, place.layer, place.context, **options)
            for h, g in zip(place.hidden, gradients, strict=True)
        ]
        found[place.index] = [statistic for _, statistic in done]
        return [np.asarray(g) for g, _ in done]

    last = forwards(network, ROWS, forth)
    to_last = jax.grad(lambda h: (project(network, h) * weights).sum())(np.concatenate(last))
    parts = [np.asarray(to_last[:2]), np.asarray(to_last[2:])]
    to_first = np.concatenate(backwards(network, entered, parts, back))

    shapes = {name: (3, *x.shape[1:]) for name, x in found[0][0][1].items()}
    none = [{name: jnp.zeros(shape) for name, shape in shapes.items()} for _ in range(3)]
    hidden = embedded(network, jnp.asarray(ROWS))
    expected, by_site = jax.jit(jax.grad(loss, (0, 1)))(hidden, none)
    assert relative(to_first, expected) < 1e-10
    _, inputs = site_inputs(network, jnp.asarray(ROWS))
    for i in range(3):
        assert by_site[i].keys() == set(wrt)
        for site, derivative in by_site[i].items():
            taken = np.concatenate([gradients[site] for _, gradients in found[i]])
            assert relative(taken, derivative) < 1e-10
        for site, x in inputs.items():
            seen = np.concatenate([seen[site] for seen, _ in found[i]])
            assert relative(seen.reshape(x[i].shape), x[i]) < 1e-10


def both(seen, gradients):
    return seen, gradients


def test_what_is_not_fused_is_refused(variant):
    network = fold(variant("llama").network)
    online = Transform(clips={"o": jnp.ones(3)})
    with pytest.raises(ValueError, match="fuse first"):
        forwards(network.replace(online=online), ROWS, outputs)
    # Nothing on it is nothing to be fused.
    found = forwards(network.replace(online=Transform()), ROWS, outputs)
    for a, b in zip(found, forwards(network, ROWS, outputs), strict=True):
        np.testing.assert_array_equal(a, b)


def test_parameters_may_be_on_the_host(variant):
    network = variant("qwen2-window").network
    host = jax.tree.map(np.asarray, network)
    for a, b in zip(*(forwards(n, ROWS, outputs) for n in (network, host)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_derivatives_of_what_is_predicted(variant, x64):
    """Softmax less what was drawn, through norm and head; the same seed draws the same tokens."""
    network = variant("llama", "float64").network
    hidden = [np.random.default_rng(0).normal(size=(2, 5, 48))]
    (once,), (again,), (other,) = (predicted_gradients(network, hidden, s) for s in (0, 0, 1))
    np.testing.assert_array_equal(once, again)
    assert relative(other, once) > 0.1
    logits, pulled = jax.vjp(lambda h: project(network, h), jnp.asarray(hidden[0]))
    share = np.asarray(jax.nn.softmax(logits))
    # What was drawn is the token whose one-hot row explains the derivative.
    for batch in range(2):
        for token in range(5):
            errors = []
            for drawn in range(97):
                g = np.zeros(logits.shape)
                g[batch, token] = share[batch, token] - np.eye(97)[drawn]
                errors.append(
                    np.abs(pulled(jnp.asarray(g))[0][batch, token] - once[batch, token]).max()
                )
            assert min(errors) < 1e-12


def test_moments_are_those_of_all_tokens(fused):
    network, found = fused("llama-biases"), {}
    gather_layers(network, ROWS, INPUTS, found.__setitem__)
    _, inputs = site_inputs(plain(network), jnp.asarray(ROWS))
    assert list(found) == [0, 1, 2]
    for i, moments in found.items():
        for site in INPUTS:
            x = inputs[site][i]
            assert relative(moments[site].hessian, x.T @ x) < 1e-12
            assert relative(moments[site].largest, np.abs(x).max(0)) < 1e-12
            assert relative(moments[site].mean, np.abs(x).mean(0)) < 1e-12
    gather_layers(network, ROWS, ("o",), found.__setitem__, hessians=False)
    assert found[2].keys() == {"o"}
    assert found[2]["o"].hessian is None


@pytest.mark.parametrize("through_changed", [True, False])
def test_a_changed_layer_is_what_the_next_one_reads(variant, through_changed):
    network, seen = variant("llama").network, []

    def change(i, layer, moments):
        seen.append(moments["qkv"].mean)
        return layer.replace(up=layer.up.replace(weight=2 * layer.up.weight))

    options = {"sites": [("qkv",)] * 3, "through_changed": through_changed}
    changed = change_layers(network, ROWS, change, **options)
    up = network.params.layers.up.weight
    np.testing.assert_array_equal(changed.params.layers.up.weight, 2 * up)
    _, inputs = site_inputs(changed if through_changed else network, jnp.asarray(ROWS))
    np.testing.assert_allclose(seen, np.abs(inputs["qkv"]).mean(1), rtol=1e-5)


def test_what_is_not_finite_is_refused(variant):
    network = variant("llama").network
    layers = network.params.layers
    broken = layers.replace(o=layers.o.replace(weight=layers.o.weight.at[1].set(jnp.inf)))
    network = network.replace(params=network.params.replace(layers=broken))
    sentence = "calibration: the input of gate_up in layer 1 is not finite"
    with pytest.raises(InputError, match=sentence):
        gather_layers(network, ROWS, INPUTS, lambda i, moments: None)


def test_what_is_captured_is_what_sites_read(variant):
    network = variant("llama-biases").network
    captured, means = capture(network, ROWS, vectors=4, seed=0, gradients=True)
    _, inputs = site_inputs(network, jnp.asarray(ROWS))
    assert captured.first == len(ROWS)
    assert captured.weight.sum() == pytest.approx(1)
    for site, x in inputs.items():
        whole = x.reshape(3, *ROWS.shape, *x.shape[2:])
        taken = np.asarray(captured.inputs[site], np.float32)
        assert taken.shape == captured.gradients[site].shape == (3, 12, *x.shape[2:])
        assert relative(taken[:, :3], whole[:, :, 0]) < 2**-8  # bfloat16
        for i in range(3, 12):  # each of the others is a token of its window, not the first
            apart = np.abs(taken[:, None, i] - whole[:, (i - 3) // 3, 1:]).max(
                axis=(0, *range(2, x.ndim))
            )
            assert apart.min() < 2**-8 * np.abs(whole).max()
        if site in INPUTS:
            assert relative(means[site], whole[:, :, 1:].mean((1, 2))) < 1e-5
    assert means.keys() == set(INPUTS)
    without, same = capture(network, ROWS, vectors=4, seed=0)
    assert without.gradients is None
    for a, b in zip(*map(jax.tree.leaves, (without.inputs, captured.inputs)), strict=True):
        np.testing.assert_array_equal(a, b)
    for site in INPUTS:
        assert relative(same[site], means[site]) < 1e-6


def test_hidden_states_are_those_between_the_layers(variant):
    network = variant("mistral").network
    states = capture_hidden(network, ROWS)
    assert states.shape == (4, *ROWS.shape, 48)
    assert relative(states[0], embedded(network, jnp.asarray(ROWS))) < 2**-8
    logits = forward(network, jnp.asarray(ROWS))
    assert relative(project(network, jnp.asarray(states[-1], jnp.float32)), logits) < 0.05
