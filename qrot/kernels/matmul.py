"""Products of quantised activations with quantised weights.

A weight is [groups, rows, out]: `groups` runs of inputs, each with a scale for every output. On 8
bits rows are the inputs of a group, on 4 bits half as many (`pack_int4` along rows).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int8, Int32

from qrot.errors import InputError
from qrot.integers import Quantised
from qrot.kernels.dispatch import choose, device_of, interpreting
from qrot.kernels.pack import unpack_int4


def int8_matmul(
    x: Quantised | Float[Array, "tokens in"],
    weight: Int8[Array, "groups size out"],
    scale: Float[Array, "groups out"],
    sums: Int32[Array, "groups out"] | None = None,
    *,
    dtype: Any = jnp.float32,
    implementation: str | None = None,
) -> Float[Array, "tokens out"]:
    """x W, W the 8-bit weight times its scales, accumulated in integers within a group.

    Args:
        x: codes [tokens, in] with scale [tokens, 1] (or [1, 1]), times which and the weight's scale
            the integers are multiplied at last. Or x is not quantised, then the weight is widened.
        weight: integers.
        scale: of the weight.
        sums: of the weight's codes over a group's inputs; needed where x has a zero [tokens, 1]:
            x W = s (q W - zero sums).
        dtype: of the result.
        implementation: see `qrot.kernels.dispatch`.

    Raises:
        InputError: where x has groups, or the implementation cannot do this.
    """
    return _dispatched("int8_matmul", x, weight, scale, sums, dtype, implementation)


def int4_matmul(
    x: Quantised | Float[Array, "tokens in"],
    weight: Int8[Array, "groups half out"],
    scale: Float[Array, "groups out"],
    sums: Int32[Array, "groups out"] | None = None,
    *,
    dtype: Any = jnp.float32,
    implementation: str | None = None,
) -> Float[Array, "tokens out"]:
    """x W as `int8_matmul`, for a packed 4-bit weight and x of 4 or 8 bits, or not quantised."""
    return _dispatched("int4_matmul", x, weight, scale, sums, dtype, implementation)


def _dispatched(name, x, weight, scale, sums, dtype, implementation) -> Float[Array, "tokens out"]:
    if isinstance(x, Quantised) and x.scale.shape[-1] != 1:
        raise InputError("activations in groups have no integer product; use granularity token")
    packed = name == "int4_matmul"

    def tpu():
        from qrot.kernels.pallas_tpu.matmul import refusal

        return refusal(x, weight, dtype, packed)

    def gpu():
        from qrot.kernels.mosaic_gpu import int4_matmul, matmul

        return (int4_matmul if packed else matmul).refusal(x, weight, dtype)

    refusals = {"pallas_tpu": tpu, "mosaic_gpu": gpu}
    chosen = choose(name, implementation, refusals, (x, weight, scale, sums))
    if chosen == "pallas_tpu":
        from qrot.kernels.pallas_tpu.matmul import product

        return product(x, weight, scale, sums, dtype, packed=packed, interpret=interpreting())
    if chosen == "mosaic_gpu" and packed:
        from qrot.kernels.mosaic_gpu.int4_matmul import int4_matmul

        return int4_matmul(x, weight, scale, dtype, interpreting())
    if chosen == "mosaic_gpu":
        from qrot.kernels.mosaic_gpu.matmul import int8_matmul

        return int8_matmul(x, weight, scale, sums, dtype, interpreting())
    codes = unpack_int4(weight, axis=1) if packed else weight
    return _product(x, codes, scale, sums, dtype)


def _product(x, weight, scale, sums, dtype) -> Float[Array, "tokens out"]:
    """The product in plain JAX, a group after the other."""
    groups, size, out = weight.shape
    if not isinstance(x, Quantised):
        wide = (weight.astype(scale.dtype) * scale[:, None]).reshape(-1, out)
        return x.astype(dtype) @ wide.astype(dtype)
    # On a CPU XLA multiplies one row of integers six times slower than two.
    alone = len(x.codes) == 1 and device_of((x, weight, scale)).platform == "cpu"
    rows = jnp.repeat(x.codes, 2, axis=0) if alone else x.codes
    codes = rows.reshape(-1, groups, size)
    dot = partial(jnp.matmul, preferred_element_type=jnp.int32)
    zero = None if x.zero is None else x.zero.astype(jnp.int32)

    def one(codes, weight, scale, sums):
        total = dot(codes, weight)
        if zero is not None:
            total = total - zero * sums
        return total.astype(dtype) * scale.astype(dtype)

    if groups == 1:
        total = one(codes[:, 0], weight[0], scale[0], None if sums is None else sums[0])
    else:
        start = jnp.zeros((len(codes), out), dtype)
        parts = (codes.swapaxes(0, 1), weight, scale, sums)
        total, _ = jax.lax.scan(lambda y, part: (y + one(*part), None), start, parts)
    total = total[:1] if alone else total
    return total * x.scale.astype(dtype)
