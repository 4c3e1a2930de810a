"""Whether what was read from a file can be put on a network: shapes, and every number.

A matrix that is not orthogonal, a sign of 1/2 or a NaN would make another model without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float, Float32

from qrot.errors import InputError, located
from qrot.hadamard.factors import hadamard_factors
from qrot.rotation.forms import Hadamard, Rotation, newton_schulz, orthogonal_parts
from qrot.sites import SITES, Sizes, rotation_site

Trees = Mapping[str, Mapping[str, Any]]

TOLERANCE = 1e-4  # of R R^T - I
_FLOAT32 = 1e-6  # of the same: what is written in float32 is within it, and stays as it is
_STEPS = 6
_CHUNK = 1 << 22  # numbers that are in float64 at once
_LARGEST_LOG = 87.0  # a scale and its inverse are float32


def check_fit(trees: Trees, sizes: Sizes) -> None:
    """Raise InputError where what is put on a network is of another one.

    Args:
        trees: the fields of a `Transform` or an `Online`.
        sizes: of the network.
    """
    layers, heads = sizes.num_hidden_layers, sizes.num_key_value_heads
    for name, rotation in trees["rotations"].items():
        site = rotation_site(name)
        n = site.rotation_size(sizes)
        if rotation.size != n:
            raise InputError(f"rotations.{name} turns {rotation.size} values, and there are {n}")
        stacks = {()} if site.online or not site.per_head else set()
        stacks |= {(layers,)} if site.online or site.per_head else set()
        stacks |= {(layers, heads)} if site.per_head else set()
        if rotation.stack not in stacks:
            raise _other(f"rotations.{name}", "is stacked", rotation.stack, stacks)
    for tree, own in trees.items():
        for name, x in own.items() if tree != "rotations" else ():
            if x.shape not in (shapes := _shapes(tree, name, sizes)):
                raise _other(f"{tree}.{name}", "has the shape", x.shape, shapes)


def _shapes(tree: str, name: str, sizes: Sizes) -> set[tuple[int, ...]]:
    site, layers = SITES[name], sizes.num_hidden_layers
    if tree == "clips":
        return {(layers,)}
    if tree == "shifts" or not site.cached:
        return {(layers, site.width(sizes))}
    heads = sizes.num_key_value_heads
    if name == "values":
        return {(layers, heads, sizes.head_dim)}
    return {(layers, each, sizes.head_dim // 2) for each in (heads, 1)}  # 1 where a norm is shared


def _other(name: str, is_: str, found: tuple[int, ...], wanted: set[tuple[int, ...]]) -> InputError:
    those = " or ".join(str(list(shape)) for shape in sorted(wanted))
    return InputError(f"{name} {is_} {list(found)}, and this model needs {those}")


def checked(trees: Trees) -> dict[str, dict[str, Any]]:
    """What acts in float32, with rotations that are orthogonal to within it.

    Args:
        trees: the fields of a `Transform` or an `Online`, of NumPy arrays of any floating dtype.

    Raises:
        InputError: where a number is not finite, a matrix is further from orthogonal than
            `TOLERANCE`, a sign is not +1 or -1, there is no Hadamard matrix of an order, a clip
            ratio is outside 0 to 1, or a scale is no float32.
    """
    return {
        tree: {
            name: _checked(name, x) if tree == "rotations" else _in_range(f"{tree}.{name}", x)
            for name, x in own.items()
        }
        for tree, own in trees.items()
    }


def _in_range(name: str, x: Float[np.ndarray, "..."]) -> Float32[np.ndarray, "..."]:
    x = finite(name, x)
    if name.startswith("clips.") and not ((x > 0) & (x <= 1)).all():
        raise InputError(f"{name} holds clip ratios outside 0 to 1")
    if name.startswith("scales.") and not (np.abs(x) <= _LARGEST_LOG).all():
        raise InputError(f"{name} holds logarithms of scales that are no float32")
    return x


def _checked(name: str, rotation: Rotation) -> Rotation:
    fields: dict[str, np.ndarray] = {}
    for part, x in vars(rotation).items():
        where = f"rotations.{name}.{part}"
        if part in orthogonal_parts(rotation):
            fields[part] = nearest_orthogonal(where, x)
        elif part == "signs":
            fields[part] = finite(where, x)
            if not (np.abs(fields[part]) == 1).all():
                raise InputError(f"{where} holds other numbers than 1 and -1")
    if isinstance(rotation, Hadamard):
        with located(f"rotations.{name}"):
            hadamard_factors(rotation.block or rotation.size)  # raises where there are none
    return rotation.replace(**fields)


def finite(name: str, x: Float[np.ndarray, "..."]) -> Float32[np.ndarray, "..."]:
    """A copy in float32; raises InputError where a number is not finite, or not in float32."""
    with np.errstate(over="ignore"):
        found = np.array(x, np.float32)
    if not np.isfinite(found).all():
        raise InputError(f"{name} holds numbers that are not finite in float32")
    return found


def nearest_orthogonal(
    name: str, matrices: Float[np.ndarray, "*stack n n"], most: float = TOLERANCE
) -> Float32[np.ndarray, "*stack n n"]:
    """The orthogonal matrices that some are within a tolerance of, in float32.

    Measured and brought there in float64, by Newton-Schulz steps, each of which squares the error;
    a matrix that was written in float32 stays as it is.

    Args:
        name: of the matrices, for messages.
        matrices: R.
        most: that R R^T - I may reach.

    Raises:
        InputError: where it reaches more, or a number is not finite.
    """
    if not np.isfinite(matrices).all():
        raise InputError(f"{name} is not orthogonal: it holds numbers that are not finite")
    flat = matrices.reshape(-1, *matrices.shape[-2:])
    found = np.empty(flat.shape, np.float32)
    step = max(1, _CHUNK // flat[0].size)
    for i in range(0, len(flat), step):
        found[i : i + step] = _refined(name, np.asarray(flat[i : i + step], np.float64), most)
    return found.reshape(matrices.shape)


def _refined(name: str, r: Float[np.ndarray, "count n n"], most: float):
    with np.errstate(over="ignore", invalid="ignore"):
        if not (error := _error(r)) <= most:
            raise InputError(
                f"{name} is not orthogonal: R R^T - I reaches {error:.1e}, above {most:.0e}"
            )
        for _ in range(_STEPS):
            if error <= _FLOAT32:
                return r
            r = newton_schulz(r)
            error = _error(r)
    raise InputError(f"{name} is not near an orthogonal matrix")


def _error(r: Float[np.ndarray, "count n n"]) -> float:
    return float(np.abs(r @ r.mT - np.eye(r.shape[-1])).max())
