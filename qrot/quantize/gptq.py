"""GPTQ: rounding that makes up, in the weights still to come, for the errors made so far.

Frantar, Ashkboos, Hoefler, Alistarh: GPTQ, ICLR 2023, arXiv 2210.17323.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from qrot.calibrate.moments import EXACT, Moments, change_layers
from qrot.errors import InputError
from qrot.grid import Grid, nearest
from qrot.model.params import Layers, Network
from qrot.quantize.method import (
    Advance,
    Rows,
    WeightMethod,
    network_grids,
    rounded_sites,
    with_unit_scales,
    with_weights,
)
from qrot.quantize.rtn import by_group, weight_scale_and_zero
from qrot.scheme import LayerScheme
from qrot.sites import SITES

BLOCK = 128  # inputs that are rounded before the others hear of it


@dataclass(frozen=True)
class Gptq:
    """How GPTQ rounds.

    Attributes:
        damping: what is added to the Hessian's diagonal, as a share of its mean.
        act_order: whether the inputs that weigh most are rounded first.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    method: Literal["gptq"] = "gptq"
    damping: float = 0.01
    act_order: bool = True

    def __post_init__(self):
        if not 0 < self.damping <= 1:
            raise InputError(f"weights.damping: {self.damping} is outside 0 to 1")


def gptq(
    network: Network,
    rows: Rows,
    settings: Gptq | None = None,
    *,
    batch: int = 2,
    advance: Advance = lambda: None,
) -> Network:
    """Round the weights of all linear layers to `network.scheme.weights`.

    Layer by layer (`change_layers`), each on what the rounded layers before it make of the
    windows. Activations and cache are not quantised meanwhile, as in QuaRot and SpinQuant.

    Args:
        network: fused, or with nothing on it. Embedding and head are left alone.
        rows: tokens to calibrate on.
        settings: the defaults if None.
        batch: windows that run at once.
        advance: called after each layer.

    Returns:
        The network with rounded weights, and their scales where the grid is symmetric. Warns where
        a Hessian needs more damping.

    Raises:
        InputError: where a group does not divide a layer's inputs, or activations are not finite.
        ValueError: where rotations are not fused.
    """
    settings, grids = settings or Gptq(), network_grids(network)

    def change(i: int, layer: Layers, moments: dict[str, Moments]) -> Layers:
        layer = with_unit_scales(layer, network)
        return round_layer(layer, moments, grids[i], settings, f"layer {i}")

    sites = rounded_sites(grids)
    return change_layers(network, rows, change, sites=sites, batch=batch, advance=advance)


GPTQ = WeightMethod("gptq", Gptq, gptq, "GPTQ", "calibration", compensates=True)


def round_layer(
    layer: Layers, moments: dict[str, Moments], grids: LayerScheme, settings: Gptq, where: str
) -> Layers:
    """The weights of one layer (no `layers` axis) on their grids.

    Args:
        layer: with unit scales in what it leaves alone, where other layers have scales.
        moments: of every site with a weight to be rounded.
        grids: of the layer.
        settings: of the method.
        where: the layer's name, for messages.
    """
    for site, here in moments.items():
        names = [name for name in SITES[site].readers if grids.weights[name].on]
        solved, used = _solve(
            tuple(layer.linear(name).weight for name in names),
            here.hessian,
            tuple(grids.weights[name] for name in names),
            settings.damping,
            settings.act_order,
            BLOCK,
        )
        warn_of_damping(f"{site} in {where}", settings.damping, float(used))
        layer = with_weights(layer, dict(zip(names, solved, strict=True)))
    return layer


