"""Transform and round in one pass: what an online rotation before an integer product is."""

from __future__ import annotations

from jaxtyping import Array, Float

from qrot.errors import InputError
from qrot.grid import Grid, Quantised, quantise
from qrot.kernels.fwht import fwht


def rotate_quantize(
    x: Float[Array, "*batch n"],
    grid: Grid,
    *,
    block: int | None = None,
    clip: Float[Array, ""] | float | None = None,
    implementation: str | None = None,
) -> Quantised:
    """`fwht` along the last axis, then `quantise`: codes [..., n], scale and zero [..., groups].

    grid: of activations, at most 8 bits. block: as in `fwht`. Raises as both do.
    """
    if implementation not in (None, "xla"):
        raise InputError(
            f"implementation={implementation!r} of rotate_quantize is not available; use 'xla'"
        )
    return quantise(fwht(x, block=block), grid, clip=clip)
