"""Decoding with a cache, against the forward pass and against transformers' generate."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learned import ALL, put, some_clips, some_shifts
from models import VARIANTS

from qrot.errors import InputError
from qrot.grid import Grid
from qrot.model.decode import decode_step, empty_cache, generate
from qrot.model.forward import forward
from qrot.network import fold, fuse
from qrot.rotation.random import random_rotations
from qrot.rotation.transform import Transform
from qrot.scheme import Override, Scheme

pytestmark = pytest.mark.usefixtures("quick_compile")
TOKENS = np.random.default_rng(7).integers(0, 97, (2, 12), np.int32)
A4KV4 = Scheme(activations=Grid(bits=4), keys=Grid(bits=4), values=Grid(bits=4, kind="asymmetric"))
MIXED = replace(
    A4KV4, overrides=(Override("layers.1.*", activations=16, keys=8), Override("*.down", None, 8))
)
decode, run = jax.jit(decode_step), jax.jit(forward)


def relative(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.abs(a - b).max() / np.abs(b).max()


def in_steps(network, sizes=(1,) * TOKENS.shape[1], length=16):
    """Logits of all tokens, fed in steps of these sizes."""
    cache = empty_cache(network, len(TOKENS), length)
    logits, start = [], 0
    for size in sizes:
        some, cache = decode(network, jnp.asarray(TOKENS[:, start : start + size]), cache)
        logits.append(np.asarray(some))
        start += size
    assert cache.position == start
    return np.concatenate(logits, axis=1)


def whole(network):
    return run(network, jnp.asarray(TOKENS))


@pytest.mark.parametrize("scheme", [Scheme(), A4KV4], ids=["plain", "A4KV4"])
@pytest.mark.parametrize("name", VARIANTS)
def test_step_by_step_it_is_the_forward_pass(variant, name, scheme):
    network = variant(name, "float64").network.replace(scheme=scheme)
    with jax.enable_x64(True):
        assert relative(in_steps(network), whole(network)) < 1e-10


@pytest.mark.parametrize("name", ["llama-biases", "qwen2-window", "qwen3"])
def test_in_float32(variant, name):
    network = variant(name).network
    assert relative(in_steps(network), whole(network)) < 1e-5
    # Through grids a last bit may decide between two levels; here none does.
    rounding = network.replace(scheme=A4KV4)
    assert relative(in_steps(rounding), whole(rounding)) < 1e-5


def test_a_prompt_goes_in_at_once(variant):
    network = variant("mistral-window", "float64").network.replace(scheme=MIXED)
    with jax.enable_x64(True):
        expected = whole(network)
        for sizes in [(12,), (7, 1, 4)]:
            assert relative(in_steps(network, sizes), expected) < 1e-10


@pytest.mark.parametrize(("name", "fused"), [("llama-biases", True), ("qwen3", False)])
def test_with_all_that_goes_beside_the_weights(variant, name, fused):
    """Rotations, shifts, scales and clip ratios, in grids that differ by layer."""
    draw = np.random.default_rng(1)
    with jax.enable_x64(True):
        plain = fold(variant(name, "float64").network)
        transform = put(plain, ALL)
        shifts, clips = some_shifts(plain, draw), some_clips(plain, draw)
        transform = transform.replace(shifts=shifts, clips=clips)
        network = fuse(plain, transform) if fused else plain.replace(online=transform)
        network = network.replace(scheme=MIXED)
        expected = whole(network)
        assert relative(in_steps(network), expected) < 1e-10
        assert relative(expected, whole(plain)) > 1e-2


@pytest.mark.parametrize("packed", [False, True])
def test_what_looks_at_all_tokens_at_once_is_refused(variant, packed):
    """The outliers of the tokens so far are not those of the whole text: 1e-2 of the logits."""
    network = variant("llama").network.replace(scheme=Scheme(activations=Grid(8, threshold=6.0)))
    whole(network)  # which is no trouble
    sentence = "activations.threshold looks for outliers in all tokens .* does not write token by"
    with pytest.raises(InputError, match=sentence):
        empty_cache(network, 2, 12, packed=packed)
    with pytest.raises(InputError, match=sentence):
        generate(network, jnp.asarray(TOKENS), jax.random.key(0), steps=2, packed=packed)
    off = replace(network.scheme, overrides=(Override("*", activations=16),))
    assert in_steps(network.replace(scheme=off)).shape == (2, 12, 97)


def test_the_cache_holds_rounded_keys_and_values(variant):
    network = variant("llama").network.replace(scheme=A4KV4)
    _, cache = decode(network, jnp.asarray(TOKENS), empty_cache(network, 2, 12))
    for entries in (cache.keys, cache.values):
        assert entries.shape == (3, 2, 12, 2, 12)
        heads = np.asarray(entries).reshape(-1, 12)
        assert max(len(np.unique(head)) for head in heads) > 4
        assert max(len(np.unique(np.round(head, 5))) for head in heads) <= 12
        steps = np.sort(heads, axis=1)
        gaps = np.diff(steps, axis=1)
        smallest = np.where(gaps > 1e-5, gaps, np.inf).min(1)
        span = (steps[:, -1] - steps[:, 0]) / smallest
        assert span.max() < 15.1  # no more than 16 levels


@pytest.mark.parametrize("name", ["llama-biases", "mistral-window", "qwen3-window"])
def test_greedy_is_that_of_transformers(variant, name):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = variant(name)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        model.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    oracle.generation_config.eos_token_id = None  # it would forbid the token, or stop at it
    prompt = torch.tensor(TOKENS[:, :5], dtype=torch.long)
    expected = oracle.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        generation_config=transformers.GenerationConfig(
            do_sample=False, max_new_tokens=16, pad_token_id=0
        ),
    )[:, 5:]
    found = generated(model.network, steps=16, temperature=0.0)
    np.testing.assert_array_equal(found, expected.numpy())


def generated(network, seed=0, prompt=TOKENS[:, :5], **options):
    key = jax.random.key(seed)
    return np.asarray(generate(network, jnp.asarray(prompt), key, **options))


def test_greedy_is_a_chain_of_forward_passes(variant):
    """With rotations online, on grids; in float64, where no last bit decides."""
    with jax.enable_x64(True):
        folded = fold(variant("qwen3", "float64").network)
        transform = Transform(random_rotations(folded.config, 0))
        network = fuse(folded, transform).replace(scheme=A4KV4)
        found = generated(network, steps=6, temperature=0.0)
        row = np.concatenate([TOKENS[:, :5], found], axis=1)
        logits = np.asarray(run(network, jnp.asarray(row)))
    np.testing.assert_array_equal(found, logits[:, 4:-1].argmax(-1))


def test_what_is_drawn_follows_the_predictions(variant):
    network, count = variant("llama").network, 4000
    prompt = np.repeat(TOKENS[:1, :3], count, axis=0)
    logits = forward(network, jnp.asarray(prompt[:1]))[0, -1]
    for options, likely in [({}, 97), ({"temperature": 0.5}, 97), ({"top_k": 3}, 3)]:
        found = generated(network, prompt=prompt, steps=1, **options)[:, 0]
        shares = np.bincount(found, minlength=97) / count
        scaled = np.asarray(logits, np.float64) / options.get("temperature", 1)
        scaled = np.where(np.argsort(np.argsort(-scaled)) < likely, scaled, -np.inf)
        expected = np.exp(scaled - scaled.max())
        expected /= expected.sum()
        spread = np.sqrt(expected * (1 - expected) / count)
        assert (np.abs(shares - expected) <= 5 * spread + 1e-9).all()
        assert (shares[expected == 0] == 0).all()


def test_draws_are_by_key_and_temperature_by_step(variant):
    network = variant("llama").network

    def draw(temperature, seed=0):
        temperature = np.broadcast_to(np.float32(temperature), (2, 10))
        return generated(network, seed, steps=10, temperature=temperature)

    np.testing.assert_array_equal(draw(1), draw(1))
    assert (draw(1) != draw(1, seed=1)).any()
    greedy, each = draw(0), np.ones((2, 10))
    np.testing.assert_array_equal(greedy, draw(0, seed=1))
    each[0, :4], each[1, :7] = 0, 0
    found, other = draw(each), draw(each, seed=1)
    for row, first in ((0, 4), (1, 7)):
        np.testing.assert_array_equal(found[row, :first], greedy[row, :first])
        assert (found[row, first:] != other[row, first:]).any()


def test_one_compilation_for_all_prompts_of_a_shape(variant):
    network, before = variant("llama").network, generate._cache_size()
    for i, temperature in enumerate((0.0, 0.3, 0.7)):
        generated(network, i, TOKENS[:, i : i + 5], steps=3, temperature=temperature)
    assert generate._cache_size() == before + 1


def test_in_bfloat16(variant):
    network = variant("llama").network
    cache = empty_cache(network, 2, 12, jnp.bfloat16)
    logits, cache = decode(network, jnp.asarray(TOKENS), cache)
    assert logits.dtype == cache.keys.dtype == jnp.bfloat16
    assert 1e-4 < relative(np.asarray(logits, np.float32), whole(network)) < 0.1
    assert generated(network, steps=2, dtype=jnp.bfloat16).shape == (2, 2)
