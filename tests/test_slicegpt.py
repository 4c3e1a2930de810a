"""SliceGPT: the rotation changes nothing, and what is cut is what nobody writes to."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrot.errors import InputError
from qrot.model.forward import forward
from qrot.network import fold_norms, fuse
from qrot.calibrate.moments import layer_by_layer
from qrot.quantize.slicegpt import SliceGpt, cut, principal_directions
from qrot.rotation.forms import Rotations

pytestmark = pytest.mark.usefixtures("quick_compile")
ROWS = np.random.default_rng(7).integers(0, 97, (4, 16), np.int32)


@pytest.fixture(scope="module", params=("llama-biases", "mistral-window", "qwen3-biases"))
def turned(request, variant):
    """(folded model, its principal directions, the parameters rotated by them), in float64."""
    with jax.enable_x64(True):
        model = fold_norms(variant(request.param))
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), model.params)
        # The norms of q and k share eps with those that are cut, and should not have it changed.
        eps = model.config.rms_norm_eps if wide.layers.q_norm is None else 0.0
        model = model.replace(params=wide, config=replace(model.config, rms_norm_eps=eps))
        directions = principal_directions(model.params, model.config, ROWS)
        rotations = Rotations(residual=jnp.asarray(directions))
        params, _, _ = fuse(model.params, rotations, model.config)
    return model, directions, params


def logits(params, config):
    return np.asarray(forward(params, jnp.asarray(ROWS), config))


def test_the_directions_are_orthonormal_and_the_largest_come_first(turned):
    model, directions, params = turned
    np.testing.assert_allclose(directions.T @ directions, np.eye(len(directions)), atol=1e-12)
    sizes = []

    def note(i, layer, seen):
        sizes.append(np.diagonal(seen["qkv"].hessian) + np.diagonal(seen["gate_up"].hessian))
        return layer

    with jax.enable_x64(True):
        layer_by_layer(params, model.config, ROWS, note)
    energy = np.sum(sizes, axis=0)
    assert (np.diff(energy) <= 1e-9 * energy[0]).all()
    assert energy[0] > 2 * energy.mean()


def test_all_directions_are_the_network_itself(turned):
    model, _, params = turned
    with jax.enable_x64(True):
        whole, config = cut(params, model.config, model.config.hidden_size)
        expected = logits(model.params, model.config)
        np.testing.assert_allclose(logits(whole, config), expected, atol=1e-10)


@pytest.mark.parametrize("kept", [40, 8])
def test_what_is_cut_is_what_nobody_writes_to(turned, kept):
    model, _, params = turned
    config = model.config

    def silent(linear):
        return jax.tree.map(lambda x: x.at[..., kept:].set(0), linear)

    layers = params.layers
    with jax.enable_x64(True):
        silenced = params.replace(
            embed=params.embed.at[:, kept:].set(0),
            layers=layers.replace(o=silent(layers.o), down=silent(layers.down)),
        )
        sliced, smaller = cut(params, config, kept)
        assert sliced.embed.shape[1] == smaller.hidden_size == kept
        np.testing.assert_allclose(logits(sliced, smaller), logits(silenced, config), atol=1e-10)


def test_principal_directions_lose_less_than_random_ones(turned):
    model, _, params = turned
    draw = np.random.default_rng(0)
    with jax.enable_x64(True):
        expected = logits(model.params, model.config)
        errors = [np.square(logits(*cut(params, model.config, 32)) - expected).mean()]
        for _ in range(3):
            turn = jnp.asarray(np.linalg.qr(draw.standard_normal((48, 48)))[0])
            other, _, _ = fuse(model.params, Rotations(residual=turn), model.config)
            errors.append(np.square(logits(*cut(other, model.config, 32)) - expected).mean())
    assert errors[0] < min(errors[1:])


def test_how_much_is_kept():
    assert SliceGpt().kept(577) == 577
    assert SliceGpt(0.25).kept(576) == 432
    assert SliceGpt(0.3).kept(576) == 400
    assert SliceGpt(0.999).kept(576) == 8
    with pytest.raises(InputError, match=r"slicegpt\.fraction: 1\.0 is outside 0 to 1"):
        SliceGpt(1.0)


def test_a_tied_embedding_cannot_be_cut(turned):
    model, _, params = turned
    with pytest.raises(ValueError, match="tied"):
        cut(params.replace(head=None), model.config, 8)
    with pytest.raises(ValueError, match="49 of 48"):
        cut(params, model.config, 49)
