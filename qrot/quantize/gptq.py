"""GPTQ: rounding that makes up, in the weights still to come, for the errors made so far.

Frantar, Ashkboos, Hoefler, Alistarh: GPTQ, ICLR 2023, arXiv 2210.17323.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from qrot.errors import InputError
from qrot.grid import Grid, nearest
from qrot.model.config import ModelConfig
from qrot.model.forward import PerLayer, decoder_layer, tables
from qrot.model.params import Layers, Params
from qrot.quantize.rtn import weight_scale_and_zero
from qrot.rotation.rotations import Rotations, by_layer
from qrot.scheme import READERS, Scheme, layer_scheme, segments

BLOCK = 128  # inputs that are rounded before the others hear of it
_EXACT = jax.lax.Precision.HIGHEST  # a TPU would round the products to bfloat16


@dataclass(frozen=True)
class Gptq:
    """How GPTQ rounds.

    windows, length: of the calibration text, from all over it.
    damping: what is added to the Hessian's diagonal, as a share of its mean.
    act_order: whether the inputs that weigh most are rounded first.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    windows: int = 64
    length: int = 512
    damping: float = 0.01
    act_order: bool = True

    def __post_init__(self):
        if self.windows < 1:
            raise InputError(f"gptq.windows: {self.windows} is not positive")
        if self.length < 2:
            raise InputError(f"gptq.length: a window of {self.length} tokens is none")
        if not 0 < self.damping <= 1:
            raise InputError(f"gptq.damping: {self.damping} is outside 0 to 1")


def gptq(
    params: Params,
    scheme: Scheme,
    config: ModelConfig,
    rows: Int[np.ndarray, "count length"],
    *,
    rotations: Rotations | None = None,
    settings: Gptq | None = None,
    batch: int = 2,
    advance: Callable[[], None] = lambda: None,
) -> Params:
    """Round the weights of all linear layers to `scheme.weights`; embed and head are left alone.

    Layer by layer: all windows run through a layer, on what the rounded layers before it make of
    them, then its weights are rounded, then the windows run through it once more. Activations and
    cache are not quantised meanwhile, as in QuaRot and SpinQuant. Beside what is rounded, the
    device holds one layer, its Hessians and `batch` windows; all hidden states are on the host.

    rows: tokens to calibrate on. rotations: what `fuse` left online; None where nothing was fused.
    advance: called after each layer.
    Raises InputError where a group does not divide a layer's inputs, or activations are not finite;
    ValueError where the rotations are not fused. Warns where a Hessian needs more damping.
    """
    rotations, settings = rotations or Rotations(fused=True), settings or Gptq()
    if not rotations.fused:
        raise ValueError("GPTQ rounds the weights that the network has: fuse the rotations first")
    grids = [
        dict(grids.weights)
        for start, stop, grids in segments(scheme, config.num_hidden_layers)
        for _ in range(start, stop)
    ]
    embed = np.asarray(params.embed)
    hidden = [embed[rows[i : i + batch]] for i in range(0, len(rows), batch)]
    windows, done = config.sliding_window, []
    for i, own in enumerate(grids):
        layer, turns = jax.tree.map(lambda x, i=i: x[i], (params.layers, by_layer(rotations)))
        window = None if windows is None else windows[i]
        rounded = tuple(s for s, names in READERS.items() if any(own[n].on for n in names))
        run = partial(_run, turns=turns, window=window, rotations=rotations, config=config)
        if rounded:
            found = (run(h, layer, sites=rounded) for h in hidden)
            hessians = reduce(lambda *both: jax.tree.map(jnp.add, *both), found)
            layer = round_layer(layer, hessians, own, settings, f"layer {i}")
        if i + 1 < len(grids):
            hidden = [np.asarray(run(h, layer)) for h in hidden]
        done.append(layer)
        advance()
    return params.replace(layers=jax.tree.map(lambda *x: jnp.stack(x), *done))


@partial(jax.jit, static_argnames=("config", "sites"))
def _run(h: Float[Array, "batch length n"], layer, *, turns, window, rotations, config, sites=()):
    """The layer's output, or the Hessians of what its weights read at some sites, if there are."""
    hessians: dict[str, Array] = {}

    def observe(site: str, x: Array) -> None:
        if site in sites:
            hessians[site] = _hessian(x.reshape(-1, x.shape[-1]))

    plain = Scheme()
    rope, _ = tables(config, h.shape[1], h.dtype)
    out, _ = decoder_layer(
        h,
        layer,
        PerLayer(window=window),
        rotations.replace(**turns),
        layer_scheme(plain, 0),
        plain,
        config,
        rope,
        observe=observe,
    )
    return hessians if sites else out