def solve(
    weight: Float[Array, "in out"],
    hessian: Float[Array, "in in"],
    grid: Grid,
    *,
    damping: float = 0.01,
    act_order: bool = True,
    block: int = BLOCK,
) -> Float[Array, "in out"]:
    """One weight matrix on its grid, with a small error tr(E^T H E), E being the change of weights.

    Inputs are rounded one after the other, and the error of each is spread over those to come: with
    U the upper factor of (H + damping)^-1 = U^T U,
      e_i = (w_i - Q(w_i)) / U_ii,  w_j -= U_ij e_i for j > i,
    `block` of them before the others hear of it. Scales are those of round-to-nearest, from the
    weights as they were, so that groups stay in place under act_order. An output's column for which
    plain rounding has the smaller error is rounded plainly: columns do not depend on each other, so
    the error is never above that of round-to-nearest (but for the arithmetic of comparing).

    Args:
        weight: to be rounded.
        hessian: H = X^T X of the inputs x that it reads; any factor on it is the same.
        grid: that it is rounded to.
        damping: share of the mean of H's diagonal that is added to it. Where that is not enough for
            a Cholesky factor it is taken ten times as large, again and again, with a warning; plain
            rounding where even 1000 is not enough. Inputs that were never on (diagonal 0) are
            rounded plainly.
        act_order: inputs of large diagonal first.
        block: inputs that are rounded before the others hear of it.

    Raises:
        InputError: where a group does not divide the inputs.
    """
    ((rounded, _),), used = _solve((weight,), hessian, (grid,), damping, act_order, block)
    warn_of_damping("a weight", damping, float(used))
    return rounded


def warn_of_damping(where: str, damping: float, used: float, method: str = "GPTQ") -> None:
    """Warn where a Hessian took more damping than was asked for."""
    if used > 1.5 * damping:
        so = f"{used:g} was used" if np.isfinite(used) else "it was rounded to nearest"
        warnings.warn(
            f"{method}: the Hessian of {where} has no Cholesky factor at damping {damping:g}; {so}",
            stacklevel=3,
        )


def _solve(weights, hessian, grids: tuple[Grid, ...], damping, act_order: bool, block: int):
    """`solve` for weights that read one input: ([(rounded weight, scales)], the damping used)."""
    order, root, used = _factor(hessian, damping, act_order)
    # On one grid they are rounded side by side. Where grids differ it is one at a time: a program
    # for each grid, not for each way to combine them.
    alike = len(set(grids)) == 1
    solved = []
    for mine in [weights] if alike else [[weight] for weight in weights]:
        grid = grids[len(solved)]
        together = _rounded(list(mine), hessian, order, root, grid, block)
        edges = np.cumsum([w.shape[1] for w in mine])[:-1]
        parts = jax.tree.map(lambda x, at=edges: jnp.split(x, at, axis=1), together)
        solved += zip(parts[0], parts[1] or [None] * len(mine), strict=True)
    return solved, used


@partial(jax.jit, static_argnames="act_order")
def _factor(hessian: Float[Array, "n n"], damping, act_order: bool):
    """(order of the inputs, U in that order, damping used or infinity where none helps)."""
    diagonal = jnp.diagonal(hessian)
    order = jnp.argsort(-diagonal) if act_order else jnp.arange(len(diagonal))
    factor, share = damped_cholesky(hessian, damping, order)
    unit = jnp.eye(len(diagonal), dtype=hessian.dtype)
    inverse = jax.scipy.linalg.solve_triangular(factor, unit, lower=True)
    return order, inverse[::-1, ::-1], share


