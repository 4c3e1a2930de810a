"""What must not change the function of a model does not: fold, and every rotation."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import VARIANTS

from qrot.grid import Grid
from qrot.hadamard.factors import hadamard_dense
from qrot.model.forward import forward
from qrot.network import fold_norms, fuse, untie
from qrot.quantize.rtn import rtn
from qrot.rotation.random import RotationSites, random_rotations
from qrot.rotation.forms import Clips, Rotations, Shifts
from qrot.scheme import Scheme

pytestmark = pytest.mark.usefixtures("quick_compile")
TOKENS = np.random.default_rng(7).integers(0, 97, (2, 16), np.int32)
LIMITS = {"float32": 1e-5, "float64": 1e-10}
# One variant of each architecture, with biases or tied embeddings where there are such.
FOUR = ("llama-biases", "mistral", "qwen2-tied", "qwen3-biases")
OFF = RotationSites(residual=False, value=False, key=False, down=False)
SITES = {
    "residual": replace(OFF, residual=True),
    "value": replace(OFF, value=True),
    "key": replace(OFF, key=True),
    "down": replace(OFF, down=True),
    "all": RotationSites(),
    # No block but one has a symmetric matrix.
    "blocks": RotationSites(residual=12, value=4, key=4, down=28),
}
ALL_ON = Scheme(*[Grid(bits=8)] * 4)


@partial(jax.jit, static_argnames=("config", "scheme", "dtype"))
def run(params, config, **options):
    return forward(params, jnp.asarray(TOKENS), config, **options)


@partial(jax.jit, static_argnames="config")
def _unrounded(params, config, rotations):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qrot.model.forward.fake_quantise", lambda x, *_, **__: x)
        return run.__wrapped__(params, config, rotations=rotations, scheme=ALL_ON)


def run_unrounded(params, config, rotations):
    """With quantisers that are on but do not round: what stays are the rotations around them."""
    return _unrounded(params, config, rotations)


def relative(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.abs(a - b).max() / np.abs(b).max()


@pytest.fixture(scope="module")
def folded(variant):
    """(name, dtype) -> the folded model and the logits of the untouched one."""

    @cache
    def make(name, dtype):
        model = variant(name, dtype)
        return fold_norms(model), run(model.params, model.config)

    return make


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    with jax.enable_x64(request.param == "float64"):
        yield request.param


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("name", VARIANTS)
def test_fold_norms(variant, folded, name, dtype):
    model, before = folded(name, dtype)
    params = model.params
    assert relative(run(params, model.config), before) < LIMITS[dtype]
    for norm in (params.norm, params.layers.attention_norm, params.layers.mlp_norm):
        assert (norm == 1).all()
    assert not model.config.tie_word_embeddings
    np.testing.assert_array_equal(params.embed, variant(name, dtype).params.embed)


def test_untie(variant):
    tied, own = variant("llama-tied").params, variant("llama").params
    np.testing.assert_array_equal(untie(tied).head, tied.embed.T)
    assert untie(own) is own


@pytest.mark.parametrize("name", VARIANTS)
def test_all_rotations_in_float32(folded, name):
    model, before = folded(name, "float32")
    rotations = random_rotations(model.config, 1)
    params, online, _ = fuse(model.params, rotations, model.config)
    assert params.embed.dtype == params.layers.o.weight.dtype == jnp.float32
    assert relative(params.embed, model.params.embed) > 0.1
    fused = run_unrounded(params, model.config, online)
    assert relative(fused, before) < LIMITS["float32"]
    if name in FOUR:
        simulated = run_unrounded(model.params, model.config, rotations)
        assert relative(simulated, before) < LIMITS["float32"]


@pytest.mark.parametrize("kind", ["hadamard", "orthogonal"])
@pytest.mark.parametrize("sites", SITES)
@pytest.mark.parametrize("name", FOUR)
def test_each_rotation(folded, name, sites, kind, x64):
    model, before = folded(name, "float64")
    rotations = random_rotations(model.config, 1, kind=kind, sites=SITES[sites])
    params, online, _ = fuse(model.params, rotations, model.config)
    fused = run_unrounded(params, model.config, online)
    assert relative(fused, before) < LIMITS["float64"]


@pytest.mark.parametrize("site", ["residual", "value", "key", "down", "all"])
@pytest.mark.parametrize("name", VARIANTS)
def test_each_rotation_on_every_variant(folded, name, site, x64):
    """One rotation among identities, so that a variant is compiled once for all of them."""
    model, before = folded(name, "float64")
    c = model.config
    sizes = {"residual": c.hidden_size, "key": c.head_dim, "down": c.intermediate_size}
    parts = {where: np.eye(n) for where, n in sizes.items()}
    parts["value"] = np.stack([np.eye(c.head_dim)] * c.num_hidden_layers)
    for where in parts if site == "all" else (site,):
        dense = hadamard_dense(parts[where].shape[-1])
        assert not np.allclose(dense, dense.T)  # or H and its transpose could be mixed up unseen
        parts[where] = parts[where] @ dense
    rotations = Rotations(**jax.tree.map(jnp.asarray, parts))
    params, online, _ = fuse(model.params, rotations, c)
    assert relative(run_unrounded(params, c, online), before) < LIMITS["float64"]


@pytest.mark.parametrize("site", ["embed", "o", "down"])
def test_a_transposed_hadamard_is_seen(folded, site, x64):
    """The tests above would fail: these matrices are not symmetric."""
    model, before = folded("llama", "float64")
    c = model.config
    residual, value = hadamard_dense(c.hidden_size), np.stack([hadamard_dense(c.head_dim)] * 3)
    rotations = Rotations(jnp.asarray(residual), jnp.asarray(value))
    other = Rotations(jnp.asarray(residual.T), jnp.asarray(value.swapaxes(1, 2)))
    right, online, _ = fuse(model.params, rotations, c)
    wrong, _, _ = fuse(model.params, other, c)
    if site == "embed":
        mixed = right.replace(embed=wrong.embed)
    else:
        mixed = right.replace(layers=right.layers.replace(**{site: getattr(wrong.layers, site)}))
    assert relative(run(right, c, rotations=online), before) < 1e-10
    assert relative(run(mixed, c, rotations=online), before) > 1e-2


def test_a_transposed_online_hadamard_is_seen(folded, x64):
    model, before = folded("llama", "float64")
    down = jnp.asarray(hadamard_dense(model.config.intermediate_size))
    params, online, _ = fuse(model.params, Rotations(down=down), model.config)
    assert relative(run(params, model.config, rotations=online), before) < 1e-10
    online = online.replace(down=down.T)
    assert relative(run(params, model.config, rotations=online), before) > 1e-2


def test_rotations_are_not_fused_twice(folded):
    model, _ = folded("llama", "float32")
    params, online, _ = fuse(model.params, random_rotations(model.config, 0), model.config)
    with pytest.raises(ValueError, match="already"):
        fuse(params, online, model.config)


SCHEMES = {
    "symmetric": Scheme(*[Grid(bits=4, clip=0.9)] * 4),
    "asymmetric": Scheme(*[Grid(bits=5, kind="asymmetric")] * 4),
    "half": Scheme(*[Grid(bits=4, kind="symmetric_half", clip=0.95)] * 4),
    "groups": Scheme(*[Grid(bits=4, granularity="group", group=4, clip=0.9)] * 4),
    "tensor": Scheme(*[Grid(bits=8, granularity="tensor", clip=0.9)] * 4),
}


@pytest.mark.parametrize(
    ("name", "scheme", "sites"),
    [
        ("llama-biases", "symmetric", "all"),
        ("qwen3-biases", "asymmetric", "all"),
        ("qwen2-tied", "groups", "blocks"),
        ("mistral", "half", "blocks"),
        ("mistral", "tensor", "all"),
    ],
)
def test_simulated_rotations_quantise_as_fused_ones(folded, name, scheme, sites, x64):
    """Q(x R) R^T in the network as it is equals Q(x) in the fused one, with shifts and clips.

    In float64, so that hardly ever two nearly equal numbers fall on two levels.
    """
    model, before = folded(name, "float64")
    c, draw = model.config, np.random.default_rng(0)
    rotations = random_rotations(c, 2, sites=SITES[sites])
    rotations = rotations.replace(  # exactly orthogonal, as `fuse` makes them
        residual=orthogonal(rotations.residual), value=orthogonal(rotations.value)
    )
    heads = c.num_attention_heads * c.head_dim
    widths = {"qkv": 48, "o": heads, "gate_up": 48, "down": 56}
    shifts = Shifts(**{s: jnp.asarray(draw.normal(0, 1, (3, n))) for s, n in widths.items()})
    names = (*widths, "keys", "values")
    clips = Clips(**{s: jnp.asarray(draw.uniform(0.7, 1, 3)) for s in names})
    options = {"scheme": SCHEMES[scheme], "clips": clips}
    simulated = run(model.params, c, rotations=rotations, shifts=shifts, **options)
    params, online, turned = fuse(model.params, rotations, c, shifts)
    fused = run(params, c, rotations=online, shifts=turned, **options)
    assert relative(fused, simulated) < 1e-6
    assert relative(simulated, before) > 1e-3


@pytest.mark.parametrize("left_out", ["shifts", "clips"])
def test_shifts_and_clips_are_felt(folded, left_out):
    model, _ = folded("llama", "float32")
    shifts = Shifts(qkv=jnp.ones((3, 48)), down=jnp.ones((3, 56)))
    options = {"shifts": shifts, "clips": Clips(o=jnp.full(3, 0.7), keys=jnp.full(3, 0.7))}
    scheme = SCHEMES["symmetric"]
    with_both = run(model.params, model.config, scheme=scheme, **options)
    without = run(model.params, model.config, scheme=scheme, **{**options, left_out: None})
    assert relative(without, with_both) > 1e-2


def orthogonal(matrix):
    u, _, v = np.linalg.svd(np.asarray(matrix, np.float64))
    return jnp.asarray(u @ v)


@pytest.mark.parametrize("name", FOUR)
def test_bfloat16_weights_are_rounded_once(variant, folded, name):
    """Fused bfloat16 weights are about as good as the bfloat16 weights they come from."""
    exact = variant(name, "float32")
    before = run(exact.params, exact.config)
    half = variant(name, "bfloat16")
    lost = relative(run(half.params, half.config, dtype=jnp.float32), before)
    model = fold_norms(half)
    params, online, _ = fuse(model.params, random_rotations(model.config, 3), model.config)
    assert params.layers.down.weight.dtype == params.embed.dtype == jnp.bfloat16
    fused = relative(run(params, model.config, rotations=online, dtype=jnp.float32), before)
    assert 0 < fused < 3 * lost


def test_weights_are_quantised_in_the_rotated_basis(folded):
    """Rounding to 8 bits after fusing barely changes the function; to 2 bits it does."""
    model, before = folded("llama-biases", "float32")
    params, online, _ = fuse(model.params, random_rotations(model.config, 0), model.config)
    errors = [
        relative(
            run(rtn(params, Scheme(weights=Grid(bits=bits))), model.config, rotations=online),
            before,
        )
        for bits in (2, 8, 12)
    ]
    assert errors[0] > 0.2 > 0.05 > errors[1] > errors[2] > 1e-5


def test_norms_that_are_not_folded_are_refused(variant):
    model = variant("llama")
    rotations = random_rotations(model.config, 0)
    with pytest.raises(ValueError, match="fold_norms"):
        fuse(model.params, rotations, model.config)
    with pytest.raises(ValueError, match="fold_norms"):
        fuse(untie(variant("llama-tied").params), rotations, model.config)
