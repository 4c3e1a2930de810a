"""The pictures of a report: their bars, ticks, numbers and pixels say what was measured."""

import io
import math
import re
from pathlib import Path

import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest
import runs
from hypothesis import given, settings
from hypothesis import strategies as st
from pages import Page

from qrot.network import fold
from qrot.report.bars import Bar, differences, perplexity
from qrot.report.heatmap import _palette, _png
from qrot.report.svg import NARROW, WIDE, apart, log_ticks, number, ticks
from qrot.rotation.random import random_rotations
from qrot.rotation.transform import Transform
from qrot.run.anatomy import anatomy, pooled
from qrot.run.inspect import inspect
from qrot.study.compare import Difference


def bars_of(text):
    found = re.findall(
        r'<rect class="bar ([\w ]+)" x="([\d.e+]+)" y="[\d.]+" width="([\d.e+]+)"', text
    )
    return [(kind, float(x), float(width)) for kind, x, width in found]


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_bars_on_a_logarithmic_scale_are_as_long_as_the_nats_lost(width):
    values = {"full": 20.0, "learned": 40.0, "hadamard": 90.0, "none": 3e9}
    kinds = {"full": "full", "learned": "best"}
    drawn = perplexity([Bar(n, {None: v}, kinds.get(n, "plain")) for n, v in values.items()], width)
    bars = bars_of(drawn)
    lengths = [length for _, _, length in bars[1:]]
    nats = [math.log(v / 20) for v in list(values.values())[1:]]
    np.testing.assert_allclose(np.array(lengths) / nats, lengths[0] / nats[0], rtol=1e-3)
    assert all(x >= 0 and x + length <= width for _, x, length in bars)
    assert [kind for kind, _, _ in bars] == ["full", "best", "plain", "plain"]
    assert "logarithmic scale" in drawn
    assert "3.00e+09" in drawn


def test_bars_on_a_linear_scale_begin_at_zero():
    drawn = perplexity([Bar("a", {0: 30.0, 1: 34.0}), Bar("b", {None: 64.0})], WIDE)
    (_, start, a), (_, begin, b) = bars_of(drawn)
    assert start == begin
    assert a / b == pytest.approx(0.5, rel=1e-3)
    assert "logarithmic" not in drawn
    dots = [float(x) for x in re.findall(r'class="seed" cx="([\d.]+)"', drawn)]
    np.testing.assert_allclose([(x - start) / b for x in dots], [30 / 64, 34 / 64], rtol=1e-3)
    assert "32.00 ± 2.83" in drawn


def test_what_is_not_finite_is_said():
    drawn = perplexity([Bar("a", {0: 30.0, 1: math.inf}), Bar("b", {None: 40.0})], WIDE)
    assert drawn.count("not finite") >= 2
    assert "bar plain broken" in drawn
    Page(drawn)
    Page(perplexity([Bar("a", {None: math.nan})], WIDE))


def test_differences_that_are_noise_look_like_it():
    found = [
        ("base", None),
        ("good", Difference(-0.5, (-0.6, -0.4), True, "better")),
        ("one", Difference(0.2, None, False, "one seed: cannot be told from noise")),
    ]
    drawn = differences(found, WIDE)
    kinds = [kind for kind, _, _ in bars_of(drawn)]
    assert kinds == ["best", "plain unsure"]
    assert drawn.count("whisker") == 3
    (_, _, good), (_, _, one) = bars_of(drawn)
    assert good / one == pytest.approx(2.5, rel=1e-3)


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
@settings(max_examples=50, deadline=None)
def test_ticks_are_round_and_few(low, span):
    found = ticks(low, low + span)
    assert 2 <= len(found) <= 11
    slack = 1e-6 * (span + abs(low))
    assert all(low - slack <= tick <= low + span + slack for tick in found)
    assert found == sorted(found)


@given(st.floats(-6, 6), st.floats(0.5, 200))
@settings(max_examples=50, deadline=None)
def test_logarithmic_ticks_are_few(low, decades):
    low, high = 10.0**low, 10.0 ** (low + decades)
    found = log_ticks(low, high)
    assert 1 <= len(found) <= 9
    assert all(low <= tick <= high for tick in found)


def test_numbers_and_labels():
    told = [number(x) for x in (0, 0.25, 1234.5, 222_433, 1.2e9, 2e-7, math.inf)]
    assert told == ["0", "0.25", "1,234", "222,433", "1.2·10⁹", "2·10⁻⁷", "not finite"]
    assert apart([10, 0, 11], 5) == [10, 0, 15]


def test_the_picture_is_what_was_measured():
    indices = np.arange(60, dtype=np.uint8).reshape(5, 12) * 4
    picture = matplotlib.image.imread(io.BytesIO(_png(indices, _palette())), format="png")
    np.testing.assert_array_equal(np.rint(picture[..., :3] * 255), _palette()[indices])


@pytest.mark.parametrize("shape", [(7, 5), (64, 144), (100, 300), (65, 1000)])
def test_pooling_keeps_the_largest(shape):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    found = pooled(x)
    rows, columns = min(shape[0], 64), min(shape[1], 144)
    assert found.shape == (rows, columns)
    expected = np.zeros((rows, columns), np.float32)
    down = np.searchsorted(np.arange(rows) * shape[0] // rows, np.arange(shape[0]), "right") - 1
    across = np.searchsorted(np.arange(columns) * shape[1] // columns, np.arange(shape[1]), "right")
    np.maximum.at(expected, (down[:, None], across[None] - 1), np.abs(x))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.usefixtures("quick_compile")
def test_the_anatomy_is_what_inspect_finds(variant):
    model = variant("llama-biases")
    network = fold(model.network)
    loud = jnp.ones(48).at[jnp.array([5, 30])].set(40.0)
    params = network.params
    scheme = runs.tiny_config(Path("x"), Path("y")).scheme
    network = network.replace(params=params.replace(embed=params.embed * loud), scheme=scheme)
    rows = np.random.default_rng(1).integers(0, 97, (1, 16), np.int32)
    transform = Transform(random_rotations(network.config, 0))
    found = anatomy(network, rows, transform)
    expected = inspect(model.replace(network=network), rows, transform)["sites"]
    assert set(found["sites"]) == set(expected)
    for name, site in found["sites"].items():
        for figure, values in site.items():
            for when in ("before", "after"):
                told = [layer[when][figure] for layer in expected[name]]
                np.testing.assert_allclose(values[when], told, rtol=6e-3)
    one = found["activation"]
    assert {channel for channel, _ in one["loud"][:2]} == {5, 30}
    assert np.shape(one["before"]) == np.shape(one["after"]) == (16, 48)
    assert np.max(one["before"]) == one["loud"][0][1] > np.max(one["after"])
    plain = anatomy(network, rows, None)
    assert set(plain["sites"]["down"]["error"]) == {"before"}
    assert "after" not in plain["activation"]
    still = anatomy(network, rows, Transform())
    assert "after" not in still["activation"]
    assert set(still["sites"]["residual"]["crest"]) == {"before"}
