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
from qrot.network import fold, fuse, left_online, untie
from qrot.quantize.rtn import rtn
from qrot.rotation.forms import Dense
from qrot.rotation.random import RotationSites, random_rotations
from qrot.rotation.transform import Online, Transform
from qrot.scheme import Scheme
from qrot.sites import INPUTS, SITES

pytestmark = pytest.mark.usefixtures("quick_compile")
TOKENS = np.random.default_rng(7).integers(0, 97, (2, 16), np.int32)
LIMITS = {"float32": 1e-5, "float64": 1e-10}
# One variant of each architecture, with biases or tied embeddings where there are such.
FOUR = ("llama-biases", "mistral", "qwen2-tied", "qwen3-biases")
OFF = RotationSites(residual=False, value=False, key=False, down=False)
CHOICES = {
    "residual": replace(OFF, residual=True),
    "value": replace(OFF, value=True),
    "key": replace(OFF, key=True),
    "down": replace(OFF, down=True),
    "all": RotationSites(),
    # No block but one has a symmetric matrix.
    "blocks": RotationSites(residual=12, value=4, key=4, down=28),
}
ALL_ON = Scheme(*[Grid(bits=8)] * 4)


@partial(jax.jit, static_argnames="dtype")
def run(network, dtype=None):
    return forward(network, jnp.asarray(TOKENS), dtype=dtype)


