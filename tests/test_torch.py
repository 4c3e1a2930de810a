"""qrot.export.runtime.qrot_torch computes in PyTorch what qrot computes in JAX."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exports import everything
from models import VARIANTS

from qrot.export.verify import logits_in_torch
from qrot.grid import GRIDS, Grid
from qrot.grid import fake_quantise as in_jax
from qrot.hadamard.factors import hadamard_factors, hadamard_matrix
from qrot.kernels.fwht import fwht
from qrot.model.forward import forward
from qrot.network import fold, fuse
from qrot.rotation.random import RotationSites, random_rotations
from qrot.rotation.store import save_rotations
from qrot.rotation.transform import Transform
from qrot.scheme import Override, Scheme, grids_by_layer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
import qrot.export.runtime.qrot_torch as qt  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_compile")
TOKENS = np.random.default_rng(7).integers(0, 97, (2, 24), np.int32)
A4 = Grid(4, "asymmetric")


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("n", [1, 2, 64, 12, 20, 28, 40, 56, 576, 172])
def test_the_transform(n, inverse):
    factors = [torch.tensor(hadamard_matrix(f)) for f in hadamard_factors(n)]
    x = random(3, 2, 2 * n)
    expected = fwht(jnp.asarray(x), block=n, transpose=inverse)
    turned = qt.hadamard_transform(torch.tensor(x), factors, inverse=inverse)
    np.testing.assert_allclose(turned.numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["symmetric", "symmetric_half", "asymmetric"])
@pytest.mark.parametrize("granularity", ["token", "tensor", "group"])
def test_rounding_to_a_grid(granularity, kind, dtype):
    group = 8 if granularity == "group" else None
    scheme = Scheme(activations=Grid(4, kind, granularity, group, clip=0.9))
    x = random(2, 5, 24)
    x[0, 0] = 0
    expected = in_jax(jnp.asarray(x, dtype), scheme.activations)
    grid = grids_by_layer(scheme, 1)[0][2]["qkv"]
    rounded = qt.fake_quantise(torch.tensor(x).to(getattr(torch, dtype)), grid)
    found, expected = rounded.float().numpy(), np.asarray(expected, np.float32)
    if kind == "asymmetric":  # a fused multiply-add may change the last bit of a scale
        np.testing.assert_allclose(found, expected, rtol=1e-6 if dtype == "float32" else 2**-7)
    else:
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("name", "clip"),
    [(name, 1.0) for name in ("NVFP4", "MXFP4", "MXFP8", "FP8")]
    + [(name, "four_over_six") for name in ("NVFP4", "MXFP4")],
)
def test_rounding_to_numbers_that_are_no_integers(name, clip):
    scheme = Scheme(activations=replace(GRIDS[name], clip=clip))
    x = random(2, 5, 64) * np.exp(3 * random(2, 5, 64, seed=1))
    x[0, 0] = 0
    grid = grids_by_layer(scheme, 1)[0][2]["qkv"]
    found = qt.fake_quantise(torch.tensor(x), grid).numpy()
    np.testing.assert_array_equal(found, in_jax(jnp.asarray(x), scheme.activations))


def test_outlier_channels():
    scheme = Scheme(activations=Grid(8, granularity="token", threshold=2.0))
    x = random(2, 5, 24)
    grid = grids_by_layer(scheme, 1)[0][2]["qkv"]
    found = qt.fake_quantise(torch.tensor(x), grid).numpy()
    np.testing.assert_array_equal(found, in_jax(jnp.asarray(x), scheme.activations))
    large = (np.abs(x) > 2).any((0, 1))
    assert 0 < large.sum() < 24
    np.testing.assert_array_equal(found[..., large], x[..., large])


@pytest.mark.parametrize("granularity", ["head", "token"])
def test_rounding_the_cache(granularity):
    scheme = Scheme(keys=Grid(4, "asymmetric", granularity))
    x = random(2, 5, 3, 8)  # [batch, tokens, heads, head_dim]
    expected = in_jax(jnp.asarray(x), scheme.keys)
    grid = grids_by_layer(scheme, 1)[0][2]["keys"]
    rounded = qt.fake_quantise(torch.tensor(x).transpose(1, 2), grid).transpose(1, 2)
    np.testing.assert_allclose(rounded, np.asarray(expected), rtol=1e-6)


def apply(model, transform, scheme, tmp_path):
    """The logits of a transformers model, in float64, after `apply_rotations`."""
    path, config = tmp_path / "rotations.safetensors", model.network.config
    grids = grids_by_layer(scheme, config.num_hidden_layers)
    save_rotations(path, transform, {"model": "tiny", "digest": model.digest, "grids": grids})
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model.name, dtype=torch.float64)
    qt.apply_rotations(loaded, path)
    # transformers' norms and rotary tables are float32 always, and rounding would magnify it.
    return logits_in_torch(loaded.eval(), config, dtype="float64")(TOKENS)


def in_qrot(model, transform, scheme):
    """The same logits, in float64, by qrot."""
    network = fuse(fold(model.network), transform).replace(scheme=scheme)
    return np.asarray(jax.jit(forward)(network, jnp.asarray(TOKENS)))


SCHEMES = {
    "full precision": Scheme(),
    "A4KV4": Scheme(Grid(), A4, A4, A4),
    "A8K4, overrides": Scheme(
        Grid(),
        Grid(8, "symmetric_half", clip=0.9),
        Grid(4, granularity="token"),
        overrides=(Override("layers.1.down", activations=4), Override("layers.0.*", keys=16)),
    ),
}


# Every variant at one scheme; every scheme on two that differ most.
CASES = [(name, "A4KV4") for name in sorted(VARIANTS)]
CASES += [(name, s) for name in ("llama-biases", "qwen3") for s in SCHEMES if s != "A4KV4"]


@pytest.mark.parametrize(("name", "scheme"), CASES)
def test_apply_rotations(variant, name, scheme, tmp_path):
    """All that can be learned, on a model that transformers loaded."""
    with jax.enable_x64(True):
        model = variant(name, "float64")
        transform = everything(model.network)
        expected = in_qrot(model, transform, SCHEMES[scheme])
        found = apply(model, transform, SCHEMES[scheme], tmp_path)
    assert np.abs(found - expected).max() < 1e-10 * np.abs(expected).max()
    plain = transformers.AutoModelForCausalLM.from_pretrained(model.name, dtype=torch.float64)
    with torch.no_grad():
        exact = plain(torch.tensor(TOKENS)).logits.numpy()
    apart = np.abs(found - exact).max() / np.abs(exact).max()
    assert apart < 1e-5 if scheme == "full precision" else apart > 1e-3


@pytest.mark.parametrize("blocks", [False, True])
def test_random_rotations(variant, blocks, tmp_path):
    """The forms that random rotations have, whole or in blocks."""
    sites = RotationSites(residual=12, value=4, key=4, down=28) if blocks else RotationSites()
    with jax.enable_x64(True):
        model = variant("qwen2-tied", "float64")
        transform = Transform(random_rotations(model.network.config, 2, sites=sites))
        expected = in_qrot(model, transform, SCHEMES["A4KV4"])
        found = apply(model, transform, SCHEMES["A4KV4"], tmp_path)
    assert np.abs(found - expected).max() < 1e-10 * np.abs(expected).max()


def test_decoding_with_a_cache(variant, tmp_path):
    """Token by token is all at once: no scale depends on another token."""
    model = variant("llama")
    path = tmp_path / "rotations.safetensors"
    grids = grids_by_layer(SCHEMES["A4KV4"], 3)
    transform = Transform(random_rotations(model.network.config, 0))
    save_rotations(path, transform, {"model": "tiny", "digest": model.digest, "grids": grids})
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model.name, dtype=torch.float64)
    qt.apply_rotations(loaded, path).eval()
    tokens = torch.tensor(TOKENS[:1])
    with torch.no_grad():
        whole = loaded(tokens).logits
        cache, parts = transformers.DynamicCache(config=loaded.config), []
        for i in range(tokens.shape[1]):
            out = loaded(tokens[:, i : i + 1], cache=cache, use_cache=True)
            parts.append(out.logits)
    assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-5)


def test_a_file_for_another_model_is_refused(variant, tmp_path):
    model = variant("llama")
    path = tmp_path / "rotations.safetensors"
    transform = Transform(random_rotations(model.network.config, 0))
    metadata = {"model": "tiny", "digest": "0", "grids": grids_by_layer(Scheme(), 7)}
    save_rotations(path, transform, metadata)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model.name)
    with pytest.raises(ValueError, match="made for 7 layers"):
        qt.apply_rotations(loaded, path)
    save_rotations(path, transform, {"model": "tiny", "digest": "0"})
    with pytest.raises(ValueError, match="export it again"):
        qt.apply_rotations(loaded, path)
