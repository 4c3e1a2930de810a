"""Hadamard matrices as transforms have them: split into factors, in blocks, and written out."""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
from jaxtyping import Float64, Int8

from qrot.errors import InputError
from qrot.hadamard.constructions import built, supported

# Part of the definition of H (see `hadamard_factors`): changing them changes the matrices. Above
# _LARGEST_CORE a transform would be close to a dense product, and its constant several megabytes.
_CORE_COST = 32
_LARGEST_CORE = 1024
# Tuning only: what one more pass over the array costs, in multiplications per entry. Measured with
# XLA on a CPU; it moves the cuts between factors, never the matrix.
_PASS_COST = 96


def hadamard_matrix(order: int) -> Int8[np.ndarray, "order order"]:
    """Read-only +-1 matrix H of shape [order, order] with H H^T = order I.

    Raises:
        InputError: which names the largest block that works, if `supported(order)` is false.
    """
    if not supported(order):
        raise InputError(_unsupported(order))
    return built(order)


def _unsupported(n: int) -> str:
    if n < 1:
        return f"a Hadamard matrix has a positive order, not {n}"
    why = f"its odd part has no construction here of up to {_LARGEST_CORE}"
    if n % 4:
        why = "an order over 2 must be a multiple of 4"
    block = max(d for d in range(1, n) if n % d == 0 and hadamard_cores(d) is not None)
    fallback = f"use block={block} for a block-diagonal one"
    if block == 1:
        fallback = "no smaller block than the whole works either"
    return f"no Hadamard transform of order {n}: {why}; {fallback}"


@functools.lru_cache(maxsize=1024)
def hadamard_cores(n: int) -> tuple[int, ...] | None:
    """Orders, ascending, of the factors of n that are not powers of two; None if n has no split.

    Every one is the smallest supported order with its odd part, at most _LARGEST_CORE, and the
    split is the one with the smallest sum of (order + _CORE_COST).
    """
    if n & (n - 1) == 0:
        return ()
    odd = n // (n & -n)
    splits = []
    for divisor in (d for d in range(3, odd + 1, 2) if odd % d == 0):
        core = 4 * divisor
        while n % core == 0 and not supported(core):
            core *= 2
        fits = n % core == 0 and core <= _LARGEST_CORE
        if fits and (rest := hadamard_cores(n // core)) is not None:
            splits.append(tuple(sorted((core, *rest))))
    return min(splits, key=lambda s: (sum(s) + _CORE_COST * len(s), s), default=None)


@functools.lru_cache(maxsize=1024)
def hadamard_factors(n: int) -> tuple[int, ...]:
    """Orders (f_1, ..., f_k), with product n, of the factors of H = H_{f_1} x ... x H_{f_k}.

    For n = K 2^m: K first, the smallest order with its odd part that has a matrix, then powers of
    two. A large K gives way to several smaller ones if n has the twos for it (29568 = 12 * 28 * 88
    and not 924 * 32), and the last one may take in some of the powers of two. The matrix H is set
    by the K's alone: the rest is Sylvester's matrix of order 2^m, however it is cut.

    Raises:
        InputError: which names the largest block that works, if n has no such factors.
    """
    cores = hadamard_cores(n) if n >= 1 else None
    if cores is None:
        raise InputError(_unsupported(n))
    twos = (n // math.prod(cores)).bit_length() - 1
    options = []
    for merged, count in itertools.product(range(twos + 1 if cores else 1), range(twos + 1)):
        left = twos - merged
        if count > left or (left and not count):
            continue
        # `count` powers of two, as equal as can be, larger ones first.
        powers = tuple(2 ** ((left + i) // count) for i in reversed(range(count)))
        head = (*cores[:-1], cores[-1] << merged) if cores else ()
        options.append(head + powers)
    return min(options, key=lambda f: sum(f) + _PASS_COST * len(f)) or (1,)


def hadamard_order(n: int, block: int | None) -> int:
    """The order of H for rows of n; raises InputError where block does not divide n."""
    if block is None:
        return n
    if block < 1 or n % block:
        raise InputError(f"block={block} does not divide the last axis of {n}")
    return block


def hadamard_dense(n: int, block: int | None = None) -> Float64[np.ndarray, "n n"]:
    """The matrix H / sqrt(n) that `fwht` multiplies by.

    Args:
        n: its size.
        block: then it is block-diagonal, with n / block copies of the matrix of this order.

    Raises:
        InputError: where `fwht` does.
    """
    order = hadamard_order(n, block)
    factors = [hadamard_matrix(f).astype(np.float64) for f in hadamard_factors(order)]
    return np.kron(np.eye(n // order), functools.reduce(np.kron, factors) / math.sqrt(order))
