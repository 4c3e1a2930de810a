"""Hadamard matrices: square +-1 matrices H with H H^T = n I.

Every order up to 1024 for which one is known, that is all multiples of 4 but 668, 716 and 892, and
many above. An order is built by the first of these that reaches it: Sylvester's doubling (1867),
Paley's two constructions over a finite field (1933), a Kronecker product of smaller orders,
Goethals and Seidel's array (1967) filled from stored difference families or from T-sequences and
Williamson matrices, and Miyamoto's construction (1991). Each is verified when it is built.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable

import numpy as np
from jaxtyping import Int8

# Supplementary difference sets in Z_v, found by Djokovic: v = 43, 67, 127, 163 (1992), 133, 219
# (1992), 103, 151, 239 (1994), 191, 247 (2008) and, with Golubitsky and Kotsireas, 251 (2014).
# v: a generator h of a subgroup of the units, and four masks. Number the orbits of h on Z_v by
# their smallest members, in ascending order; bit i of a mask says that orbit i is in the set.
_FAMILIES = {
    43: (4, "2c 2c 1a 31"),
    67: (29, "21bb52 72148e 662750 13123c"),
    103: (46, "194aa3db8 20a5bf3c4 1768bd68e 2fd43dc1e"),
    127: (2, "147e2 653d2 7552a 71e58"),
    133: (4, "7b24 18f88 1e862 1b746"),
    151: (8, "5ad54632 1c7d2414 29d301fe 7a9c8f48"),
    163: (38, "489b6 1f302 6f052 79e60"),
    219: (4, "3eb50b0 19289f4 5a96352 315299e"),
    247: (9, "7c02b2ce 1083f706 7ad0b60c 4419e6aa"),
    191: (39, "26f9f108c0 7db051c348 3e61b2942a 5dcc86ba68"),
    239: (10, "48de0a51e 1d7cb1c82 70335f06c 2db967436"),
    251: (20, "507d522147ef4 4ca75cc9f8844 6498e340b4e56 4a7d241acc1ac"),
}

# First halves (0 to (w - 1) / 2) of the symmetric rows of four circulant Williamson matrices of
# order w. Searched for, or for w = (q + 1) / 2 by Turyn's theorem (1972), by our own programs.
_WILLIAMSON = {
    1: "0 0 0 0",
    3: "0 1 2 2",
    5: "1 2 3 3",
    7: "1 6 b b",
    9: "4 b c c",
    11: "a f 9 13",
    13: "1d 22 27 27",
    15: "45 3a c8 c8",
    19: "1ae 51 247 247",
    21: "11a 2e5 382 382",
    25: "5b1 a4e 8fd 8fd",
    27: "89e 1761 3d2e 3d2e",
    31: "735c ca3 a127 a127",
    37: "38644 79bb 1d257 1d257",
    41: "7b446 84bb9 a1e48 a1e48",
    45: "210765 1ef89a 28de24 28de24",
    49: "2afc65 d5039a 244e1b 244e1b",
    61: "e98179b 3167e864 1ca2fbb5 1ca2fbb5",
    63: "2a643cb7 559bc348 de09dae7 de09dae7",
}

# Turyn-type sequences x, y, z, w of lengths n, n, n, n - 1 (a 0 bit leads w). n = 36: Kharaghani
# and Tayfeh-Rezaie (2005); the others: Best, Djokovic, Kharaghani and Ramp (2013).
_TURYN_TYPE = {
    2: "0 0 1 0",
    4: "0 2 3 2",
    6: "4 e b 2",
    8: "2a 7e 61 9",
    10: "2c 32 2b 32",
    12: "dc 18a 93 6a",
    14: "190 2de 74d 235",
    16: "330 dbe d53 656",
    18: "65c 3852 3315 db5",
    20: "6354 298a bcd9 474b",
    22: "113c4 1987a 1aa93 c6b6",
    24: "56d7c 346e2 6b98b 3149a",
    26: "d96b8 d7546 d32b1 68ca7",
    28: "1d0e0c 7da192 6736ad 154d39",
    30: "91c4f4 c3698a d31ea9 6ce4ab",
    32: "19524d4 f5ddaa 2d1c713 34d6276",
    36: "1e57c243d 41ad98439 41611316e be68d442",
}


def _prime_power(q: int) -> tuple[int, int] | None:
    """(p, k) with q = p**k and p prime, or None."""
    if q < 2:
        return None
    p = next((d for d in range(2, math.isqrt(q) + 1) if q % d == 0), q)
    k = 0
    while q % p == 0:
        q, k = q // p, k + 1
    return (p, k) if q == 1 else None


def _field_powers(p: int, k: int) -> list[tuple[int, ...]]:
    """The nonzero elements of GF(p^k), as coefficients from the lowest, in the order of powers.

    x^k is replaced by -(c_0 + ... + c_{k-1} x^{k-1}); of these polynomials the first is taken for
    which the powers of x reach all p^k - 1 nonzero elements.
    """
    one = (1,) + (0,) * (k - 1)
    for low in itertools.product(range(1, p), *[range(p)] * (k - 1)):
        powers: list[tuple[int, ...]] = [one]
        while True:
            *rest, top = powers[-1]
            times_x = zip((0, *rest), low, strict=True)
            element = tuple((coefficient - top * c) % p for coefficient, c in times_x)
            if element == one:
                break
            powers.append(element)
        if len(powers) == p**k - 1:
            return powers
    raise AssertionError(f"no primitive polynomial of degree {k} over GF({p})")


@functools.lru_cache(maxsize=8)
def _jacobsthal(q: int) -> np.ndarray:
    """Jacobsthal matrix Q[x, y] = chi(x - y) of the field GF(q), chi the quadratic character.

    Q is symmetric for q = 1 mod 4 and skew for q = 3 mod 4; Q Q^T = q I - J, Q J = 0.
    """
    field = _prime_power(q)
    assert field is not None
    p, k = field
    # An element's number is its coefficients read in base p.
    base = p ** np.arange(k)
    chi = np.zeros(q, np.int8)
    chi[np.array(_field_powers(p, k)) @ base] = (-1) ** np.arange(q - 1)
    digits = np.arange(q)[:, None] // base % p
    difference = sum((digits[:, None, i] - digits[None, :, i]) % p * base[i] for i in range(k))
    return chi[difference]


def _paley_core(q: int) -> np.ndarray:
    """Conference matrix of order q + 1: zero diagonal, +-1 elsewhere, C C^T = q I."""
    core = np.ones((q + 1, q + 1), np.int8)
    core[0, 0] = 0
    core[1:, 1:] = _jacobsthal(q)
    if q % 4 == 3:
        core[1:, 0] = -1
    return core


def _is_field(q: int, residue: int) -> bool:
    return q % 4 == residue and _prime_power(q) is not None


def _paley_one(order: int) -> np.ndarray:
    """I + C for the skew C of the field of order - 1 elements (Paley 1933, I)."""
    return _paley_core(order - 1) + np.eye(order, dtype=np.int8)


def _paley_two(order: int) -> np.ndarray:
    """C x [[1, 1], [1, -1]] + I x [[1, -1], [-1, -1]], C symmetric (Paley 1933, II)."""
    core = _paley_core(order // 2 - 1)
    outer = np.array([[1, 1], [1, -1]], np.int8)
    inner = np.array([[1, -1], [-1, -1]], np.int8)
    return np.kron(core, outer) + np.kron(np.eye(order // 2, dtype=np.int8), inner)


def _kronecker_split(order: int) -> tuple[int, int] | None:
    """(a, b) with order = a b, both supported and over 1, the smaller first; None if none is."""
    for a in range(2, math.isqrt(order) + 1):
        if order % a == 0 and supported(a) and supported(order // a):
            return a, order // a
    return None


def _miyamoto(order: int) -> np.ndarray:
    """Order 4 q from a Hadamard matrix of order q - 1, q = 1 mod 4 a prime power (Miyamoto 1991).

    With m = (q - 1) / 2: U = diag(N, N), where N [2m, 2m] is the conference matrix of order q + 1
    without two rows and columns, so that U U^T = q I - 2 (I_4 x J_m); V = [[I, K], [-K^T, I]] for
    K Hadamard of order 2m, so that V V^T = q I. U and V fill each other's zeros; hence
    T = U x J_2 + V x [[1, -1], [-1, 1]] has entries +-1 and T T^T = 4 q I - 4 (I_4 x J_2m). Four
    more rows and columns make it Hadamard.
    """
    m = order // 8
    conference = _paley_core(order // 4)[1:]
    # Columns, and rows alike, by the sign in row 1: its row sums in quarters are then -1, 0, 0, 1.
    split = np.argsort(-conference[0, 2:], kind="stable") + 2
    inner = conference[split - 1][:, split]
    hadamard = built(2 * m)
    eye, zero = np.eye(2 * m, dtype=np.int8), np.zeros((2 * m, 2 * m), np.int8)
    u = np.block([[inner, zero], [zero, inner]])
    v = np.block([[eye, hadamard], [-hadamard.T, eye]])
    pair = np.array([[1, 1], [1, 1]], np.int8)
    body = np.kron(u, pair) + np.kron(v, 2 * np.eye(2, dtype=np.int8) - pair)
    # left corner^T = -sums top^T makes the border orthogonal to the body (sums: of T, by quarter).
    left = built(4)
    corner = np.ones((4, 4), np.int8) - 2 * np.eye(4, dtype=np.int8)
    top = (np.diag([1, -1, 1, -1]) @ left @ corner.T).T // 2
    run = np.ones((1, 2 * m), np.int8)
    return np.block([[corner, np.kron(top, run)], [np.kron(left, run.T), body]])


def _goethals_seidel(a, b, c, d) -> np.ndarray:
    """Order 4 v from four +-1 matrices [v, v] with A A^T + B B^T + C C^T + D D^T = 4 v I.

    They are matrices over an abelian group: circulants, or Kronecker products of circulants, in
    whose order of elements the flip R (rows in reverse) makes X R symmetric. The array is
    [[A, BR, CR, DR], [-BR, A, D^T R, -C^T R], ...] (Goethals and Seidel 1967).
    """
    b, c, d = (x[:, ::-1] for x in (b, c, d))
    # X R is symmetric, so X^T R = R X = R (X R) R.
    bt, ct, dt = (x[::-1, ::-1] for x in (b, c, d))
    return np.block([[a, b, c, d], [-b, a, dt, -ct], [-c, -dt, a, bt], [-d, ct, -bt, a]])


def _circulant(row: np.ndarray) -> np.ndarray:
    index = np.arange(len(row))
    return row[(index[None, :] - index[:, None]) % len(row)]


def _difference_families(v: int) -> np.ndarray:
    """Order 4 v from the four supplementary difference sets of Z_v in `_FAMILIES`."""
    generator, masks = _FAMILIES[v]
    subgroup = [1]
    while (power := subgroup[-1] * generator % v) != 1:
        subgroup.append(power)
    smallest = np.min(np.arange(v)[:, None] * np.array(subgroup) % v, axis=1)
    orbit = np.searchsorted(np.unique(smallest), smallest).tolist()
    rows = [np.array([1 - 2 * (int(mask, 16) >> i & 1) for i in orbit]) for mask in masks.split()]
    return _goethals_seidel(*(_circulant(row.astype(np.int8)) for row in rows))


def _signs(digits: str, length: int) -> np.ndarray:
    """+-1 entries from the bits of a hexadecimal number, first entry first, 1 for -1."""
    return np.array([1 - 2 * (int(digits, 16) >> i & 1) for i in reversed(range(length))], np.int8)


def _t_sequences(t: int) -> np.ndarray | None:
    """Four (0, +-1) rows [4, t], disjoint, together full, autocorrelations summing to 0; or None.

    t <= 4: one entry each. t = 3 n - 1: from Turyn-type sequences x, y, z, w of lengths n, n, n,
    n - 1 by way of base sequences (z w, z -w, x, y) (Kharaghani and Tayfeh-Rezaie 2005).
    """
    if t <= 4:
        return np.eye(4, t, dtype=np.int8)
    n = (t + 1) // 3
    if 3 * n - 1 != t or n not in _TURYN_TYPE:
        return None
    x, y, z, w = (_signs(digits, n) for digits in _TURYN_TYPE[n].split())
    rows = np.zeros((4, t), np.int8)
    rows[0, :n], rows[1, n : 2 * n - 1] = z, w[1:]
    rows[2, 2 * n - 1 :], rows[3, 2 * n - 1 :] = (x + y) // 2, (x - y) // 2
    return rows


def _cooper_wallis_split(order: int) -> tuple[int, int] | None:
    """(t, w) with order = 4 t w, T-sequences of length t and Williamson rows of length w."""
    for w in _WILLIAMSON:
        if order % (4 * w) == 0 and _t_sequences(order // (4 * w)) is not None:
            return order // (4 * w), w
    return None


def _cooper_wallis(t: int, w: int) -> np.ndarray:
    """Order 4 t w: T-sequences of length t times Williamson matrices of order w.

    Williamson 1944; Cooper and Wallis 1972. t = 1 is Williamson's own array, w = 1 has T-sequences
    alone.
    """
    halves = [_signs(digits, (w + 1) // 2) for digits in _WILLIAMSON[w].split()]
    a, b, c, d = (_circulant(np.concatenate([half, half[:0:-1]])) for half in halves)
    rows = _t_sequences(t)
    assert rows is not None
    quarters = [_circulant(row) for row in rows]
    columns = [(a, -b, -c, -d), (b, a, -d, c), (c, d, a, -b), (d, -c, b, a)]
    blocks = [
        sum(np.kron(quarter, column[i]) for quarter, column in zip(quarters, columns, strict=True))
        for i in range(4)
    ]
    return _goethals_seidel(*blocks)


def _construction(order: int) -> Callable[[], np.ndarray] | None:
    """Builder of a Hadamard matrix of this order, or None."""
    if order <= 2:
        return lambda: np.array([[1, 1], [1, -1]], np.int8)[:order, :order]
    if order == 4:
        return lambda: np.kron(built(2), built(2))
    if order % 4:
        return None
    # Doubling comes before Paley, so that the matrix of order K 2^m is always that of the smallest
    # such K times Sylvester's, whichever way a transform groups its factors.
    if order % 8 == 0 and supported(order // 2):
        return lambda: np.kron(built(order // 2), built(2))
    if _is_field(order - 1, 3):
        return lambda: _paley_one(order)
    if _is_field(order // 2 - 1, 1):
        return lambda: _paley_two(order)
    if split := _kronecker_split(order):
        return lambda: np.kron(built(split[0]), built(split[1]))
    if order // 4 in _FAMILIES:
        return lambda: _difference_families(order // 4)
    if split := _cooper_wallis_split(order):
        return lambda: _cooper_wallis(*split)
    if _is_field(order // 4, 1) and supported(order // 4 - 1):
        return lambda: _miyamoto(order)
    return None


@functools.lru_cache(maxsize=4096)
def supported(order: int) -> bool:
    """Whether a Hadamard matrix of this order has a construction here."""
    return order >= 1 and _construction(order) is not None


@functools.lru_cache(maxsize=32)
def built(order: int) -> Int8[np.ndarray, "order order"]:
    """The read-only +-1 matrix H [order, order] with H H^T = order I, verified.

    Raises:
        ValueError: where `supported(order)` is false.
    """
    build = _construction(order) if order >= 1 else None
    if build is None:
        raise ValueError(f"a Hadamard matrix of order {order} has no construction here")
    matrix = np.ascontiguousarray(build(), np.int8)
    # Products of +-1 rows are integers below 2^24, so exact in float32, and BLAS makes them fast.
    wide = matrix.astype(np.float32)
    if not np.array_equal(wide @ wide.T, np.diag(np.full(order, order, np.float32))) or np.any(
        np.abs(matrix) != 1
    ):
        raise AssertionError(f"the construction of the Hadamard matrix of order {order} is wrong")
    matrix.setflags(write=False)
    return matrix
