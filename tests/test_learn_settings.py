"""The settings of learning: what they say, and what they refuse."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learning import SHORT, W4A4, W16A4

from qrot.errors import InputError
from qrot.grid import Grid
from qrot.learn.settings import Learn
from qrot.learn.starting_point import training_scheme
from qrot.learn.step import move, optimiser_state
from qrot.network import fold
from qrot.rotation.forms import Dense
from qrot.rotation.random import RotationSites
from qrot.rotation.transform import Transform
from qrot.scheme import Override


@pytest.fixture(scope="module")
def network(variant):
    return fold(variant("qwen2").network)


def test_training_weights_at_16_bits_rounds_none(network):
    overrides = (Override("*.down", weights=8), Override("*.o", activations=8))
    scheme = replace(W4A4, overrides=overrides)
    settings = replace(SHORT, weight_bits=16)
    seen = training_scheme(network.replace(scheme=scheme), settings, RotationSites(), 0)
    assert not seen.rounds_weights
    assert seen.overrides == overrides[1:]
    assert replace(W16A4, overrides=overrides).rounds_weights


def test_a_searched_clip_is_one_ratio_in_training(network):
    scheme = replace(W4A4, weights=Grid(4, clip="mse"))
    seen = training_scheme(network.replace(scheme=scheme), SHORT, RotationSites(), 0)
    assert 0.4 < seen.weights.clip < 1
    assert replace(seen, weights=scheme.weights) == scheme


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"objective": "fischer"},
            "learn.objective: there is no 'fischer'; did you mean 'fisher'?",
        ),
        (
            {"optimiser": "muon"},
            "learn.optimiser: there is no 'muon'; expected one of cayley_sgd, ",
        ),
        ({"start": "blanced"}, "learn.start: there is no 'blanced'; did you mean 'balanced'?"),
        ({"schedule": "step"}, "learn.schedule: there is no 'step'; expected one of constant, "),
        ({"online": ("value",)}, "learn.online: there is no 'value'; expected one of key, down"),
        ({"vectors": 1}, "learn.vectors: 1 is below 2"),
        ({"clip_floor": 0.0}, "learn.clip_floor: 0.0 is outside 0 to 1"),
        ({"clip_rate": 0.0}, "learn.clip_rate: 0.0 is not positive"),
    ],
)
def test_settings_that_there_are_none_of(changes, message):
    with pytest.raises(InputError, match=re.escape(message)):
        Learn(**changes)


def test_scales_and_clip_ratios_have_rates_and_a_floor_of_their_own():
    settings = replace(SHORT, scale_rate=0.02, clip_rate=0.1, clip_floor=0.85, learning_rate=0.5)
    transform = Transform(
        {"residual": Dense(jnp.eye(4))},
        {"qkv": jnp.zeros((2, 4))},
        {"qkv": jnp.zeros((2, 4))},
        {"qkv": jnp.array([1.0, 0.9])},
    )
    gradient = jax.tree.map(jnp.ones_like, transform)
    state = optimiser_state(transform, settings)
    # Half of the first step's rate, and Adam's first step is the rate.
    moved, _ = move(transform, gradient, state, 0.25, settings)
    np.testing.assert_allclose(moved.scales["qkv"], -0.01, rtol=1e-4)
    np.testing.assert_allclose(moved.clips["qkv"], [0.95, 0.85], rtol=1e-4)
    assert jnp.array_equal(moved.shifts["qkv"], transform.shifts["qkv"])
