"""Transform and round in one pass: what an online rotation before an integer product is."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Float

from qrot.grid import Grid
from qrot.hadamard.factors import hadamard_factors, hadamard_order
from qrot.integers import Quantised, quantise
from qrot.kernels.dispatch import choose, interpreting
from qrot.kernels.fwht import fwht


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

    Args:
        x: vectors.
        grid: of activations, at most 8 bits.
        block: as in `fwht`.
        clip: as in `quantise`.
        signs: of the rotation; None for ones.
        shift: in the rotated basis; None for none.
        implementation: see `qrot.kernels.dispatch`.

    Returns:
        Codes [..., n], scale and zero [..., groups], and the shift.

    Raises:
        InputError: as `fwht` and `quantise` do, and where the implementation cannot do this.
        ValueError: as `quantise` does.
    """
    n = x.shape[-1]
    hadamard_factors(hadamard_order(n, block))  # raises where there is no such matrix

    def tpu():
        from qrot.kernels.pallas_tpu.rotate_quantize import refusal

        return refusal(n, grid, block, x.dtype)

    def gpu():
        from qrot.kernels.mosaic_gpu.rotate_quantize import refusal

        return refusal(n, grid, block, x.dtype)

    if grid.in_bytes:  # otherwise `quantise` says why not
        refusals = {"pallas_tpu": tpu, "mosaic_gpu": gpu}
        chosen = choose("rotate_quantize", implementation, refusals, (x, signs, shift, clip))
        ratio: Any = grid.clip if clip is None else clip
        if chosen == "pallas_tpu":
            from qrot.kernels.pallas_tpu import rotate_quantize as on_tpu

            found = on_tpu.rotate_quantize(x, grid, block, ratio, signs, shift, interpreting())
            return found.replace(shift=shift)
        if chosen == "mosaic_gpu":
            from qrot.kernels.mosaic_gpu import rotate_quantize as on_gpu

            found = on_gpu.rotate_quantize(x, grid, block, ratio, signs, shift, interpreting())
            return found.replace(shift=shift)
    inner = "xla" if implementation == "xla" else None
    flipped = x if signs is None else x * signs.astype(x.dtype)
    rotated = fwht(flipped, block=block, implementation=inner)
    moved = rotated if shift is None else rotated - shift.astype(x.dtype)
    return quantise(moved, grid, clip=clip).replace(shift=shift)