def _hessian(x: Float[Array, "tokens n"]) -> Float[Array, "n n"]:
    """X^T X. It is symmetric: four strips of its upper half are 5/8 of the work."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    product = partial(jnp.matmul, precision=_EXACT, preferred_element_type=wide)
    edges = [x.shape[1] * i // 4 for i in range(5)]
    strips = [jnp.pad(product(x[:, a:b].T, x[:, a:]), ((0, 0), (a, 0))) for a, b in pairwise(edges)]
    upper = jnp.concatenate(strips)
    return jnp.triu(upper) + jnp.triu(upper, 1).T


def round_layer(
    layer: Layers, hessians: dict[str, Array], grids: dict[str, Grid], settings: Gptq, name: str
) -> Layers:
    """The weights of one layer (no `layers` axis) on their grids.

    hessians: by site, for every site with a weight to be rounded. name: of the layer, for messages.
    """
    for site, names in READERS.items():
        if site not in hessians:
            continue
        hessian = hessians[site]
        if not np.isfinite(np.asarray(jnp.diagonal(hessian))).all():
            raise InputError(f"GPTQ: the input of {site} in {name} is not finite")
        linears = {n: getattr(layer, n) for n in names}
        weights = tuple(linear.weight for linear in linears.values())
        weights, used = _solve(
            weights,
            hessian,
            tuple(grids[n] for n in names),
            settings.damping,
            settings.act_order,
            BLOCK,
        )
        _warn(f"{site} in {name}", settings.damping, float(used))
        pairs = zip(linears.items(), weights, strict=True)
        layer = layer.replace(**{n: linear.replace(weight=w) for (n, linear), w in pairs})
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

    hessian: H = X^T X of the inputs x that the weight reads; any factor on it is the same.
    Inputs are rounded one after the other, and the error of each is spread over those to come: with
    U the upper factor of (H + damping)^-1 = U^T U,
      e_i = (w_i - Q(w_i)) / U_ii,  w_j -= U_ij e_i for j > i,
    `block` of them before the others hear of it. Scales are those of round-to-nearest, from the
    weights as they were, so that groups stay in place under act_order. An output's column for which
    plain rounding has the smaller error is rounded plainly: columns do not depend on each other, so
    the error is never above that of round-to-nearest (but for the arithmetic of comparing).

    damping: share of the mean of H's diagonal that is added to it. Where that is not enough for a
    Cholesky factor it is taken ten times as large, again and again, with a warning; plain rounding
    where even 1000 is not enough. Inputs that were never on (diagonal 0) are rounded plainly.
    act_order: inputs of large diagonal first.
    Raises InputError where a group does not divide the inputs.
    """
    (rounded,), used = _solve((weight,), hessian, (grid,), damping, act_order, block)
    _warn("a weight", damping, float(used))
    return rounded


def _warn(where: str, damping: float, used: float) -> None:
    if used > 1.5 * damping:
        so = f"{used:g} was used" if np.isfinite(used) else "it was rounded to nearest"
        warnings.warn(
            f"GPTQ: the Hessian of {where} has no Cholesky factor at damping {damping:g}; {so}",
            stacklevel=3,
        )


@partial(jax.jit, static_argnames=("grids", "act_order", "block"))
def _solve(weights, hessian, grids: tuple[Grid, ...], damping, act_order: bool, block: int):
    """`solve` for weights that read one input; (the rounded weights, the damping that it took)."""
    order, root, used = _factor(hessian, damping, act_order)
    rounded = tuple(
        _rounded(w, hessian, order, root, grid, block) if grid.on else w
        for w, grid in zip(weights, grids, strict=True)
    )
    return rounded, used


def _factor(hessian: Float[Array, "n n"], damping, act_order: bool):
    """(order of the inputs, U in that order, damping used or infinity where none helps)."""
    diagonal = jnp.diagonal(hessian)
    dead = diagonal <= 0
    mean = jnp.sum(jnp.where(dead, 0, diagonal)) / jnp.maximum(jnp.sum(~dead), 1)
    mean = jnp.where(mean > 0, mean, 1)
    order = jnp.argsort(-diagonal) if act_order else jnp.arange(len(diagonal))
    hessian = (hessian + jnp.diag(jnp.where(dead, mean, 0)))[order][:, order]
    unit = jnp.eye(len(diagonal), dtype=hessian.dtype)

    # With H turned end for end, H' = L L^T, U' = L^-1: one factor and no inverse of H.
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
    share = jnp.where(jnp.isfinite(factor).all(), share, jnp.inf)
    inverse = jax.scipy.linalg.solve_triangular(factor, unit, lower=True)
    return order, inverse[::-1, ::-1], share


def _rounded(
    weight: Float[Array, "in out"],
    hessian: Float[Array, "in in"],
    order: Int[Array, " in"],
    root: Float[Array, "in in"],
    grid: Grid,
    block: int,
) -> Float[Array, "in out"]:
    wide = weight.astype(jnp.promote_types(weight.dtype, jnp.float32))
    scale, zero = weight_scale_and_zero(wide, grid)
    plain = nearest(wide, scale, zero, grid) * scale
    zeros = None if zero is None else zero[order]
    spread = _spread(wide[order], scale[order], zeros, root, grid, block)
    spread = jnp.zeros_like(wide).at[order].set(spread)

    def error(rounded):
        change = rounded - wide
        return jnp.sum(change * jnp.matmul(hessian, change, precision=_EXACT), axis=0)

    # False for what is not a number, too
    return jnp.where(error(spread) <= error(plain), spread, plain).astype(weight.dtype)


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
            row = row - jnp.matmul(column, errors, precision=_EXACT)
            near = nearest(row, scale, zero, grid) * scale
            return errors.at[j].set((row - near) / column[j]), near

        rows = jax.tree.map(here, (weight, scale, zero))
        errors, near = jax.lax.scan(
            one_row, jnp.zeros_like(rows[0]), (jnp.arange(block), here(across, 1).T, *rows)
        )
        weight = weight - jnp.matmul(across.T, errors, precision=_EXACT)
        return weight, jax.lax.dynamic_update_slice_in_dim(rounded, near, i * block, 0)

    blocks = (n + more) // block
    return jax.lax.fori_loop(0, blocks, one_block, (weight, jnp.zeros_like(weight)))[1][:n]
