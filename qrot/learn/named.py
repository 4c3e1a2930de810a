"""The arrays of a transform by name: what optimisers and checkpoints work on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jaxtyping import Array

from qrot.rotation.transform import Transform


def named_arrays(transform: Transform) -> dict[str, Array]:
    """The arrays of a transform by dotted names, such as `rotations.residual.matrix`."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(transform)
    }


def with_arrays(transform: Transform, arrays: Mapping[str, Any]) -> Transform:
    """The inverse of `named_arrays`.

    Args:
        transform: of the structure that is wanted.
        arrays: by name, in any order.
    """
    leaves = [arrays[name] for name in named_arrays(transform)]
    return jax.tree.unflatten(jax.tree.structure(transform), leaves)
