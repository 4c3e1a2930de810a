"""SliceGPT: the rotation changes nothing, and what is cut is what nobody writes to."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrot.calibrate.moments import gather_layers
from qrot.errors import InputError
from qrot.grid import Grid
from qrot.model.forward import forward
from qrot.network import fold, fuse
from qrot.quantize.rtn import rtn
from qrot.quantize.slicegpt import SliceGpt, cut, principal_directions
from qrot.rotation.forms import Dense
from qrot.rotation.transform import Transform
from qrot.scheme import Scheme
from qrot.sites import INPUTS

pytestmark = pytest.mark.usefixtures("quick_compile")
ROWS = np.random.default_rng(7).integers(0, 97, (4, 16), np.int32)


def rotated(network, directions):
    return fuse(network, Transform({"residual": Dense(jnp.asarray(directions))}))


@pytest.fixture(scope="module", params=("llama-biases", "mistral-window", "qwen3-biases"))
def three(request, variant):
    """(folded network, its principal directions, the network rotated by them), in float64."""
    with jax.enable_x64(True):
        network = fold(variant(request.param).network)
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), network.params)
        # The norms of q and k share eps with those that are cut, and should not have it changed.
        eps = network.config.rms_norm_eps if wide.layers.q_norm is None else 0.0
        network = network.replace(params=wide, config=replace(network.config, rms_norm_eps=eps))
        directions = principal_directions(network, ROWS)
        return network, directions, rotated(network, directions)


def logits(network):
    return np.asarray(forward(network, jnp.asarray(ROWS)))


def test_the_directions_are_orthonormal_and_the_largest_come_first(three):
    _, directions, found = three
    np.testing.assert_allclose(directions.T @ directions, np.eye(len(directions)), atol=1e-12)
    sizes = []

    def note(i, moments):
        both = moments["qkv"].hessian, moments["gate_up"].hessian
        sizes.append(np.diagonal(both[0]) + np.diagonal(both[1]))

    with jax.enable_x64(True):
        gather_layers(found, ROWS, INPUTS, note)
    energy = np.sum(sizes, axis=0)
    assert (np.diff(energy) <= 1e-9 * energy[0]).all()
    assert energy[0] > 2 * energy.mean()


def test_all_directions_are_the_network_itself(three):
    network, _, found = three
    with jax.enable_x64(True):
        whole = cut(found, network.config.hidden_size)
        np.testing.assert_allclose(logits(whole), logits(network), atol=1e-10)


@pytest.mark.parametrize("kept", [40, 8])
def test_what_is_cut_is_what_nobody_writes_to(three, kept):
    found = three[2]

    def silent(linear):
        return jax.tree.map(lambda x: x.at[..., kept:].set(0), linear)

    params, layers = found.params, found.params.layers
    with jax.enable_x64(True):
        silenced = params.replace(
            embed=params.embed.at[:, kept:].set(0),
            layers=layers.replace(o=silent(layers.o), down=silent(layers.down)),
        )
        sliced = cut(found, kept)
        assert sliced.params.embed.shape[1] == sliced.config.hidden_size == kept
        np.testing.assert_allclose(
            logits(sliced), logits(found.replace(params=silenced)), atol=1e-10
        )


def test_principal_directions_lose_less_than_random_ones(three):
    network, _, found = three
    draw = np.random.default_rng(0)
    with jax.enable_x64(True):
        expected = logits(network)
        errors = [np.square(logits(cut(found, 32)) - expected).mean()]
        for _ in range(3):
            other = rotated(network, np.linalg.qr(draw.standard_normal((48, 48)))[0])
            errors.append(np.square(logits(cut(other, 32)) - expected).mean())
    assert errors[0] < min(errors[1:])


def test_how_much_is_kept():
    assert SliceGpt().kept(577) == 577
    assert SliceGpt(0.25).kept(576) == 432
    assert SliceGpt(0.3).kept(576) == 400
    assert SliceGpt(0.999).kept(576) == 8
    with pytest.raises(InputError, match=r"slicegpt\.fraction: 1\.0 is outside 0 to 1"):
        SliceGpt(1.0)


def test_what_cannot_be_cut(three):
    found = three[2]
    with pytest.raises(ValueError, match="tied"):
        cut(found.replace(params=found.params.replace(head=None)), 8)
    with pytest.raises(ValueError, match="49 of 48"):
        cut(found, 49)
    with jax.enable_x64(True):
        on_grid = rtn(found.replace(scheme=Scheme(Grid(4))))
    with pytest.raises(ValueError, match="on their grid: cut first"):
        cut(on_grid, 8)