def damped_cholesky(
    hessian: Float[Array, "n n"],
    damping: Float[Array, ""] | float,
    order: Int[Array, " n"] | None = None,
) -> tuple[Float[Array, "n n"], Float[Array, ""]]:
    """(L, damping used) of H in this order, reversed: H' + damping = L L^T.

    Zeros of the diagonal become its mean first. Reversed back, L is an upper factor of H and L^-1
    one of its inverse, with no inverse of H.

    Args:
        hessian: H.
        damping: share of the mean of H's diagonal; taken ten times as large until there is a
            factor, and infinity where even 1000 is not enough.
        order: of the inputs; as they are if None.
    """
    diagonal = jnp.diagonal(hessian)
    dead = diagonal <= 0
    mean = jnp.sum(jnp.where(dead, 0, diagonal)) / jnp.maximum(jnp.sum(~dead), 1)
    mean = jnp.where(mean > 0, mean, 1)
    hessian = hessian + jnp.diag(jnp.where(dead, mean, 0))
    if order is not None:
        hessian = hessian[order][:, order]
    unit = jnp.eye(len(diagonal), dtype=hessian.dtype)

    def lower(share):
        return jnp.linalg.cholesky((hessian + share * mean * unit)[::-1, ::-1])

    def failed(state):
        share, factor = state
        return ~jnp.isfinite(factor).all() & (share < 1000)

    def again(state):
        share = 10 * state[0]
        return share, lower(share)

    share = jnp.asarray(damping, hessian.dtype)
    share, factor = jax.lax.while_loop(failed, again, (share, lower(share)))
    return factor, jnp.where(jnp.isfinite(factor).all(), share, jnp.inf)


@partial(jax.jit, static_argnames=("grid", "block"))
def _rounded(
    weights: list[Float[Array, "in _"]],
    hessian: Float[Array, "in in"],
    order: Int[Array, " in"],
    root: Float[Array, "in in"],
    grid: Grid,
    block: int,
) -> tuple[Float[Array, "in out"], Float[Array, "groups out"] | None]:
    """(Weights side by side on their grid, its scales where it is symmetric)."""
    dtype = weights[0].dtype
    each = [w.astype(jnp.promote_types(dtype, jnp.float32)) for w in weights]
    found = [(w, *weight_scale_and_zero(w, grid)) for w in each]
    wide, scale, zero = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *found)
    plain = nearest(wide, scale, zero, grid) * scale
    zeros = None if zero is None else zero[order]
    spread = _spread(wide[order], scale[order], zeros, root, grid, block)
    spread = jnp.zeros_like(wide).at[order].set(spread)

    def error(rounded):
        change = rounded - wide
        return jnp.sum(change * jnp.matmul(hessian, change, precision=EXACT), axis=0)

    # False for what is not a number, too
    rounded = jnp.where(error(spread) <= error(plain), spread, plain).astype(dtype)
    return rounded, by_group(scale, grid) if zero is None else None


def _spread(
    weight: Float[Array, "n out"],
    scale: Float[Array, "n out"],
    zero: Float[Array, "n out"] | None,
    root: Float[Array, "n n"],
    grid: Grid,
    block: int,
) -> Float[Array, "n out"]:
    """Round row after row, and spread each row's error over the rows after it."""
    n = len(weight)
    block = min(block, n)
    more = -n % block  # rows of zeros that nothing is spread over

    def longer(x, value=0.0):
        return jnp.pad(x, ((0, more), (0, 0)), constant_values=value)

    weight, zero = jax.tree.map(longer, (weight, zero))
    scale = longer(scale, 1.0)
    root = jnp.pad(root, ((0, more), (0, more)))
    root = root + jnp.diag((jnp.arange(n + more) >= n).astype(root.dtype))

    def one_block(i, state):
        weight, rounded = state

        def here(x, axis: int = 0) -> Any:
            return jax.lax.dynamic_slice_in_dim(x, i * block, block, axis)

        across = here(root)

        def one_row(errors, inputs):
            j, column, row, scale, zero = inputs
            # Errors of this row and of those after it are still 0.
            row = row - jnp.matmul(column, errors, precision=EXACT)
            near = nearest(row, scale, zero, grid) * scale
            return errors.at[j].set((row - near) / column[j]), near

        rows = jax.tree.map(here, (weight, scale, zero))
        errors, near = jax.lax.scan(
            one_row, jnp.zeros_like(rows[0]), (jnp.arange(block), here(across, 1).T, *rows)
        )
        weight = weight - jnp.matmul(across.T, errors, precision=EXACT)
        return weight, jax.lax.dynamic_update_slice_in_dim(rounded, near, i * block, 0)

    blocks = (n + more) // block
    return jax.lax.fori_loop(0, blocks, one_block, (weight, jnp.zeros_like(weight)))[1][:n]
