"""Decoding with a cache, against the forward pass and against transformers' generate."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learned import ALL, put, some_clips, some_shifts
from models import VARIANTS

from qrot.grid import Grid
from qrot.model.decode import decode_step, empty_cache, generate
from qrot.model.forward import forward
from qrot.network import fold_norms, fuse
from qrot.rotation.random import random_rotations
from qrot.scheme import Override, Scheme

pytestmark = pytest.mark.usefixtures("quick_compile")
TOKENS = np.random.default_rng(7).integers(0, 97, (2, 12), np.int32)
A4KV4 = Scheme(activations=Grid(bits=4), keys=Grid(bits=4), values=Grid(bits=4, kind="asymmetric"))
MIXED = replace(
    A4KV4, overrides=(Override("layers.1.*", activations=16, keys=8), Override("*.down", None, 8))
)
decode = jax.jit(decode_step, static_argnames=("config", "scheme"))
run = jax.jit(forward, static_argnames=("config", "scheme"))


def relative(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.abs(a - b).max() / np.abs(b).max()


def in_steps(model, params=None, sizes=(1,) * TOKENS.shape[1], length=16, **options):
    """Logits of all tokens, fed in steps of these sizes."""
    params = params or model.params
    cache = empty_cache(model.config, len(TOKENS), length, params.embed.dtype)
    logits, start = [], 0
    for size in sizes:
        new = jnp.asarray(TOKENS[:, start : start + size])
        some, cache = decode(params, new, cache, model.config, **options)
        logits.append(np.asarray(some))
        start += size
    assert cache.position == start
    return np.concatenate(logits, axis=1)


def whole(model, params=None, **options):
    return run(params or model.params, jnp.asarray(TOKENS), model.config, **options)


@pytest.mark.parametrize("scheme", [None, A4KV4], ids=["plain", "A4KV4"])
@pytest.mark.parametrize("name", VARIANTS)
def test_step_by_step_it_is_the_forward_pass(variant, name, scheme):
    model = variant(name, "float64")
    with jax.enable_x64(True):
        assert relative(in_steps(model, scheme=scheme), whole(model, scheme=scheme)) < 1e-10


@pytest.mark.parametrize("name", ["llama-biases", "qwen2-window", "qwen3"])
def test_in_float32(variant, name):
    model = variant(name)
    assert relative(in_steps(model), whole(model)) < 1e-5
    # Through grids a last bit may decide between two levels; here none does.
    assert relative(in_steps(model, scheme=A4KV4), whole(model, scheme=A4KV4)) < 1e-5


def test_a_prompt_goes_in_at_once(variant):
    model = variant("mistral-window", "float64")
    with jax.enable_x64(True):
        expected = whole(model, scheme=MIXED)
        for sizes in [(12,), (7, 1, 4)]:
            assert relative(in_steps(model, sizes=sizes, scheme=MIXED), expected) < 1e-10


@pytest.mark.parametrize(("name", "fused"), [("llama-biases", True), ("qwen3", False)])
def test_with_all_that_goes_beside_the_weights(variant, name, fused):
    """Rotations, shifts, scales and clip ratios, in grids that differ by layer."""
    draw = np.random.default_rng(1)
    with jax.enable_x64(True):
        model = fold_norms(variant(name, "float64"))
        rotations, scales = put(model, ALL)
        shifts, clips = some_shifts(model, draw), some_clips(model, draw)
        params, options = model.params, {"rotations": rotations, "scales": scales}
        if fused:
            params, online, shifts = fuse(params, rotations, model.config, shifts, scales)
            options = {"rotations": online}
        options |= {"shifts": shifts, "clips": clips, "scheme": MIXED}
        expected = whole(model, params, **options)
        assert relative(in_steps(model, params, **options), expected) < 1e-10
        assert relative(expected, whole(model)) > 1e-2


def test_the_cache_holds_rounded_keys_and_values(variant):
    model = variant("llama")
    cache = empty_cache(model.config, 2, 12)
    _, cache = decode(model.params, jnp.asarray(TOKENS), cache, model.config, scheme=A4KV4)
    for kept in (cache.keys, cache.values):
        assert kept.shape == (3, 2, 12, 2, 12)
        heads = np.asarray(kept).reshape(-1, 12)
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
    found = generated(model, steps=16, temperature=0.0)
    np.testing.assert_array_equal(found, expected.numpy())


def generated(model, seed=0, prompt=TOKENS[:, :5], params=None, **options):
    key = jax.random.key(seed)
    return np.asarray(
        generate(params or model.params, jnp.asarray(prompt), key, model.config, **options)
    )


def test_greedy_is_a_chain_of_forward_passes(variant):
    """With rotations online, on grids; in float64, where no last bit decides."""
    with jax.enable_x64(True):
        model = fold_norms(variant("qwen3", "float64"))
        params, online, _ = fuse(model.params, random_rotations(model.config, 0), model.config)
        options = {"rotations": online, "scheme": A4KV4}
        found = generated(model, params=params, steps=6, temperature=0.0, **options)
        row = np.concatenate([TOKENS[:, :5], found], axis=1)
        logits = np.asarray(run(params, jnp.asarray(row), model.config, **options))
    np.testing.assert_array_equal(found, logits[:, 4:-1].argmax(-1))


def test_what_is_drawn_follows_the_predictions(variant):
    model, count = variant("llama"), 4000
    prompt = np.repeat(TOKENS[:1, :3], count, axis=0)
    logits = forward(model.params, jnp.asarray(prompt[:1]), model.config)[0, -1]
    for options, kept in [({}, 97), ({"temperature": 0.5}, 97), ({"top_k": 3}, 3)]:
        found = generated(model, prompt=prompt, steps=1, **options)[:, 0]
        shares = np.bincount(found, minlength=97) / count
        scaled = np.asarray(logits, np.float64) / options.get("temperature", 1)
        scaled = np.where(np.argsort(np.argsort(-scaled)) < kept, scaled, -np.inf)
        expected = np.exp(scaled - scaled.max())
        expected /= expected.sum()
        spread = np.sqrt(expected * (1 - expected) / count)
        assert (np.abs(shares - expected) <= 5 * spread + 1e-9).all()
        assert (shares[expected == 0] == 0).all()


def test_draws_are_by_key_and_temperature_by_step(variant):
    model = variant("llama")

    def draw(heat, seed=0):
        heat = np.broadcast_to(np.float32(heat), (2, 10))
        return generated(model, seed, steps=10, temperature=heat)

    np.testing.assert_array_equal(draw(1), draw(1))
    assert (draw(1) != draw(1, seed=1)).any()
    greedy, heat = draw(0), np.ones((2, 10))
    np.testing.assert_array_equal(greedy, draw(0, seed=1))
    heat[0, :4], heat[1, :7] = 0, 0
    found, other = draw(heat), draw(heat, seed=1)
    for row, first in ((0, 4), (1, 7)):
        np.testing.assert_array_equal(found[row, :first], greedy[row, :first])
        assert (found[row, first:] != other[row, first:]).any()


def test_one_compilation_for_all_prompts_of_a_shape(variant):
    model, before = variant("llama"), generate._cache_size()
    for i, heat in enumerate((0.0, 0.3, 0.7)):
        generated(model, i, TOKENS[:, i : i + 5], steps=3, temperature=heat)
    assert generate._cache_size() == before + 1


def test_in_bfloat16(variant):
    model = variant("llama")
    cache = empty_cache(model.config, 2, 12, jnp.bfloat16)
    logits, cache = decode(model.params, jnp.asarray(TOKENS), cache, model.config)
    assert logits.dtype == cache.keys.dtype == jnp.bfloat16
    assert 1e-4 < relative(np.asarray(logits, np.float32), whole(model)) < 0.1
    assert generated(model, steps=2, dtype=jnp.bfloat16).shape == (2, 2)
