"""The forward pass, against transformers and against arithmetic by hand."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from looked import site_inputs
from models import VARIANTS

from qrot.grid import Grid
from qrot.model.forward import forward
from qrot.model.layer import rms_norm
from qrot.rotation.random import random_rotations
from qrot.rotation.transform import Transform
from qrot.scheme import Override, Scheme
from qrot.sites import SITES

pytestmark = pytest.mark.usefixtures("quick_compile")
TOKENS = np.random.default_rng(7).integers(0, 97, (2, 24))
A4KV4 = Scheme(activations=Grid(bits=4), keys=Grid(bits=4), values=Grid(bits=4))


def run(model, tokens=TOKENS, dtype=None, **changes):
    return forward(model.network.replace(**changes), jnp.asarray(tokens), dtype=dtype)


def look(model, **changes):
    return site_inputs(model.network.replace(**changes), jnp.asarray(TOKENS))


def relative(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.abs(a - b).max() / np.abs(b).max()


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_transformers(variant, name):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = variant(name)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        model.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        expected = oracle(torch.tensor(TOKENS)).logits.numpy()
    assert relative(run(model), expected) < 1e-5


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mistral-window", {"sliding_window": None}),
        ("qwen3-window", {"sliding_window": (4, 4, 4)}),
        ("llama-rope-llama3", {"rope_scaling": None}),
        ("llama-rope-linear", {"rope_scaling": None}),
    ],
)
def test_every_switch_of_the_configuration_is_felt(variant, name, change):
    model = variant(name)
    changed = replace(model.network.config, **change)
    assert relative(run(model, config=changed), run(model)) > 1e-2


def test_no_token_sees_the_future(variant):
    model, changed = variant("llama"), TOKENS.copy()
    changed[:, 10] = (changed[:, 10] + 1) % 97
    after, before = run(model, changed), run(model)
    np.testing.assert_array_equal(after[:, :10], before[:, :10])
    assert relative(after[:, 10:], before[:, 10:]) > 1e-2


def test_remat_changes_neither_logits_nor_gradients(variant):
    network = variant("qwen3").network.replace(scheme=A4KV4)

    def loss(embed, remat):
        changed = network.replace(params=network.params.replace(embed=embed))
        logits = forward(changed, jnp.asarray(TOKENS), remat=remat)
        return jax.nn.logsumexp(logits, axis=-1).mean()

    (plain, g), (again, h) = (
        jax.value_and_grad(loss)(network.params.embed, remat) for remat in (False, True)
    )
    assert relative(again, plain) < 1e-6
    assert relative(h, g) < 1e-4


def test_compute_in_bfloat16(variant):
    model = variant("llama-biases")
    logits = run(model, dtype=jnp.bfloat16)
    assert logits.dtype == jnp.bfloat16
    assert 1e-4 < relative(logits.astype(jnp.float32), run(model)) < 0.1


def test_a_hook_sees_the_input_of_every_site(variant):
    model = variant("llama-biases")
    some = np.array([1, 30, 5])
    logits, seen = look(model)
    np.testing.assert_array_equal(logits, run(model))
    seen = {site: x[:, some] for site, x in seen.items()}
    assert {name: x.shape for name, x in seen.items()} == {
        "qkv": (3, 3, 48),
        "o": (3, 3, 48),
        "gate_up": (3, 3, 48),
        "down": (3, 3, 56),
        "keys": (3, 3, 2, 12),
        "values": (3, 3, 2, 12),
    }
    params = model.network.params
    layers = params.layers
    x = np.asarray(params.embed)[TOKENS.ravel()[some]]
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * np.asarray(layers.attention_norm[0])
    np.testing.assert_allclose(seen["qkv"][0], x, rtol=1e-5, atol=1e-6)
    v = x @ np.asarray(layers.v.weight[0]) + np.asarray(layers.v.bias[0])
    np.testing.assert_allclose(seen["values"][0], v.reshape(3, 2, 12), rtol=1e-4, atol=1e-5)
    y = np.asarray(seen["gate_up"])
    gate, up = (
        np.einsum("lti,lio->lto", y, linear.weight) + np.asarray(linear.bias)[:, None]
        for linear in (layers.gate, layers.up)
    )
    np.testing.assert_allclose(seen["down"], gate / (1 + np.exp(-gate)) * up, rtol=1e-4, atol=1e-5)


def test_a_hook_sees_nothing_of_rotations_that_are_not_fused(variant):
    model = variant("qwen2")
    rotations = Transform(random_rotations(model.network.config, 0))
    plain, rotated = look(model), look(model, online=rotations)
    for a, b in zip(jax.tree.leaves(rotated), jax.tree.leaves(plain), strict=True):
        assert relative(a, b) < 1e-5


def test_overrides_to_16_bits_switch_the_scheme_off(variant):
    model = variant("mistral")
    off = replace(A4KV4, overrides=(Override("*", activations=16, keys=16, values=16),))
    assert relative(run(model, scheme=off), run(model)) < 1e-6
    assert relative(run(model, scheme=A4KV4), run(model)) > 1e-2


def test_an_override_acts_on_its_layer_only(variant):
    model = variant("mistral")
    one = Scheme(overrides=(Override("layers.1.*", activations=4, keys=4, values=4),))
    others = Override("layers.[02].*", activations=16, keys=16, values=16)
    _, plain = look(model)
    logits, seen = look(model, scheme=one)
    same = {
        site: [relative(seen[site][i], plain[site][i]) < 1e-6 for i in range(3)] for site in SITES
    }
    assert same == {site: [True, False, False] for site in SITES} | {"qkv": [True, True, False]}
    assert relative(run(model, scheme=replace(A4KV4, overrides=(others,))), logits) < 1e-6


@pytest.mark.parametrize(
    ("match", "role", "changed"),
    [
        ("layers.1.down", "activations", {"next"}),
        ("layers.1.o", "activations", {"gate_up", "down", "next"}),
        ("layers.1.keys", "keys", {"o", "gate_up", "down", "next"}),
        ("layers.1.values", "values", {"o", "gate_up", "down", "next"}),
        ("layers.1.[qkv]", "activations", {"keys", "values", "o", "gate_up", "down", "next"}),
        ("layers.1.*", "weights", set()),  # weights are rounded before, not here
    ],
)
def test_each_grid_sits_at_its_site(variant, match, role, changed):
    model = variant("mistral")
    _, plain = look(model)
    scheme = Scheme(overrides=(Override(match, **{role: 4}),))
    _, seen = look(model, scheme=scheme)
    after = {site for site in SITES if relative(seen[site][1], plain[site][1]) > 1e-6}
    if relative(seen["qkv"][2], plain["qkv"][2]) > 1e-6:
        after.add("next")
    assert after == changed


def test_a_norm_without_scale_commutes_with_a_rotation():
    draw = np.random.default_rng(0)
    with jax.enable_x64(True):
        x, one = jnp.asarray(draw.standard_normal((50, 96))), jnp.ones(96)
        turn = jnp.asarray(np.linalg.qr(draw.standard_normal((96, 96)))[0])
        first, last = rms_norm(x, one, 1e-5) @ turn, rms_norm(x @ turn, one, 1e-5)
        np.testing.assert_allclose(first, last, atol=1e-14)
        uneven = jnp.linspace(0.5, 2, 96)  # what makes folding the scales necessary
        first, last = rms_norm(x, uneven, 1e-5) @ turn, rms_norm(x @ turn, uneven, 1e-5)
        assert jnp.abs(first - last).max() > 0.1
