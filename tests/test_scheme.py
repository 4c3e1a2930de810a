"""Schemes: what they refuse, what they are called, and which bits an override gives which layer."""

import pytest

from qrot.errors import InputError
from qrot.grid import Grid
from qrot.scheme import Override, Scheme, layer_scheme, segments

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"activations": Grid(granularity="channel")}, "activations: granularity 'channel'"),
        ({"weights": Grid(granularity="token")}, "weights: granularity 'token'"),
        ({"keys": Grid(granularity="channel")}, "keys: granularity 'channel'"),
        ({"activations": Grid(clip="mse")}, "activations: clip 'mse'"),
        ({"values": Grid(clip="mse")}, "values: clip 'mse'"),
    ],
)
def test_schemes_that_make_no_sense(arguments, message):
    with pytest.raises(InputError, match=message):
        Scheme(**arguments)


def test_a_scheme_knows_the_usual_granularities_and_its_name():
    scheme = Scheme(Grid(4, clip="mse"), Grid(8), Grid(3), Grid(3))
    assert (scheme.weights.granularity, scheme.activations.granularity) == ("channel", "token")
    assert scheme.keys.granularity == scheme.values.granularity == "head"
    assert scheme.name == "W4A8KV3"
    assert Scheme(keys=Grid(4), values=Grid(2)).name == "W16A16K4V2"
    assert not Scheme().weights.on
    assert Grid(15).on


def test_the_last_override_that_matches_wins():
    overrides = (
        Override("*.down", weights=8, activations=8),
        Override("layers.0.*", activations=6),
        Override("layers.1.down", weights=3),
        Override("layers.1.keys", keys=2, values=2),
    )
    scheme = Scheme(Grid(4), Grid(4), Grid(4), Grid(4), overrides)
    first, second = (layer_scheme(scheme, i) for i in range(2))
    assert first.weights["down"].bits == 8
    assert second.weights["down"].bits == 3
    assert second.weights["up"].bits == 4
    assert [first.sites[site].bits for site in ("down", "qkv", "keys")] == [6, 6, 4]
    assert [second.sites[site].bits for site in ("down", "qkv")] == [8, 4]
    cache = [second.sites[site].bits for site in ("keys", "values")]
    assert cache == [2, 4]  # the name of values does not match
    assert first.sites["down"].granularity == "token"


def test_readers_of_one_input_need_one_width():
    scheme = Scheme(overrides=(Override("layers.1.q", activations=8),))
    layer_scheme(scheme, 0)
    with pytest.raises(InputError, match="q, k, v share their input in layer 1"):
        layer_scheme(scheme, 1)
    with pytest.raises(InputError, match="bits: 1"):
        layer_scheme(Scheme(overrides=(Override("*", weights=1),)), 0)


def test_segments_are_runs_of_equal_layers():
    scheme = Scheme(Grid(4), overrides=(Override("layers.[23].up", weights=8),))
    runs = segments(scheme, 6)
    assert [(start, stop) for start, stop, _ in runs] == [(0, 2), (2, 4), (4, 6)]
    assert [grids.weights["up"].bits for *_, grids in runs] == [4, 8, 4]
    assert segments(Scheme(), 6) == [(0, 6, layer_scheme(Scheme(), 0))]


@pytest.mark.parametrize(
    "override",
    [
        Override("*.down_proj", weights=8),
        Override("layers.3.*", weights=8),
        Override("*.q", keys=8),
    ],
)
def test_an_override_that_changes_nothing_is_refused(override):
    with pytest.raises(InputError, match="changes nothing"):
        segments(Scheme(overrides=(override,)), 3)
