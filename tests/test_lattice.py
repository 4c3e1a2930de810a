"""The codebooks cut out of E8: what is in them, the search in them, and their error."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrot.quantize.lattice import (
    SCALES,
    SIZE,
    absolute_values,
    e8_bit,
    e8p,
    nearest_e8p,
    nearest_of,
    round_vectors,
)

# A standard Gaussian, rounded: E8P's is the paper's figure, to which 29 vectors are free. Lloyd and
# Max's quantiser of as many bits, the best that rounds every number for itself, has the second.
ERRORS = {2: (0.0916, 0.1175), 3: (0.0297, 0.03454), 4: (0.00835, 0.009497)}
BOOKS = {"e8p": (e8p, nearest_e8p), "e8_bit": (e8_bit, lambda x: nearest_of(x, e8_bit()))}


def in_e8(x):
    """Whether rows are all integers or all halves of odd numbers, of even sum."""
    integers = (x == np.rint(x)).all(1)
    halves = (x - 0.5 == np.rint(x - 0.5)).all(1)
    return (integers | halves) & (x.sum(1) % 2 == 0)


def gaussian(count, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal((count, SIZE)).astype(dtype)


def test_absolute_values():
    values = absolute_values()
    assert set(values.ravel()) == {0.5, 1.5, 2.5}
    lengths, counts = np.unique(np.square(values).sum(1), return_counts=True)
    np.testing.assert_array_equal(lengths, [2, 4, 6, 8, 10, 12])
    np.testing.assert_array_equal(counts, [1, 8, 28, 64, 126, 29])
    assert len(np.unique(values, axis=0)) == 256


def test_e8p_has_65536_entries_all_in_the_lattice_moved_by_a_quarter():
    entries = e8p()
    assert len(np.unique(entries, axis=0)) == len(entries) == 2**16
    assert in_e8(entries - 0.25).all()
    # one half of it in each of the two halves of E8
    assert (entries[:, 0] - 0.25 == np.rint(entries[:, 0] - 0.25)).sum() == 2**15
    np.testing.assert_array_equal(np.unique(np.abs(entries)), np.arange(1, 12, 2) / 4)


def test_the_one_bit_book():
    entries = e8_bit()
    assert len(np.unique(entries, axis=0)) == len(entries) == 2**8
    assert in_e8(entries).all()
    lengths, counts = np.unique(np.square(entries).sum(1), return_counts=True)
    np.testing.assert_array_equal(lengths, [0, 2, 4])
    np.testing.assert_array_equal(counts, [1, 240, 15])


@pytest.mark.parametrize("size", [0.3, 1.04, 1.5, 4.0])
@pytest.mark.parametrize("book", BOOKS)
def test_nearest_is_nearest_of_all(book, size):
    entries, search = BOOKS[book]
    entries = entries()
    with jax.enable_x64(True):
        x = size * gaussian(3000, dtype=np.float64)
        found = np.asarray(jax.jit(search)(jnp.asarray(x)))
    least = np.concatenate(
        [
            (np.square(entries).sum(1) - 2 * part @ entries.T).min(1) + np.square(part).sum(1)
            for part in np.split(x, 10)
        ]
    )
    np.testing.assert_allclose(np.square(x - found).sum(1), least, rtol=1e-9)
    of_book = {row.tobytes() for row in entries}
    assert all(row.tobytes() in of_book for row in found)


@pytest.mark.parametrize("book", BOOKS)
def test_entries_are_their_own_nearest(book):
    entries, search = BOOKS[book]
    some = entries()[:: max(1, len(entries()) // 4096)].astype(np.float32)
    np.testing.assert_array_equal(jax.jit(search)(jnp.asarray(some)), some)


@partial(jax.jit, static_argnums=1)
def squared_error(x, bits, scales):
    return jnp.square(round_vectors(x, bits, scales) - x).mean()


@pytest.mark.parametrize("bits", SCALES)
def test_the_error_of_a_gaussian(bits):
    x = jnp.asarray(gaussian(2**14))
    found = float(squared_error(x, bits, SCALES[bits]))
    expected, scalar = ERRORS[bits]
    assert found == pytest.approx(expected, rel=0.015)
    assert found < scalar
    assert found == pytest.approx(float(jnp.square(round_vectors(x, bits) - x).mean()))
    for i in range(len(SCALES[bits])):  # and no other scale is better
        for change in (-0.1, 0.1):
            scales = list(SCALES[bits])
            scales[i] += change
            assert squared_error(x, bits, tuple(scales)) > found
