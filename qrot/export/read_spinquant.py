"""Rotations out of an R.bin of SpinQuant's, or of DartQuant's, from anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32

from qrot.errors import InputError
from qrot.files.plain import shown
from qrot.files.tensors import Tensor
from qrot.files.torch_file import open_torch_file
from qrot.model.config import ModelConfig
from qrot.rotation.check import nearest_orthogonal
from qrot.rotation.forms import Dense, Hadamard, check_size
from qrot.rotation.transform import Transform
from qrot.sites import ONLINE, rotation_site

R1, R2 = "R1", "model.layers.{}.self_attn.R2"
TOLERANCE = 1e-2  # of R R^T - I: a matrix in bfloat16 comes to 2e-3
LABELS = {"key": "R3", "down": "R4"}


def read_spinquant(
    path: Path, config: ModelConfig, *, more: Sequence[Path] = (), online: bool = True
) -> Transform:
    """Rotations out of an R.bin.

    Args:
        path: of the file.
        config: of the model that it was learned for.
        more: files that hold the rest of it: DartQuant writes R1 and R2 into one each.
        online: whether to put R3 and R4 beside them, which SpinQuant does not learn: Hadamard
            matrices without signs, which the file does not hold (see `fixed_rotations`).

    Returns:
        Rotations, orthogonal to within float32: a file in bfloat16 is brought to it in float64. R2
        is one a layer as SpinQuant has it, or one a layer and kv head as DartQuant has it.

    Raises:
        InputError: where a file is no R.bin, its sizes are another model's, or a matrix is not
            orthogonal.
    """
    layers, heads, n = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
    shapes = {R1: [(config.hidden_size, config.hidden_size)]}
    shapes |= {R2.format(i): [(n, n), (heads, n, n)] for i in range(layers)}
    found: dict[str, tuple[Path, Tensor]] = {}
    for file in (path, *more):
        for name, tensor in open_torch_file(file, _most(config)).items():
            if name not in shapes:
                raise InputError(f"{file}: holds {shown(name)}, which no R.bin of this model has")
            if name in found:
                raise InputError(f"{file}: has {name}, as {found[name][0]} has")
            found[name] = file, tensor
    matrices = {name: _matrix(name, found, path, those) for name, those in shapes.items()}
    values = [matrices[R2.format(i)] for i in range(layers)]
    if len({x.shape for x in values}) > 1:
        raise InputError(f"{path}: has one R2 a kv head in some layers, and one for all in others")
    rotations: dict[str, Any] = {
        "residual": Dense(jnp.asarray(matrices[R1])),
        "value": Dense(jnp.asarray(np.stack(values))),
    }
    for name, order, _ in fixed(config) if online else ():
        rotations[name] = Hadamard(jnp.ones(order, jnp.float32))
        check_size(rotations[name], order)  # a size without a matrix is refused here
    return Transform(rotations)


def _most(config: ModelConfig) -> int:
    """Bytes that all matrices take at most, in float64, with what pickle says of each."""
    each = 8 * config.head_dim**2 * config.num_key_value_heads
    return 8 * config.hidden_size**2 + config.num_hidden_layers * (each + 4096)


def _matrix(
    name: str,
    found: dict[str, tuple[Path, Tensor]],
    path: Path,
    shapes: list[tuple[int, ...]],
) -> Float32[np.ndarray, "..."]:
    if name not in found:
        raise InputError(
            f"{path}: has no {name}; it is no R.bin of this model (R1 and R2 may be in two files)"
        )
    file, tensor = found[name]
    if tensor.shape not in shapes:
        own, *needed = (" x ".join(map(str, shape)) for shape in (tensor.shape, *shapes))
        raise InputError(f"{file}: {name} is {own}, and this model needs {' or '.join(needed)}")
    return nearest_orthogonal(f"{file}: {name}", tensor.whole(), TOLERANCE)


def fixed(config: ModelConfig) -> list[tuple[str, int, bool]]:
    """(Rotation, its order, whether SpinQuant has the same matrix) of the online ones."""
    orders = {name: rotation_site(name).rotation_size(config) for name in ONLINE}
    return [(name, n, n & (n - 1) == 0) for name, n in orders.items()]


def fixed_rotations(config: ModelConfig) -> str:
    """In words which of SpinQuant's fixed R3 and R4 are the matrices that qrot has, too.

    Both are Sylvester's where the order is a power of two. Any other order is built on a smaller
    matrix, and those differ: compared, with the code of SpinQuant's repository, for 12, 20, 28,
    36, 40, 44, 52, 60, 108, 140, 156 and 172, which are all that it has.
    """
    words = [
        f"{LABELS[name]} of order {n} is {'the same as' if same else 'another one than'} qrot's"
        for name, n, same in fixed(config)
    ]
    return f"SpinQuant has a fixed R3 and R4: {', '.join(words)}."


def same_as_spinquant(config: ModelConfig) -> dict[str, bool]:
    """By name of an online rotation whether SpinQuant has the same matrix for it."""
    return {name: same for name, _, same in fixed(config)}
