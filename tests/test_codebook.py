"""Codebooks and scale rules, against ml_dtypes, qwix and compressed-tensors."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from grids import quantise
from hypothesis import given, settings
from hypothesis import strategies as st

from qrot.codebook import CODEBOOKS, E4M3_TINY, in_e4m3, in_e8m0
from qrot.errors import InputError
from qrot.grid import GRIDS, Grid, elementwise_scale_and_zero, expected_error, fake_quantise
from qrot.quantize.gptq import solve
from qrot.quantize.rtn import round_with_scale
from qrot.run.read import read_config

pytestmark = pytest.mark.usefixtures("quick_compile")
DTYPES = {
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}


def values(*shape, seed=0):
    """Numbers over many octaves."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * np.exp(2 * rng.normal(size=shape))).astype(np.float32)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("wide", [np.float32, np.float64])
def test_floats_are_those_of_ml_dtypes(name, wide):
    book, dtype = CODEBOOKS[name], DTYPES[name]
    codes = np.arange(2**book.bits).astype(np.uint8).view(dtype)
    exact = np.unique(codes.astype(wide)[np.isfinite(codes.astype(wide))])
    between = (exact[1:] + exact[:-1]) / 2  # all ties
    x = np.concatenate([exact, between, values(4000), values(4000, seed=1) * 1e-4]).astype(wide)
    x = np.clip(x, -book.largest, book.largest)
    with jax.enable_x64(wide is np.float64):
        found = np.asarray(book.nearest(jnp.asarray(x)))
    assert found.dtype == wide
    np.testing.assert_array_equal(np.clip(found, -book.largest, book.largest), x.astype(dtype))
    assert float(exact.max()) == book.largest


def test_beyond_the_largest_number_codes_go_on():
    """So that the derivative can tell what was clipped."""
    for name, beyond in (("e2m1", [7.5, 8]), ("e4m3", [470, 480]), ("nf4", [1.2, 1.2])):
        book = CODEBOOKS[name]
        t, expected = jnp.float32(beyond)
        assert book.largest < float(book.nearest(t)) == expected


def test_nf4_is_that_of_qwix():
    qwix = pytest.importorskip("qwix._src.core.numerics")
    x = np.clip(values(500), -1, 1)
    expected = qwix.nf4_to_fp(qwix.fp_to_nf4(jnp.asarray(x)))
    np.testing.assert_array_equal(CODEBOOKS["nf4"].nearest(jnp.asarray(x)), expected)


def peers_parameters(grid, x, global_scale=None):
    """(arguments, scales, global scale) of compressed-tensors for rows in groups."""
    torch = pytest.importorskip("torch")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    helpers = pytest.importorskip("compressed_tensors.quantization.utils.helpers")
    scheme = quantization.preset_name_to_scheme(grid.label, ["Linear"]).weights
    groups = torch.tensor(x).unflatten(-1, (-1, grid.group))
    if global_scale is not None:
        global_scale = torch.tensor([global_scale])
    scales, _ = helpers.calculate_qparams(
        groups.amin(-1), groups.amax(-1), scheme, global_scale=global_scale
    )
    return scheme, scales, global_scale


@pytest.mark.parametrize("name", ["NVFP4", "MXFP4", "MXFP8"])
def test_groups_are_rounded_as_in_compressed_tensors(name):
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    torch, grid = pytest.importorskip("torch"), GRIDS[name]
    x = values(64, 4 * grid.group)
    with np.errstate(divide="ignore"):
        tensor = 2.0 ** np.ceil(np.log2(np.abs(x).max() / 6 / 448))
    scheme, scales, whole = peers_parameters(grid, x, 1 / tensor if name == "NVFP4" else None)
    expected = forward.fake_quantize(
        torch.tensor(x), scales, torch.zeros_like(scales), scheme, global_scale=whole
    ).numpy()
    # As weights, [in, out], which share a tensor scale.
    found = np.asarray(fake_quantise(jnp.asarray(x.T), grid, axis=-2)).T
    np.testing.assert_array_equal(found, expected)


def test_fp8_is_rounded_as_in_compressed_tensors():
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    torch, x = pytest.importorskip("torch"), values(16, 48)
    args = pytest.importorskip("compressed_tensors.quantization").preset_name_to_scheme(
        "FP8_DYNAMIC", ["Linear"]
    )
    scale, zero = forward.compute_dynamic_scales_and_zp(
        torch.tensor(x)[None], args.input_activations, torch.nn.Module()
    )
    expected = forward.fake_quantize(torch.tensor(x)[None], scale, zero, args.input_activations)
    found = quantise(x, Grid(codebook="e4m3", granularity="token"))
    np.testing.assert_array_equal(found, expected[0].numpy())


@pytest.mark.parametrize("name", GRIDS)
def test_a_second_rounding_changes_nothing(name):
    grid = GRIDS[name]
    x = values(2, 6, 128)
    once = quantise(x, grid)
    assert not np.array_equal(once, x)
    np.testing.assert_allclose(quantise(once, grid), once, rtol=1e-6)


