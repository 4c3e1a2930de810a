"""SpinQuant's R.bin, which ExecuTorch reads, too: R1 and R2 as matrices, to PyTorch and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32

from qrot.errors import InputError
from qrot.model.config import ModelConfig
from qrot.rotation.forms import Hadamard, Rotations, rotate

FILE = "R.bin"
_R2 = "model.layers.{}.self_attn.R2"
_TOLERANCE = 1e-3  # of R R^T - I: Cayley steps in float32 and bfloat16 files stay well within


def spinquant_tensors(
    rotations: Rotations, config: ModelConfig
) -> dict[str, Float32[np.ndarray, "n n"]]:
    """{"R1": [hidden, hidden], "model.layers.{i}.self_attn.R2": [head_dim, head_dim]}.

    x -> x R, as SpinQuant has them: q, k, v, gate, up, embed and head become W R1 in PyTorch's
    [out, in], o and down R1^T W; v's outputs and o's inputs turn by R2 in each head. Raises
    InputError where R2 differs between the heads of a layer, which the format cannot say.
    """
    value = rotations.value
    if value is not None and value.ndim == 5:
        raise InputError(
            "R.bin has one R2 a layer and these rotations have one a kv head; learn them with "
            "learn.value_heads=false"
        )
    tensors = {"R1": _matrix(rotations.residual, config.hidden_size)}
    for i in range(config.num_hidden_layers):
        own = None if value is None else value[i]
        tensors[_R2.format(i)] = _matrix(own, config.head_dim)
    return tensors


def _matrix(rotation: Any, n: int) -> Float32[np.ndarray, "n n"]:
    return np.array(rotate(jnp.eye(n, dtype=jnp.float32), rotation))


def write_spinquant(path: Path, rotations: Rotations, config: ModelConfig) -> None:
    """Write R.bin; errors as for `spinquant_tensors`."""
    import torch

    tensors = spinquant_tensors(rotations, config)
    torch.save({name: torch.from_numpy(x) for name, x in tensors.items()}, path)


def read_spinquant(path: Path, config: ModelConfig, *, online: bool = True) -> Rotations:
    """Rotations out of an R.bin from anywhere.

    online: with SpinQuant's fixed R3 and R4 (its "had" variant), Hadamard matrices without signs,
    which the file does not hold. Raises InputError where the file is no R.bin, its sizes are
    another model's, or a matrix is not orthogonal.
    """
    import torch

    if not path.is_file():
        raise InputError(f"{path}: no such file")
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
        tensors = {name: x.detach().to(torch.float64).numpy() for name, x in loaded.items()}
    except Exception as error:  # torch's reader, pickle and zipfile raise all kinds
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"{path}: not a file of tensors ({reason})") from error

    def take(name: str, n: int) -> Float32[np.ndarray, "n n"]:
        if name not in tensors:
            raise InputError(f"{path}: has no {name}; it is no R.bin of this model")
        matrix = tensors[name]
        if matrix.shape != (n, n):
            sizes = " x ".join(map(str, matrix.shape))
            raise InputError(f"{path}: {name} is {sizes}, and this model needs {n} x {n}")
        error = np.abs(matrix @ matrix.T - np.eye(n)).max()
        if not error <= _TOLERANCE:
            raise InputError(f"{path}: {name} is not orthogonal, R R^T - I reaches {error:.1e}")
        return matrix.astype(np.float32)

    residual = take("R1", config.hidden_size)
    layers = range(config.num_hidden_layers)
    value = np.stack([take(_R2.format(i), config.head_dim) for i in layers])
    key = down = None
    if online:
        key, down = (
            Hadamard(jnp.ones(n, jnp.float32)) for n in (config.head_dim, config.intermediate_size)
        )
        for rotation in (key, down):
            rotate(rotation.signs, rotation)  # a size without a matrix is refused here
    return Rotations(jnp.asarray(residual), jnp.asarray(value), key, down)
