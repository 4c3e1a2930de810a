"""The product with packed 4-bit weights on Hopper, made for a few tokens: decoding.

Then the time goes into reading the weight, so it is read once, as it lies in memory, and unpacked
in registers, from where the tensor cores take it. They multiply 64 rows at least, so the rows are
the outputs and the tokens the columns, of which there are 16 at least. The inputs are shared out
among thread blocks, since a small layer has too few outputs for all processors; their partial sums
are added up after the kernel. Many tokens take the same way, in blocks of 64 (of 32 in float32),
each of which reads and unpacks the weight anew.

Two neighbours of a row are 16 bits with four nibbles: the low and the high one of an even output,
and those of an odd one. Each becomes a bfloat16 by a few operations on bits. Products of bfloat16
are summed in float32, which is exact for integers below 2^24: codes of 8 bits less their zero point
are whole numbers of at most 255, which bfloat16 has, and times 8 for each input that makes 8224
inputs. So one kernel serves integers and others: float16 is two, float32 three bfloat16.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float, Int8

from qrot.integers import Quantised
from qrot.kernels.mosaic_gpu.layouts import WGMMA, cast, load

_PAIRS = 64  # of outputs of a block
_ROWS = (64, 32, 16)  # of bytes of a step
_TOKENS = (16, 32, 64)  # of a block
_COLUMNS = 128  # tokens times parts of numbers, for which there is shared memory
_BLOCKS = 264  # to share the inputs among: two for each of the 132 processors of an H100
_STEPS = 4  # that a block has at least
_PARTS = {"bfloat16": 1, "float16": 2, "float32": 3}  # bfloat16 that a number is cut into


def refusal(
    x: Quantised | Float[Array, "tokens in"], weight: Int8[Array, "groups half out"], dtype: Any
) -> str | None:
    """Why the kernel cannot do this product; None where it can."""
    groups, half, out = weight.shape
    if jnp.dtype(dtype).name not in _PARTS:
        return f"it does {', '.join(_PARTS)}, not {jnp.dtype(dtype).name}"
    if out % (2 * _PAIRS):
        return f"{out} outputs are no multiple of {2 * _PAIRS}"
    if _rows(groups, half) is None:
        return f"groups of {2 * half} inputs are no multiple of 32"
    return None


def _rows(groups: int, half: int) -> int | None:
    """Rows of bytes of a step: a part of a group, or whole groups."""
    fit = (r for r in _ROWS if groups * half % r == 0 and (half % r == 0 or r % half == 0))
    return next(fit, None) if half % _ROWS[-1] == 0 else None


def _parts(
    x: Quantised | Float[Array, "tokens in"], dtype: Any
) -> list[BFloat16[Array, "tokens in"]]:
    """What is multiplied: numbers in bfloat16 that add up to the activations, exactly."""
    if isinstance(x, Quantised):
        codes = x.codes.astype(jnp.float32)
        rest = codes if x.zero is None else codes - x.zero.astype(jnp.float32)
        count = 1
    else:
        rest, count = x.astype(dtype).astype(jnp.float32), _PARTS[jnp.dtype(dtype).name]
    found = []
    for _ in range(count):
        # Not `astype` there and back, which XLA may leave out.
        near = lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7)
        found.append(near.astype(jnp.bfloat16))
        rest = rest - near
    return found


def int4_matmul(
    x: Quantised | Float[Array, "tokens in"],
    weight: Int8[Array, "groups half out"],
    scale: Float[Array, "groups out"],
    dtype: Any,
    interpret: Any = None,
) -> Float[Array, "tokens out"]:
    """As the reference, for what `refusal` has nothing against; zero points need no sums."""
    groups, half, out = weight.shape
    rows = _rows(groups, half)
    assert rows is not None
    tokens = len(x.codes if isinstance(x, Quantised) else x)
    parts = _parts(x, dtype)
    fit = [n for n in _TOKENS if n * len(parts) <= _COLUMNS]
    wide = next((n for n in fit if n >= tokens), fit[-1])
    more = -tokens % wide
    columns = [
        part.reshape(tokens, groups, 2, half).transpose(2, 1, 3, 0).reshape(2, -1, tokens)
        for part in parts
    ]
    # The high nibbles come out 16 times too large.
    columns = [c * jnp.asarray([1, 1 / 16], c.dtype)[:, None, None] for c in columns]
    beside = jnp.pad(jnp.concatenate(columns).reshape(-1, tokens), ((0, 0), (0, more)))
    pairs = lax.bitcast_convert_type(weight.reshape(-1, out // 2, 2), jnp.int16)
    steps = groups * half // rows
    tiles = out // (2 * _PAIRS) * ((tokens + more) // wide)
    shares = max(1, min(steps // _STEPS, _BLOCKS // tiles))
    own = max(1, rows // half)  # groups of a step
    piece = rows // own

    def body(pairs_ref, x_ref, scale_ref, y_ref, y_tile, *scratch):
        share, n, m = (lax.axis_index(name) for name in ("share", "out", "tokens"))
        first = lax.div(share * steps, shares)
        count = (
            steps // shares if steps % shares == 0 else lax.div((share + 1) * steps, shares) - first
        )

        def step(indices, w_tile, *rest):
            *x_tiles, totals = rest
            words = _transposed(w_tile, interpret)
            for group in range(own):
                inputs = pl.ds(group * piece, piece)
                found = products(
                    _nibbles(words[:, group * piece : (group + 1) * piece]),
                    [tile.at[inputs] for tile in x_tiles],
                    *scratch,
                )
                if groups > 1:
                    place = lax.div((first + indices[0]) * rows, half) + group
                    found = [f * scales(place, odd) for odd, f in enumerate(found)]
                totals = tuple(t + f for t, f in zip(totals, found, strict=True))
            return totals

        def scales(group, odd):
            ref = scale_ref.at[group, pl.ds(n * _PAIRS, _PAIRS), odd]
            values = load(ref, WGMMA.reduce(1), interpret)
            return lax.broadcast_in_dim(values, (_PAIRS, wide), (0,))

        def products(nibbles, tiles, scratch=None):
            """The sums of the even and of the odd outputs; tiles of low and high, by parts."""

            def run(even, odd):
                for number, values in enumerate(nibbles):
                    if scratch is not None:  # interpreters take none from registers
                        scratch[:, :piece] = values
                        values = scratch.at[:, pl.ds(0, piece)]
                    for tile in tiles[number % 2 :: 2]:
                        plgpu.wgmma(odd if number > 1 else even, values, tile)
                plgpu.wgmma_wait(0)
                return even[...], odd[...]

            total = plgpu.WGMMAAccumulatorRef((_PAIRS, wide), jnp.float32)
            return pl.run_scoped(run, total, total)

        def columns(number):
            offset = number * steps + first
            layout = _layout(jnp.bfloat16, math.gcd(wide, piece, 64))
            return plgpu.BlockSpec((rows, wide), lambda i: (offset + i, m), transforms=layout)

        zeros = cast(jnp.zeros((_PAIRS, wide), jnp.float32), WGMMA, interpret)
        totals = plgpu.emit_pipeline(
            step,
            grid=(count,),
            in_specs=[
                plgpu.BlockSpec(
                    (rows, _PAIRS), lambda i: (first + i, n), transforms=_layout(jnp.int16, _PAIRS)
                ),
                *(columns(number) for number in range(2 * len(parts))),
            ],
            max_concurrent_steps=_STEPS,
            init_carry=(zeros, zeros),
        )(pairs_ref, *(x_ref for _ in range(2 * len(parts))))
        for odd, total in enumerate(totals):
            y_tile[odd] = total if groups > 1 else total * scales(0, odd)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(
            y_tile, y_ref.at[share, :, pl.ds(n * _PAIRS, _PAIRS), pl.ds(m * wide, wide)]
        )
        plgpu.wait_smem_to_gmem(0)

    y = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((shares, 2, out // 2, tokens + more), jnp.float32),
        grid=(shares, out // (2 * _PAIRS), (tokens + more) // wide),
        grid_names=("share", "out", "tokens"),
        scratch_types=[
            plgpu.SMEM((2, _PAIRS, wide), jnp.float32),
            *([plgpu.SMEM((_PAIRS, rows), jnp.bfloat16)] if interpret else []),
        ],
        interpret=interpret or None,
    )(pairs, beside, scale.astype(jnp.float32).reshape(groups, out // 2, 2))
    y = y.sum(0)[..., :tokens].transpose(2, 1, 0).reshape(tokens, out)
    if isinstance(x, Quantised):
        y = y * x.scale.astype(jnp.float32)
    return y.astype(dtype)


def _layout(dtype: Any, width: int):
    size = width * jnp.dtype(dtype).itemsize
    return (plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(size))


def _transposed(tile, interpret):
    """[rows, pairs] in shared memory as [pairs, rows] in the registers of a left operand."""
    if interpret:  # that of jax 0.10.2 transposes no references
        return tile[...].T
    words = load(tile.T, plgpu.Layout.WGMMA_TRANSPOSED, interpret, optimized=True)
    return plgpu.layout_cast(words, WGMMA)


def _nibbles(words):
    """bfloat16 of the nibbles of even and of odd outputs: low, 16 times high; low, 16 times high.

    A low one with its sign bit flipped is itself and 8, so 0x4308 ^ it is 128 + 8 + it. Of a high
    one, 128 and its lower three bits times 16 are 0x4300 | those, and 128 or 256 by its sign bit
    0x4300 | that, since it falls on the exponent.
    """

    def bits(masked, others):
        return lax.bitcast_convert_type(masked ^ jnp.int16(others), jnp.bfloat16)

    found = []
    for word in (words, lax.shift_right_logical(words, jnp.full_like(words, 8))):
        found.append(bits(word & jnp.int16(15), 0x4308) - jnp.bfloat16(136))
        found.append(bits(word & jnp.int16(0x70), 0x4300) - bits(word & jnp.int16(0x80), 0x4300))
    return found