@given(st.integers(0, 2**32 - 1), st.integers(-20, 20))
@settings(max_examples=25, deadline=None)
def test_nvfp4_does_not_depend_on_the_tensor_scale(seed, power):
    """Tokens of other sizes beside it, and factors of two on it, change no token's numbers."""
    x = values(8, 64, seed=seed)
    alone = np.stack([quantise(row[None], GRIDS["NVFP4"])[0] for row in x])
    np.testing.assert_array_equal(quantise(x, GRIDS["NVFP4"]), alone)
    np.testing.assert_array_equal(quantise(x * 2.0**power, GRIDS["NVFP4"]), alone * 2.0**power)


def test_scales_in_e4m3_do_not_vanish_beside_large_ones():
    scales = in_e4m3(jnp.float32([[6e6], [6e-6], [0]]), 6.0, (0, 1))
    tensor = 2.0**12  # 1e6 / 448, up to a power of two
    np.testing.assert_array_equal(scales[1:, 0], [E4M3_TINY * tensor] * 2)
    assert abs(float(scales[0, 0]) / 1e6 - 1) < 2**-4


def test_scales_in_e8m0_are_powers_of_two():
    absmax = jnp.float32([0, 4, 6.9, 7, 8, 1e-30])
    scales = np.asarray(in_e8m0(absmax, 6.0, ()))
    np.testing.assert_array_equal(scales[:5], [0, 1, 1, 2, 2])
    assert np.log2(scales[5]) % 1 == 0


def test_four_over_six_takes_the_better_of_the_two_scales():
    grid = Grid(codebook="e2m1", granularity="group", group=4, clip="four_over_six")
    four = np.float32([4, 3, 2, 1.5])  # on the levels below 4
    six = np.float32([6, 4, 3, 2])
    x = np.concatenate([four, six])
    np.testing.assert_array_equal(quantise(x[None] * 1.5, grid)[0], x * 1.5)
    assert not np.array_equal(
        quantise(four[None] * 1.5, Grid(4, codebook="e2m1", granularity="group", group=4))[0],
        four * 1.5,
    )
    noise = values(32, 64)

    def error(grid):
        return np.square(quantise(noise, grid) - noise).sum()

    both = GRIDS["NVFP4"]
    assert error(Grid(**{**vars(both), "clip": "four_over_six"})) < error(both)


@pytest.mark.parametrize("name", GRIDS)
def test_the_derivative_follows_the_scale(name):
    """The value next to the largest stays; the largest moves all that its scale rounds."""
    grid = GRIDS[name]
    x = jnp.asarray(np.random.default_rng(3).normal(size=(1, 64)).astype(np.float32))
    target = jnp.asarray(np.random.default_rng(4).normal(size=(1, 64)).astype(np.float32))
    gradient = jax.grad(lambda x: (fake_quantise(x, grid) * target).sum())(x)
    size = grid.group or 64
    for group in range(64 // size):
        here = slice(group * size, (group + 1) * size)
        own, aim, slope = (np.asarray(a[0, here]) for a in (x, target, gradient))
        scale = np.asarray(elementwise_scale_and_zero(x, grid, axis=-1, clip=1.0)[0])[0, here]
        t = own / scale
        q = np.asarray(fake_quantise(x, grid))[0, here] / scale
        top = np.abs(own).argmax()
        others = np.arange(size) != top
        np.testing.assert_allclose(slope[others], aim[others], rtol=1e-5)
        inside = np.abs(q) >= 0  # none is clipped here
        moved = (aim * np.where(inside, q - t, 0)).sum() / grid.q_range * np.sign(own[top])
        np.testing.assert_allclose(slope[top], aim[top] + moved, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["NVFP4", "MXFP4", "MXFP8", "FP8", "NF4"])
def test_the_expected_error_is_that_of_rounding(name):
    x = np.random.default_rng(5).normal(size=(400, 256)).astype(np.float32)
    grid = GRIDS[name] if name != "FP8" else Grid(codebook="e4m3", granularity="token")
    actual = np.square(quantise(x, grid) - x).mean()
    expected = float(expected_error(jnp.asarray(x), grid).mean())
    assert abs(expected / actual - 1) < 0.05


def test_the_expected_error_feels_where_cells_grow():
    """A value that moves to where cells are wider has a larger error: the derivative says so."""
    x = jnp.float32([[6.0, 2.5, 0.1, 0.2]])
    grid = Grid(codebook="e2m1", granularity="token")
    slope = jax.grad(lambda x: expected_error(x, grid).sum())(x)
    assert slope[0, 1] > 2.5 / 12 / 8  # 1/12 at 2.5 and 4/12 at 5
    np.testing.assert_allclose(slope[0, 2:], 0, atol=1e-6)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"codebook": "e2m1", "kind": "asymmetric"}, "kind: 'asymmetric' is of integers"),
        ({"codebook": "e2m1", "bits": 8}, "bits: codebook e2m1 has 4, not 8"),
        ({"scale": "e4m3"}, "scale: e4m3 is for granularity 'group'"),
        ({"clip": "four_over_six"}, "'four_over_six' is for codebook e2m1, not int"),
    ],
)
def test_grids_that_do_not_exist(fault, said):
    with pytest.raises(InputError, match=said):
        Grid(**fault)


