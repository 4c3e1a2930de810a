"""The forms of a rotation: each one's functions against its matrix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from learned import orthogonal

from qrot.errors import InputError
from qrot.rotation.forms import (
    FORMS,
    Blocks,
    Dense,
    Hadamard,
    Kronecker,
    check_size,
    form_name,
    is_rotation,
    orthogonal_parts,
    reorthonormalised,
)

STACKS = [(), (3,), (2, 3)]


def signs(draw, *shape):
    return jnp.asarray(draw.choice([-1.0, 1.0], shape))


def made(form, draw, stack, a, b):
    """A rotation of a * b values in this form."""
    if form == "dense":
        return Dense(orthogonal(draw, *stack, a * b, a * b))
    if form == "blocks":
        return Blocks(orthogonal(draw, *stack, a, b, b))
    if form == "hadamard":
        return Hadamard(signs(draw, *stack, a * b), b)
    left, right = orthogonal(draw, *stack, a, a), orthogonal(draw, *stack, b, b)
    return Kronecker(signs(draw, *stack, a * b), left, right)


@pytest.mark.parametrize("form", FORMS)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(STACKS),
    st.integers(1, 4),
    st.sampled_from([12, 20, 28]),
)
@settings(max_examples=15, deadline=None)
def test_each_form_is_its_matrix(form, seed, stack, a, b):
    draw = np.random.default_rng(seed)
    with jax.enable_x64(True):
        rotation = made(form, draw, stack, a, b)
        dense = rotation.dense()
        n = a * b
        assert (rotation.stack, dense.shape, dense.dtype) == (stack, (*stack, n, n), np.float64)
        np.testing.assert_allclose(
            dense @ dense.mT, np.broadcast_to(np.eye(n), dense.shape), atol=1e-10
        )
        assert np.abs(dense - dense.mT).max() > 1e-3  # or a transpose would go unseen
        x = jnp.asarray(draw.normal(size=(*stack, 2, 5, n)))
        apply, transpose = type(rotation).apply, type(rotation).transpose
        for _ in stack:
            apply, transpose = jax.vmap(apply), jax.vmap(transpose)
        matrix = dense[..., None, :, :]
        np.testing.assert_allclose(apply(rotation, x), x @ matrix, atol=1e-10)
        np.testing.assert_allclose(transpose(rotation, x), x @ matrix.mT, atol=1e-10)
        check_size(
            jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[len(stack) :])[0], rotation), n
        )


@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_named_by_its_type(form):
    rotation = made(form, np.random.default_rng(0), (), 2, 4)
    assert form_name(rotation) == form
    assert is_rotation(rotation)
    assert not is_rotation({"matrix": rotation})


@pytest.mark.parametrize("form", FORMS)
def test_what_is_nearly_orthogonal_becomes_more_so(form):
    """To 3/4 of the square of its error; signs stay as they are."""
    draw = np.random.default_rng(0)
    with jax.enable_x64(True):
        rotation = made(form, draw, (2,), 3, 4)
        parts = orthogonal_parts(rotation)
        off = rotation.replace(
            **{name: x + 1e-4 * draw.normal(size=x.shape) for name, x in parts.items()}
        )
        found = orthogonal_parts(reorthonormalised(off))
        assert found.keys() == parts.keys()
        for name, x in found.items():
            before, after = (
                np.abs(np.linalg.svd(y, compute_uv=False) - 1).max()
                for y in (np.asarray(orthogonal_parts(off)[name]), np.asarray(x))
            )
            assert before > 1e-5
            assert after < 2 * before**2
    if not parts:
        np.testing.assert_array_equal(reorthonormalised(off).signs, rotation.signs)


def test_a_size_without_a_rotation_is_refused():
    with pytest.raises(InputError, match="does not divide"):
        check_size(Hadamard(jnp.ones(56), 5), 56)
    with pytest.raises(InputError, match="54"):
        check_size(Hadamard(jnp.ones(54)), 54)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_a_vector_keeps_its_dtype(form, dtype):
    rotation = jax.tree.map(jnp.float32, made(form, np.random.default_rng(0), (), 2, 12))
    x = jnp.ones((3, 24), dtype)
    assert rotation.apply(x).dtype == rotation.transpose(x).dtype == dtype
