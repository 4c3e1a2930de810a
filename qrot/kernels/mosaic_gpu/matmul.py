"""The product of 8-bit integers on Hopper's tensor cores, scales and zero points at the end.

The tensor cores read 8-bit weights along the axis that is summed over, so the weight is transposed
before: a pass over it at each call, small beside the product only where there are many tokens.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int8, Int32

from qrot.integers import Quantised
from qrot.kernels.mosaic_gpu.layouts import WGMMA, load

_BLOCK = 128  # tokens and outputs of a block, and bytes along the sum
_FEWEST = 128  # tokens for which it is worth transposing the weight


def refusal(
    x: Quantised | Float[Array, "tokens in"], weight: Int8[Array, "groups size out"], dtype: Any
) -> str | None:
    """Why the kernel cannot do this product; None where it can."""
    groups, size, out = weight.shape
    if not isinstance(x, Quantised):
        return "it is for integers on both sides"
    if jnp.dtype(dtype).name not in ("float32", "bfloat16", "float16"):
        return f"it does float32, bfloat16 and float16, not {jnp.dtype(dtype).name}"
    if groups != 1:
        return "it has no groups"
    if size % _BLOCK or out % _BLOCK:
        return f"{size} inputs and {out} outputs are no multiples of {_BLOCK}"
    if len(x.codes) < _FEWEST:
        return f"{len(x.codes)} tokens are fewer than the {_FEWEST} that it is worth"
    return None


def int8_matmul(
    x: Quantised,
    weight: Int8[Array, "1 in out"],
    scale: Float[Array, "1 out"],
    sums: Int32[Array, "1 out"] | None,
    dtype: Any,
    interpret: Any = None,
) -> Float[Array, "tokens out"]:
    """As the reference, for what `refusal` has nothing against."""
    (tokens, inputs), out = x.codes.shape, weight.shape[2]
    more = -tokens % _BLOCK
    codes = jnp.pad(x.codes, ((0, more), (0, 0)))

    def each(values, kind):
        return jnp.pad(jnp.broadcast_to(values[:, 0], tokens).astype(kind), (0, more))

    asymmetric = x.zero is not None
    zero = each(x.zero if asymmetric else jnp.zeros((1, 1)), jnp.int32)
    sums = jnp.zeros((1, out), jnp.int32) if sums is None else sums
    layout = (plgpu.TilingTransform((8, 128)), plgpu.SwizzleTransform(128))

    def body(x_ref, w_ref, beside_ref, zero_ref, scale_ref, sums_ref, y_ref, y_tile):
        m, n = lax.axis_index("m"), lax.axis_index("n")
        tokens = pl.ds(m * _BLOCK, _BLOCK)
        outputs = pl.ds(n * _BLOCK, _BLOCK)

        def run(total):
            def step(_, x_tile, w_tile):
                plgpu.wgmma(total, x_tile, w_tile.T)
                plgpu.wgmma_wait(1)

            def tiles(first):
                return plgpu.BlockSpec(
                    (_BLOCK, _BLOCK), lambda k: (first, k), transforms=layout, delay_release=1
                )

            plgpu.emit_pipeline(
                step, grid=(inputs // _BLOCK,), in_specs=[tiles(m), tiles(n)],
                max_concurrent_steps=4,
            )(x_ref, w_ref)  # fmt: skip
            return total[...]

        def along(ref, part, axis):
            """A vector of the tile's tokens (axis 0) or outputs (1), over the whole tile."""
            values = load(ref.at[part], WGMMA.reduce(1 - axis), interpret)
            return lax.broadcast_in_dim(values, (_BLOCK, _BLOCK), (axis,))

        total = pl.run_scoped(run, plgpu.WGMMAAccumulatorRef((_BLOCK, _BLOCK), jnp.int32))
        if asymmetric:
            total = total - along(zero_ref, tokens, 0) * along(sums_ref, outputs, 1)
        y = total.astype(jnp.float32) * along(scale_ref, outputs, 1)
        y_tile[...] = (y * along(beside_ref, tokens, 0)).astype(y_tile.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(y_tile, y_ref.at[tokens, outputs])
        plgpu.wait_smem_to_gmem(0)

    width = 128 // jnp.dtype(dtype).itemsize
    y = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((tokens + more, out), dtype),
        grid=((tokens + more) // _BLOCK, out // _BLOCK),
        grid_names=("m", "n"),
        scratch_types=[
            plgpu.SMEM(
                (_BLOCK, _BLOCK),
                dtype,
                transforms=(plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(128)),
            )
        ],
        interpret=interpret or None,
    )(
        codes,
        weight[0].T,
        each(x.scale, jnp.float32),
        zero,
        scale[0].astype(jnp.float32),
        sums[0],
    )
    return y[:tokens]
