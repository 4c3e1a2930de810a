"""Transform and round in one pass: what an online rotation before an integer product is."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Float

from qrot.grid import Grid, Quantised, quantise
from qrot.kernels.dispatch import choose, interpreting
from qrot.kernels.fwht import fwht
from qrot.hadamard.factors import hadamard_factors, hadamard_order


def rotate_quantize(
    x: Float[Array, "*batch n"],
    grid: Grid,
    *,
    block: int | None = None,
    clip: Float[Array, ""] | float | None = None,
    signs: Float[Array, " n"] | None = None,
    shift: Float[Array, " n"] | None = None,
    implementation: str | None = None,
) -> Quantised:
    """x times signs, `fwht` along the last axis, less the shift, then `quantise`.

    The result has codes [..., n], scale and zero [..., groups], and the shift. grid: of
    activations, at most 8 bits. block: as in `fwht`. Raises as both do, and InputError where the
    implementation cannot do this.
    """
    n = x.shape[-1]
    hadamard_factors(hadamard_order(n, block))  # raises where there is no such matrix

    def tpu():
        from qrot.kernels.pallas_tpu.rotate_quantize import refusal

        return refusal(n, grid, block, x.dtype)

    def gpu():
        from qrot.kernels.mosaic_gpu.rotate_quantize import refusal

        return refusal(n, grid, block, x.dtype)

    if grid.bits <= 8 and not grid.threshold:  # otherwise `quantise` says why not
        refusals = {"pallas_tpu": tpu, "mosaic_gpu": gpu}
        chosen = choose("rotate_quantize", implementation, refusals)
        ratio: Any = grid.clip if clip is None else clip
        if chosen == "pallas_tpu":
            from qrot.kernels.pallas_tpu import rotate_quantize as on_tpu

            found = on_tpu.rotate_quantize(x, grid, block, ratio, signs, shift, interpreting())
            return found.replace(shift=shift)
        if chosen == "mosaic_gpu":
            from qrot.kernels.mosaic_gpu import rotate_quantize as on_gpu

            found = on_gpu.rotate_quantize(x, grid, block, ratio, signs, shift, interpreting())
            return found.replace(shift=shift)
    own = "xla" if implementation == "xla" else None
    flipped = x if signs is None else x * signs.astype(x.dtype)
    turned = fwht(flipped, block=block, implementation=own)
    moved = turned if shift is None else turned - shift.astype(x.dtype)
    return quantise(moved, grid, clip=clip).replace(shift=shift)