@jax.jit
def run_unrounded(network):
    """With quantisers that are on but do not round: what stays are the rotations around them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qrot.model.layer.fake_quantise", lambda x, *_, **__: x)
        return run.__wrapped__(network.replace(scheme=ALL_ON))


def relative(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.abs(a - b).max() / np.abs(b).max()


@pytest.fixture(scope="module")
def folded(variant):
    """(name, dtype) -> the folded network and the logits of the untouched one."""

    @cache
    def make(name, dtype):
        network = variant(name, dtype).network
        return fold(network), run(network)

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
def test_fold(variant, folded, name, dtype):
    network, before = folded(name, dtype)
    params = network.params
    assert relative(run(network), before) < LIMITS[dtype]
    for norm in (params.norm, params.layers.attention_norm, params.layers.mlp_norm):
        assert (norm == 1).all()
    assert not network.config.tie_word_embeddings
    np.testing.assert_array_equal(params.embed, variant(name, dtype).network.params.embed)


def test_untie(variant):
    tied, own = (variant(name).network.params for name in ("llama-tied", "llama"))
    np.testing.assert_array_equal(untie(tied).head, tied.embed.T)
    assert untie(own) is own


@pytest.mark.parametrize("name", VARIANTS)
def test_all_rotations_in_float32(folded, name):
    network, before = folded(name, "float32")
    transform = Transform(random_rotations(network.config, 1))
    fused = fuse(network, transform)
    params = fused.params
    assert params.embed.dtype == params.layers.o.weight.dtype == jnp.float32
    assert relative(params.embed, network.params.embed) > 0.1
    assert relative(run_unrounded(fused), before) < LIMITS["float32"]
    if name in FOUR:
        simulated = run_unrounded(network.replace(online=transform))
        assert relative(simulated, before) < LIMITS["float32"]


@pytest.mark.parametrize("kind", ["hadamard", "orthogonal"])
@pytest.mark.parametrize("sites", CHOICES)
@pytest.mark.parametrize("name", FOUR)
def test_each_rotation(folded, name, sites, kind, x64):
    network, before = folded(name, "float64")
    rotations = random_rotations(network.config, 1, kind=kind, sites=CHOICES[sites])
    fused = run_unrounded(fuse(network, Transform(rotations)))
    assert relative(fused, before) < LIMITS["float64"]


@pytest.mark.parametrize("site", ["residual", "value", "key", "down", "all"])
@pytest.mark.parametrize("name", VARIANTS)
def test_each_rotation_on_every_variant(folded, name, site, x64):
    """One rotation among identities, so that a variant is compiled once for all of them."""
    network, before = folded(name, "float64")
    c = network.config
    sizes = {"residual": c.hidden_size, "key": c.head_dim, "down": c.intermediate_size}
    parts = {where: np.eye(n) for where, n in sizes.items()}
    parts["value"] = np.stack([np.eye(c.head_dim)] * c.num_hidden_layers)
    for where in parts if site == "all" else (site,):
        dense = hadamard_dense(parts[where].shape[-1])
        assert not np.allclose(dense, dense.T)  # or H and its transpose could be mixed up unseen
        parts[where] = parts[where] @ dense
    fused = fuse(network, transform_of(**parts))
    assert relative(run_unrounded(fused), before) < LIMITS["float64"]


def transform_of(**matrices):
    return Transform({name: Dense(jnp.asarray(matrix)) for name, matrix in matrices.items()})


@pytest.mark.parametrize("site", ["embed", "o", "down"])
def test_a_transposed_hadamard_is_seen(folded, site, x64):
    """The tests above would fail: these matrices are not symmetric."""
    network, before = folded("llama", "float64")
    c = network.config
    residual, value = hadamard_dense(c.hidden_size), np.stack([hadamard_dense(c.head_dim)] * 3)
    right = fuse(network, transform_of(residual=residual, value=value))
    other = fuse(network, transform_of(residual=residual.T, value=value.swapaxes(1, 2)))
    params, wrong = right.params, other.params
    if site == "embed":
        mixed = params.replace(embed=wrong.embed)
    else:
        mixed = params.replace(layers=params.layers.replace(**{site: wrong.layers.linear(site)}))
    assert relative(run(right), before) < 1e-10
    assert relative(run(right.replace(params=mixed)), before) > 1e-2


def test_a_transposed_online_hadamard_is_seen(folded, x64):
    network, before = folded("llama", "float64")
    down = hadamard_dense(network.config.intermediate_size)
    fused = fuse(network, transform_of(down=down))
    assert relative(run(fused), before) < 1e-10
    wrong = fused.replace(online=Online(transform_of(down=down.T).rotations))
    assert relative(run(wrong), before) > 1e-2


def test_rotations_are_not_fused_twice(folded):
    network, _ = folded("llama", "float32")
    transform = Transform(random_rotations(network.config, 0))
    with pytest.raises(ValueError, match="already"):
        fuse(fuse(network, transform), transform)
    with pytest.raises(ValueError, match="already"):
        fuse(network.replace(online=transform), transform)


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
    network, before = folded(name, "float64")
    c, draw = network.config, np.random.default_rng(0)
    rotations = random_rotations(c, 2, sites=CHOICES[sites])
    for where in ("residual", "value"):  # exactly orthogonal, as `fuse` makes them
        rotations[where] = jax.tree.map(orthogonal, rotations[where])
    transform = Transform(
        rotations,
        shifts={s: jnp.asarray(draw.normal(0, 1, (3, SITES[s].width(c)))) for s in INPUTS},
        clips={s: jnp.asarray(draw.uniform(0.7, 1, 3)) for s in SITES},
    )
    network = network.replace(scheme=SCHEMES[scheme])
    simulated = run(network.replace(online=transform))
    assert relative(run(fuse(network, transform)), simulated) < 1e-6
    assert relative(simulated, before) > 1e-3


@pytest.mark.parametrize("left_out", ["shifts", "clips"])
def test_shifts_and_clips_are_felt(folded, left_out):
    network, _ = folded("llama", "float32")
    both = Transform(
        shifts={"qkv": jnp.ones((3, 48)), "down": jnp.ones((3, 56))},
        clips={"o": jnp.full(3, 0.7), "keys": jnp.full(3, 0.7)},
    )
    network = network.replace(scheme=SCHEMES["symmetric"])
    with_both = run(network.replace(online=both))
    without = run(network.replace(online=both.replace(**{left_out: {}})))
    assert relative(without, with_both) > 1e-2


def orthogonal(matrix):
    u, _, v = np.linalg.svd(np.asarray(matrix, np.float64))
    return jnp.asarray(u @ v)


@pytest.mark.parametrize("name", FOUR)
def test_bfloat16_weights_are_rounded_once(variant, folded, name):
    """Fused bfloat16 weights are about as good as the bfloat16 weights they come from."""
    before = run(variant(name, "float32").network)
    half = variant(name, "bfloat16").network
    lost = relative(run(half, dtype=jnp.float32), before)
    fused = fuse(fold(half), Transform(random_rotations(half.config, 3)))
    assert fused.params.layers.down.weight.dtype == fused.params.embed.dtype == jnp.bfloat16
    assert 0 < relative(run(fused, dtype=jnp.float32), before) < 3 * lost


def test_weights_are_quantised_in_the_rotated_basis(folded):
    """Rounding to 8 bits after fusing barely changes the function; to 2 bits it does."""
    network, before = folded("llama-biases", "float32")
    fused = fuse(network, Transform(random_rotations(network.config, 0)))
    errors = [
        relative(run(rtn(fused.replace(scheme=Scheme(weights=Grid(bits=bits))))), before)
        for bits in (2, 8, 12)
    ]
    assert errors[0] > 0.2 > 0.05 > errors[1] > errors[2] > 1e-5


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_norms_that_are_not_folded_are_refused(variant, name):
    network = variant(name).network
    transform = Transform(random_rotations(network.config, 0))
    for some in (network, network.replace(params=untie(network.params))):
        with pytest.raises(ValueError, match="call fold first"):
            fuse(some, transform)


def test_what_is_left_online_is_what_no_weight_can_hold(folded):
    network, _ = folded("llama", "float32")
    clips = {"o": jnp.full(3, 0.7)}
    transform = Transform(random_rotations(network.config, 0), clips=clips)
    fused = fuse(network, transform)
    assert isinstance(fused.online, Online)
    assert fused.online.rotations == {name: transform.rotations[name] for name in ("key", "down")}
    assert fused.online.clips == clips
    assert jax.tree.structure(left_online(transform, network.config)) == jax.tree.structure(
        fused.online
    )
