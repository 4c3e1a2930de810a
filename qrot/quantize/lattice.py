"""Codebooks of eight numbers at a time, cut out of the lattice E8: E8P at 2 bits, more on top.

Tseng, Chee, Sun, Kuleshov, De Sa: QuIP#, ICML 2024, arXiv 2402.04396. All tables are made from
their definitions. E8 is the densest packing in eight dimensions: D8, the integer vectors of even
sum, together with D8^ = D8 + 1/2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import combinations, product

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

SIZE = 8  # numbers that are rounded together
SHIFTS = (0.25, -0.25)
_EXACT = jax.lax.Precision.HIGHEST

# Factors on numbers of variance 1 before each codebook of the sum: those of least squared error for
# a standard Gaussian in steps of 0.01 (tests/test_lattice.py searches again).
SCALES: dict[int, tuple[float, ...]] = {2: (1.04,), 3: (0.98, 2.0), 4: (0.89, 3.44)}


@cache
def absolute_values() -> Float[np.ndarray, "256 8"]:
    """The elementwise absolute values of E8P: vectors of 1/2, 3/2 and 5/2, even sums first.

    The 227 of squared length up to 10, and of the 224 of squared length 12 the first 29 in
    lexicographic order of those with five entries of 3/2. (The paper pads, too; which 29 it takes
    is a matter of its table, and of no consequence for the error.)
    """
    every = np.array(list(product((0.5, 1.5, 2.5), repeat=SIZE)))
    length = np.square(every).sum(1)
    padding = every[(length == 12) & (every.max(1) < 2)][:29]
    values = np.concatenate([every[length <= 10], padding])
    return values[np.argsort(values.sum(1) % 2, kind="stable")]


@cache
def e8p() -> Float[np.ndarray, "65536 8"]:
    """All entries of E8P: an absolute value, eight signs, and +-1/4 added to all of it.

    Of the signs seven are free: the sum of an element of D8^ is even, and another sign changes it
    by an odd number. Adding 1/4 gives elements of D8^ + 1/4, subtracting it elements of D8 + 1/4.
    """
    signs = np.array(list(product((1.0, -1.0), repeat=SIZE)))
    signed = (absolute_values()[:, None] * signs).reshape(-1, SIZE)
    signed = signed[signed.sum(1) % 2 == 0]
    return np.concatenate([signed + shift for shift in SHIFTS])


@cache
def e8_bit() -> Float[np.ndarray, "256 8"]:
    """One bit a number: 0, the 240 shortest vectors of E8, of squared length 2, and 15 of squared
    length 4: all but the last of +-2 in one place."""
    halves = np.array(list(product((0.5, -0.5), repeat=SIZE)))
    pairs = np.zeros((0, SIZE))
    for i, j in combinations(range(SIZE), 2):
        for signs in product((1.0, -1.0), repeat=2):
            pairs = np.vstack([pairs, np.eye(SIZE)[[i, j]].T @ signs])
    longer = np.concatenate([2 * np.eye(SIZE), -2 * np.eye(SIZE)])[:15]
    return np.concatenate([np.zeros((1, SIZE)), halves[halves.sum(1) % 2 == 0], pairs, longer])


def nearest_e8p(x: Float[Array, "n 8"]) -> Float[Array, "n 8"]:
    """The entry of E8P next to each x, exactly, by 2 x 256 products in place of 65,536.

    For either shift, what is left of x wants its own signs. Where their number of minus signs is
    not what an absolute value a needs, one sign has to be given up, and it is that of the smallest
    |x_i|, where a_i = 1/2. For if the sign at j is given up while a_i > 1/2 (j = i or not), then
    with a_i - 1 in place of a_i, which is in the book, too, no sign need be: the squared distance
    is less by 2 (2 a_j |x_j| - |x_i|) + 2 a_i - 1 > 0.
    """
    found = [_nearest_signed(x - shift) + shift for shift in SHIFTS]
    errors = [jnp.square(x - near).sum(1, keepdims=True) for near in found]
    return jnp.where(errors[0] <= errors[1], *found)


def nearest_of(x: Float[Array, "n 8"], table: Float[np.ndarray, "m 8"]) -> Float[Array, "n 8"]:
    """The row of a short table next to each x."""
    entries = jnp.asarray(table, x.dtype)
    return entries[jnp.argmax(_closeness(x, entries), 1)]


def round_vectors(
    x: Float[Array, "n 8"], bits: int, scales: Sequence[float | Array] | None = None
) -> Float[Array, "n 8"]:
    """Numbers of variance 1, eight at a time, at 2, 3 or 4 bits a number.

    2: E8P. 3 and 4: the same, and what it leaves by the one-bit codebook of E8 or by E8P again
    (residual vector quantisation).

    Args:
        x: the numbers.
        bits: of each.
        scales: one for each codebook; `SCALES` if None.
    """
    books: dict[int, tuple[Callable, ...]] = {
        2: (nearest_e8p,),
        3: (nearest_e8p, lambda rest: nearest_of(rest, e8_bit())),
        4: (nearest_e8p, nearest_e8p),
    }
    so_far = jnp.zeros_like(x)
    for book, scale in zip(books[bits], scales or SCALES[bits], strict=True):
        so_far = so_far + book((x - so_far) * scale) / scale
    return so_far


def _closeness(x, entries):
    """x . e - |e|^2 / 2, which is largest for the nearest entry."""
    return jnp.matmul(x, entries.T, precision=_EXACT) - jnp.square(entries).sum(1) / 2


def _nearest_signed(x: Float[Array, "n 8"]) -> Float[Array, "n 8"]:
    """The signed absolute value of E8P next to each x."""
    entries = jnp.asarray(absolute_values(), x.dtype)
    evens = int((absolute_values().sum(1) % 2 == 0).sum())
    size = jnp.abs(x)
    minus = (x < 0).sum(1, keepdims=True) % 2 == 1  # an odd number of them
    smallest = jnp.arange(SIZE) == jnp.argmin(size, 1)[:, None]
    given_up = jnp.where(smallest, -size, size)
    for_even = _closeness(jnp.where(minus, given_up, size), entries[:evens])
    for_odd = _closeness(jnp.where(minus, size, given_up), entries[evens:])
    chosen = jnp.argmax(jnp.concatenate([for_even, for_odd], 1), 1)
    near = entries[chosen]
    near = jnp.where(smallest & ((chosen >= evens)[:, None] != minus), -near, near)
    return jnp.where(x < 0, -near, near)