@pytest.mark.parametrize(
    ("name", "short", "bits"),
    [
        ("W4A4KV4", "W4A4KV4", (4, 4, 4, 4)),
        ("w4a16", "W4A16KV16", (4, 16, 16, 16)),
        ("NVFP4", "NVFP4KV16", (4, 4, 16, 16)),
        ("mxfp4a16KV8", "MXFP4A16KV8", (4, 16, 8, 8)),
        ("FP8KVFP8", "FP8KVFP8", (8, 8, 8, 8)),
        ("WNF4A8", "WNF4A8KV16", (4, 8, 16, 16)),
    ],
)
def test_schemes_by_name(tmp_path, name, short, bits):
    file = tmp_path / "a.yaml"
    file.write_text("model: tiny\n")
    scheme = read_config(file, [f"scheme={name}"]).scheme
    assert (scheme.name, tuple(g.bits for g in scheme.grids.values())) == (short, bits)


def test_names_and_sections_go_together(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("scheme: {weights: nvfp4, activations: FP8}\n")
    overrides = ["scheme.weights.clip=four_over_six", "scheme.keys=MXFP4"]
    scheme = read_config(file, overrides).scheme
    assert scheme.weights == Grid(**{**vars(GRIDS["NVFP4"]), "clip": "four_over_six"})
    assert (scheme.activations.codebook, scheme.activations.granularity) == ("e4m3", "token")
    assert (scheme.keys.group, scheme.name) == (32, "WNVFP4AFP8KMXFP4V16")
    for wrong, said in (("NVFP5", "scheme: NVFP5 is no name"), ("W4", "scheme: W4 is no name")):
        with pytest.raises(InputError, match=said):
            read_config(file, [f"scheme={wrong}"])
    with pytest.raises(InputError, match=r"scheme\.weights: int4 is no name such as NVFP4, MXFP4"):
        read_config(file, ["scheme.weights=int4"])


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("clip", [1.0, "mse"])
def test_weights_are_codes_times_scales(name, clip):
    """`Linear.scale` holds the unit of the codes: FP4 weights are integers of 5 bits times it."""
    grid = Grid(**{**vars(GRIDS[name]), "clip": clip})
    if grid.granularity is None:
        grid = Grid(**{**vars(grid), "granularity": "channel"})
    weight = values(128, 6)
    rounded, scale = jax.jit(round_with_scale, static_argnums=1)(jnp.asarray(weight), grid)
    groups = np.asarray(rounded).reshape(len(scale), -1, 6)
    codes = groups / np.asarray(scale)[:, None]
    if grid.integer_bits is None:
        codes = np.asarray(CODEBOOKS[grid.codebook].nearest(jnp.asarray(codes)))
    else:
        codes = np.rint(codes)
        assert np.abs(codes).max() < 2 ** (grid.integer_bits - 1)
    np.testing.assert_allclose(codes * np.asarray(scale)[:, None], groups, rtol=1e-6)
    if clip == "mse":
        plain = fake_quantise(jnp.asarray(weight), GRIDS[name], axis=-2)
        searched, before = (np.square(np.asarray(x) - weight).sum() for x in (rounded, plain))
        # A power of two is rarely better than the one that holds the largest value.
        assert searched <= before if grid.scale == "e8m0" else searched < before


@pytest.mark.parametrize("name", ["NVFP4", "MXFP4", "NF4"])
def test_gptq_rounds_to_codes_with_a_smaller_error(name):
    grid, rng = GRIDS[name], np.random.default_rng(6)
    weight = jnp.asarray(rng.normal(size=(128, 24)).astype(np.float32))
    x = rng.normal(size=(300, 128)) @ rng.normal(size=(128, 128))
    hessian = jnp.asarray((x.T @ x).astype(np.float32))
    scale, _ = elementwise_scale_and_zero(weight, grid, axis=-2, clip=1.0)
    nearest = fake_quantise(weight, grid, axis=-2)
    found = solve(weight, hessian, grid)
    codes = np.asarray(found / scale)
    np.testing.assert_allclose(
        CODEBOOKS[grid.codebook].nearest(jnp.asarray(codes)), codes, atol=1e-5
    )

    def error(rounded):
        change = np.asarray(rounded - weight, np.float64)
        return np.trace(change.T @ np.asarray(hessian, np.float64) @ change)

    assert error(found) < 0.7 * error(nearest)
