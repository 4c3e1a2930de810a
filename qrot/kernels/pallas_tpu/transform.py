"""The Walsh-Hadamard transform of rows that are in a TPU's vector memory.

H = H_K x Sylvester(2^m). A TPU's vectors are 128 lanes wide, and reshaping to fewer does not
compile, so the transform works on slabs of whole vectors: a product of each slab with a small
matrix, butterflies between slabs, and for K > 1 signed sums of slabs. All matrices are of 0 and
+-1, which bfloat16 holds exactly; the scale comes last.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from qrot.hadamard.factors import hadamard_cores, hadamard_dense, hadamard_matrix

LANES = 128
_SMALL, _DENSE = 256, 1024  # up to _SMALL always one product, up to _DENSE where nothing is better
_LARGEST_CORE = 256  # K signed sums an entry are vector operations: beyond, XLA's products win
_SPREAD = 32  # slabs that butterflies go over; more would not stay near the registers
MEMORY = 8 * 2**20  # bytes of vector memory to plan for, of 16 MiB
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Plan:
    """How a unit of `width` lanes is transformed; with blocks, a row has several units.

    Attributes:
        width: lanes of a unit.
        slab: lanes of a product.
        spread: slabs (a power of two) that butterflies go over.
        core: K of the signed sums, 1 for none.
        repeat: rows of H_K that share a slab, where 2^m < 128; each slab is then multiplied by as
            many matrices.
    """

    width: int
    slab: int
    spread: int = 1
    core: int = 1
    repeat: int = 1


@functools.lru_cache(maxsize=256)
def plan(n: int, block: int | None) -> Plan | None:
    """The plan for rows of n with blocks of this order; None where there is none."""
    order = n if block is None else block
    width = order
    if order % LANES:
        width = math.lcm(order, LANES)  # neighbouring blocks, multiplied together
        if n % width or width > _DENSE:
            width = n
    if width <= _SMALL:
        return Plan(width, width)
    cores = hadamard_cores(order)
    if cores is None:
        return None
    core = math.prod(cores)
    power = order // core
    sums = width == order and width % LANES == 0 and core <= _LARGEST_CORE
    if sums and power >= LANES:
        slab = max(LANES, power // _SPREAD)
        if slab <= _DENSE:
            return Plan(width, slab, power // slab, core)
    if width <= _DENSE:
        return Plan(width, width)
    if sums and power < LANES:
        return Plan(width, LANES, 1, core, LANES // power)
    return None


def block_rows(rows: int, row_bytes: int, fixed: int = 0) -> int:
    """Rows of a block: a multiple of 8, or all; 0 where not even 8 fit."""
    for count in (512, 256, 128, 64, 32, 16, 8):
        if count * row_bytes + fixed <= MEMORY:
            return min(count, rows)
    return 0


def scratch_bytes(own: Plan) -> int:
    """Bytes of scratch and of temporaries that a row of a unit takes."""
    return 4 * own.width * (1 + own.repeat * (own.core > 1))


@functools.lru_cache(maxsize=64)
def constants(own: Plan, block: int | None, transpose: bool) -> tuple[np.ndarray, np.ndarray]:
    """The matrices of the slabs [repeat, slab, slab] and of the signed sums [K, K]."""
    if own.slab == own.width:
        dense = np.sign(hadamard_dense(own.width, block)).astype(np.int8)
        return (dense.T if transpose else dense)[None], np.ones((1, 1), np.int32)
    size = own.slab // own.repeat
    sylvester = hadamard_matrix(size)
    slabs = np.zeros((own.repeat, own.slab, own.slab), np.int8)
    for i in range(own.repeat):
        slabs[i, i * size : (i + 1) * size] = np.tile(sylvester, own.repeat)
    cores = [hadamard_matrix(core) for core in hadamard_cores(own.width) or ()]
    core = functools.reduce(np.kron, cores, np.ones((1, 1), np.int8)).astype(np.int32)
    return slabs, core.T if transpose else core


def exact_dot(x: Float[Array, "rows n"], matrix: Any, contract: int = 0) -> Float[Array, "rows m"]:
    """x M in float32.

    A float32 is the sum of three bfloat16: three passes through the matrix unit, where the product
    of two float32 takes six.

    Args:
        x: rows.
        matrix: M, exact in bfloat16.
        contract: the axis of M that is summed over.
    """

    def dot(part):
        return lax.dot_general(
            part, matrix, (((1,), (contract,)), ((), ())), preferred_element_type=jnp.float32
        )

    if x.dtype == jnp.bfloat16:
        return dot(x)
    # Cut off, not rounded: XLA, which interprets this, may drop a conversion there and back.
    x = x.astype(jnp.float32)
    high = _upper_half(x)
    rest = x - high
    middle = _upper_half(rest)
    parts = (rest - middle, middle, high)  # the smallest first
    return functools.reduce(jnp.add, [dot(part.astype(jnp.bfloat16)) for part in parts])


def _upper_half(x):
    bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-65536)
    return lax.bitcast_convert_type(bits, jnp.float32)


def transform(
    read: Callable[[Any, int], Any],
    write: Callable[[Any, int, Any], None],
    slabs: Any,
    signs: Any,
    scratch: Any,
    own: Plan,
    scale: float,
) -> None:
    """One unit, within a kernel.

    Args:
        read: (first lane, lanes) -> [rows, lanes], in bfloat16 or float32.
        write: (first lane, lanes, float32 values).
        slabs: a reference to the matrices of `constants`.
        signs: a reference to its signs, in scalar memory.
        scratch: room for [slabs, rows, slab] in float32, where there are sums.
        own: the plan.
        scale: of the results.
    """
    run, count = own.spread * own.slab, own.spread * own.repeat

    def products(group: Any) -> list:
        values = read(_multiple(group * run, own.slab), run)
        cut = [values[:, i * own.slab : (i + 1) * own.slab] for i in range(own.spread)]
        return _butterflies([exact_dot(x, slabs[i]) for x in cut for i in range(own.repeat)], own)

    if own.core == 1:
        for i, part in enumerate(products(0)):
            write(i * own.slab, own.slab, part * scale)
        return

    def hold(group, _):
        for i, part in enumerate(products(group)):
            scratch[group * count + i] = part
        return 0

    groups = own.core // own.repeat
    lax.fori_loop(0, groups, hold, 0)

    def sums(group, _):
        for j in range(own.spread):

            def add(step, total, j=j):
                for k in (4 * step + i for i in range(4)):  # every K is a multiple of 4
                    sign = _sign(signs, k, group, own)
                    total = total + sign * scratch[k * own.spread + j]
                return total

            total = lax.fori_loop(0, own.core // 4, add, jnp.zeros(scratch.shape[1:], jnp.float32))
            write(_multiple(group * run + j * own.slab, own.slab), own.slab, total * scale)
        return 0

    lax.fori_loop(0, groups, sums, 0)


def _butterflies(parts: list, own: Plan) -> list:
    """Sylvester's matrix over the slabs of a run."""
    step = 1
    while step < own.spread:
        for i in (i for i in range(own.spread) if not i & step):
            a, b = parts[i], parts[i + step]
            parts[i], parts[i + step] = a + b, a - b
        step *= 2
    return parts


def _sign(signs, k, group, own: Plan):
    """The entries of row k of H_K for a slab: one number, or one for each of its parts."""
    first = signs[k, group * own.repeat].astype(jnp.float32)
    if own.repeat == 1:
        return first
    lane = lax.broadcasted_iota(jnp.int32, (1, own.slab), 1)
    values = jnp.full((1, own.slab), first)
    for i in range(1, own.repeat):
        sign = signs[k, group * own.repeat + i].astype(jnp.float32)
        values = jnp.where(lane >= i * (own.slab // own.repeat), sign, values)
    return values


def _multiple(lane, of: int):
    """A lane that the compiler is told to be a multiple of something."""
    return lane if isinstance(lane, int) else pl.multiple_of(lane, of)


def prepared(own: Plan, block: int | None, transpose: bool) -> tuple[jax.Array, jax.Array]:
    """`constants` as arrays for a kernel."""
    slabs, signs = constants(own, block, transpose)
    return jnp.asarray(slabs, jnp.bfloat16), jnp.asarray(signs, jnp.int32)
