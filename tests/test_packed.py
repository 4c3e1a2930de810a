"""Integers in place of fake quantisation: products, caches and whole models against the latter."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from learned import ALL, put, some_clips, some_shifts

from qrot.errors import InputError
from qrot.grid import Grid, fake_quantise
from qrot.integers import Quantised, dequantise, quantise
from qrot.kernels.kv4 import PackedHeads
from qrot.kernels.matmul import int4_matmul, int8_matmul
from qrot.kernels.pack import pack_int4, unpack_int4
from qrot.model.decode import decode_step, empty_cache, generate
from qrot.model.forward import forward
from qrot.model.params import PackedLinear
from qrot.network import fold, fuse
from qrot.quantize.gptq import gptq
from qrot.quantize.pack import linear_bytes, pack
from qrot.quantize.rtn import rtn
from qrot.rotation.transform import Transform
from qrot.scheme import Override, Scheme
from qrot.sites import PROJECTIONS

pytestmark = pytest.mark.usefixtures("quick_compile")
TOKENS = np.random.default_rng(7).integers(0, 97, (2, 12), np.int32)
W4, A4, A8 = Grid(4, clip="mse"), Grid(4, "asymmetric"), Grid(8, "asymmetric")
SCHEMES = {
    "W4A4KV4": Scheme(W4, A4, A4, A4),
    "W4A8KV8 by groups": Scheme(Grid(4, "symmetric_half", "group", 4), A8, A8, A8),
    "W8A8 symmetric": Scheme(Grid(8), Grid(8), Grid(8), Grid(4)),
    "W4A16": Scheme(W4),
    "W3A7 by tensor": Scheme(Grid(3, granularity="tensor"), Grid(7, "asymmetric", "tensor")),
    "no integers": Scheme(
        Grid(8, granularity="group", group=4), Grid(4, granularity="group", group=4)
    ),
    "mixed": Scheme(
        W4, A4, A4, A4, (Override("layers.1.*", 8, 8, 3, 16), Override("*.down", None, 8))
    ),
}
run, decode = jax.jit(forward), jax.jit(decode_step)


def relative(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.abs(a - b).max() / np.abs(b).max()


def both(model, scheme, seed=1, names=ALL):
    """Everything on a model: (the fake-quantised network, the packed one)."""
    draw = np.random.default_rng(seed)
    network = fold(model.network)
    transform = put(network, names)
    transform = transform.replace(
        shifts=some_shifts(network, draw), clips=some_clips(network, draw)
    )
    rounded = rtn(fuse(network, transform).replace(scheme=scheme))
    return rounded, pack(rounded)


@pytest.mark.parametrize("kind", ["symmetric", "symmetric_half", "asymmetric"])
@pytest.mark.parametrize("granularity", ["tensor", "token", "head", "group", "channel"])
@pytest.mark.parametrize("bits", [2, 4, 7, 8])
def test_integers_stand_for_what_fake_quantisation_returns(kind, granularity, bits):
    draw = np.random.default_rng(bits)
    shape, axis = ((5, 8), -2) if granularity == "channel" else ((2, 3, 2, 8), -1)
    x = jnp.asarray(draw.normal(size=shape) ** 3, jnp.float32).at[0].set(0)
    grid = Grid(bits, kind, granularity, 4 if granularity == "group" else None, 0.9)
    found = quantise(x, grid, axis=axis)
    assert found.codes.dtype == jnp.int8
    half = 2 ** (bits - 1)
    for part in jax.tree.leaves((found.codes, found.zero)):
        assert int(part.min()) >= -half
        assert int(part.max()) < half
    expected = fake_quantise(x, grid, axis=axis)
    np.testing.assert_array_equal(dequantise(found, axis=axis), expected)


def test_what_is_no_integer_grid():
    x = jnp.ones((2, 8))
    for grid in [Grid(9), Grid(8, threshold=6.0)]:
        with pytest.raises(ValueError, match="no integer"):
            quantise(x, grid)
    with pytest.raises(InputError, match="does not divide 8"):
        quantise(x, Grid(4, granularity="group", group=3))


@given(st.lists(st.integers(-8, 7), min_size=8, max_size=8), st.sampled_from([0, 1, -1]))
@settings(deadline=None)
def test_two_codes_a_byte(codes, axis):
    q = jnp.asarray(codes, jnp.int8).reshape(2, 4)
    packed = pack_int4(q, axis=axis)
    np.testing.assert_array_equal(unpack_int4(packed, axis=axis), q)
    assert packed.size == 4
    first, second = np.split(np.asarray(codes).reshape(2, 4), 2, axis)
    np.testing.assert_array_equal(
        np.asarray(packed).view(np.uint8), (first & 15) + 16 * (second & 15)
    )


def test_an_odd_axis_is_not_packed():
    with pytest.raises(InputError, match="axis of 3"):
        pack_int4(jnp.zeros((2, 3), jnp.int8))


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("tokens", [1, 5])
def test_products_are_those_of_integers(groups, bits, tokens):
    draw = np.random.default_rng(groups)
    size, out, half = 16, 7, 2 ** (bits - 1)
    q = draw.integers(-128, 128, (tokens, groups * size))
    w = draw.integers(-half, half, (groups, size, out))
    zero, s = draw.integers(-128, 128, (tokens, 1)), draw.uniform(0.5, 2, (tokens, 1))
    scale = draw.uniform(0.5, 2, (groups, out))
    exact = (s * (q - zero)) @ (w * scale[:, None]).reshape(-1, out)
    codes = jnp.asarray(w, jnp.int8)
    product, stored = (int4_matmul, pack_int4(codes, axis=1)) if bits == 4 else (int8_matmul, codes)
    with jax.enable_x64(True):
        x = Quantised(jnp.asarray(q, jnp.int8), jnp.asarray(s), jnp.asarray(zero, jnp.int8))
        sums = jnp.asarray(w.sum(1), jnp.int32)
        found = product(x, stored, jnp.asarray(scale), sums, dtype=jnp.float64)
        np.testing.assert_allclose(found, exact, rtol=1e-12, atol=1e-9)
        plain = x.replace(zero=None)
        found = product(plain, stored, jnp.asarray(scale), dtype=jnp.float64)
        expected = (s * q) @ (w * scale[:, None]).reshape(-1, out)
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-9)
        found = product(jnp.asarray(s * q), stored, jnp.asarray(scale), dtype=jnp.float64)
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "scheme"), [*(("llama-biases", scheme) for scheme in SCHEMES), ("qwen3", "W4A4KV4")]
)
def test_a_packed_model_is_the_fake_quantised_one(variant, name, scheme):
    """In float64, where no last bit decides between two levels."""
    chosen, model = SCHEMES[scheme], variant(name, "float64")
    # R4 learned, or a fast transform that is rounded in one pass
    names = ALL if name == "llama-biases" else [n for n in ALL if n != "rotation down"]
    with jax.enable_x64(True):
        rounded, packed = both(model, chosen, names=names)
        assert isinstance(packed.params.layers.down, PackedLinear)
        expected = run(rounded, jnp.asarray(TOKENS))
        found = run(packed, jnp.asarray(TOKENS))
        assert relative(found, expected) < 1e-10
        # and through a packed cache, a prompt first
        cache = empty_cache(packed, 2, 16, jnp.float64, packed=True)
        parts = []
        for some in np.split(TOKENS, [7], axis=1):
            logits, cache = decode(packed, jnp.asarray(some), cache)
            parts.append(logits)
        if "tensor" not in scheme:
            assert relative(jnp.concatenate(parts, 1), expected) < 1e-10


@pytest.mark.parametrize("scheme", ["W4A4KV4", "W4A8KV8 by groups"])
def test_in_float32(variant, scheme):
    """Rounding is the same but for what float32 leaves; here no level is at stake."""
    rounded, packed = both(variant("llama-biases"), SCHEMES[scheme])
    expected = run(rounded, jnp.asarray(TOKENS))
    found = run(packed, jnp.asarray(TOKENS))
    assert relative(found, expected) < 1e-5


def test_gptq_is_packed(variant):
    with jax.enable_x64(True):
        network = fold(variant("llama", "float64").network)
        rounded = gptq(network.replace(scheme=SCHEMES["W4A4KV4"]), TOKENS)
        expected = run(rounded, jnp.asarray(TOKENS))
        found = run(pack(rounded), jnp.asarray(TOKENS))
        assert relative(found, expected) < 1e-10


def test_the_cache_takes_what_its_bits_say(variant):
    network = variant("llama").network.replace(scheme=SCHEMES["W4A4KV4"])
    cache = empty_cache(network, 2, 16, packed=True)
    for held in (cache.keys, cache.values):
        assert isinstance(held, PackedHeads)
        assert held.codes.nbytes == 3 * 2 * 16 * 2 * 12 // 2
        assert held.scale.shape == held.zero.shape == (3, 2, 16, 2, 1)
    assert cache.length == 16


def folded(variant, scheme):
    return fold(variant("llama").network).replace(scheme=scheme)


def test_weights_take_what_their_bits_say(variant):
    for bits, most in [(4, 0.5), (8, 1.0)]:
        network = folded(variant, Scheme(Grid(bits)))
        packed = pack(rtn(network)).params.layers
        total, weights = linear_bytes(packed)
        _, same = linear_bytes(network.params.layers)
        assert weights == same
        outputs = sum(packed.linear(name).scale.size for name in PROJECTIONS)
        assert total == most * weights + 4 * outputs
        assert linear_bytes(rtn(network).params.layers) == (4 * weights, weights)


def test_writing_with_integers(variant):
    """The same tokens from packed weights and cache as from values on grids."""
    with jax.enable_x64(True):
        rounded, packed = both(variant("llama", "float64"), SCHEMES["W4A4KV4"])
        options = {"steps": 10, "temperature": 0.0}
        prompt, key = jnp.asarray(TOKENS[:, :5]), jax.random.key(0)
        expected = generate(rounded, prompt, key, **options)
        found = generate(packed, prompt, key, packed=True, **options)
    np.testing.assert_array_equal(found, expected)


def test_what_is_not_packed(variant):
    network = folded(variant, SCHEMES["W4A4KV4"])
    with pytest.raises(ValueError, match="q: only weights that rtn, gptq, awq and qat rounded are"):
        pack(network)
    rounded = rtn(network)
    layers = rounded.params.layers
    stale = layers.replace(q=layers.q.replace(weight=1.01 * layers.q.weight))
    with pytest.raises(ValueError, match="q: the weights are not on the grid"):
        pack(rounded.replace(params=rounded.params.replace(layers=stale)))
    for grid, words in [(Grid(4, "asymmetric"), "asymmetric"), (Grid(12), "more than 8 bits")]:
        with pytest.raises(InputError, match=words):
            pack(rtn(network.replace(scheme=Scheme(grid))))
    some = Transform(shifts=some_shifts(network, np.random.default_rng(0)))
    with pytest.raises(ValueError, match="fuse first"):
        pack(rounded.replace(online=some))
    with pytest.raises(ValueError, match="fuse first"):
        forward(pack(rounded).replace(online=Transform()), jnp.asarray(TOKENS))


def test_a_layer_at_16_bits_leaves_the_projection_alone(variant):
    scheme = replace(SCHEMES["W4A4KV4"], overrides=(Override("layers.0.down", weights=16),))
    packed = pack(rtn(folded(variant, scheme))).params.layers
    assert not isinstance(packed.down, PackedLinear)
    assert isinstance(packed.up, PackedLinear)
