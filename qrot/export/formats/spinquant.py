"""SpinQuant's R.bin, which ExecuTorch reads, too: R1 and R2 as matrices, to PyTorch and back."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float32

from qrot.errors import InputError
from qrot.export.checkpoint import write_checkpoint
from qrot.export.content import Content, streamed
from qrot.export.format import Format, Options, Plan, fitted, left_out
from qrot.export.source import Source
from qrot.export.verify import load_plain
from qrot.model.config import ModelConfig
from qrot.rotation.forms import Dense, Hadamard, check_size, reorthonormalised, rotate
from qrot.rotation.transform import Transform
from qrot.scheme import Scheme
from qrot.sites import ONLINE, rotation_site

FILE = "R.bin"
_R1, _R2 = "R1", "model.layers.{}.self_attn.R2"
# Of R R^T - I. A matrix written in bfloat16 comes to 2e-3; one in float32 is left as it is.
_TOLERANCE, _FLOAT32, _STEPS = 1e-2, 1e-6, 6
_LABELS = {"key": "R3", "down": "R4"}


def check(source: Source, options: Options) -> Plan:
    """R1 and R2 of what was fitted; see `spinquant_tensors` for what is refused."""
    config, whole = source.opened.config, fitted(source)
    spinquant_tensors(whole, config)
    held = Transform({n: r for n, r in whole.rotations.items() if n not in ONLINE})
    lines = (
        "R.bin holds R1 and R2 as SpinQuant has them. There: `ptq.py --rotate "
        "--optimized_rotation_path R.bin`, with norms folded and no embedding centred.",
        f"{fixed_rotations(config)} They have no signs.",
        "ExecuTorch's Llama export reads the same file through its SpinQuant R1/R2 option; "
        "`use_spin_quant` adds R4 there.",
    )
    lost = left_out(whole, held)
    return Plan(lines, Scheme(), "float32", transform=held, lost=lost)


def write(
    folder: Path, source: Source, plan: Plan, content: Content, advance: Callable[[int], None]
) -> None:
    """Write R.bin; see `Format`."""
    import torch

    tensors = spinquant_tensors(plan.transform, content.config)
    torch.save({name: torch.from_numpy(x) for name, x in tensors.items()}, folder / FILE)
    advance(content.config.num_hidden_layers)


def load(folder: Path, source: Source) -> Any:
    """The model as it came, with R.bin applied to it in PyTorch by SpinQuant's rules."""
    with tempfile.TemporaryDirectory() as plain:
        content = streamed(source.opened, Transform(), Scheme())
        write_checkpoint(Path(plain), source.opened, content, dtype="float32")
        model = load_plain(Path(plain))
    return apply_spinquant(model, folder / FILE)


SPINQUANT = Format("spinquant", check, write, load, needs=("torch",))


def fixed_rotations(config: ModelConfig) -> str:
    """In words which of SpinQuant's fixed R3 and R4 are the matrices that qrot has, too.

    Both are Sylvester's where the order is a power of two. Any other order is built on a smaller
    matrix, and those differ: compared, with the code of SpinQuant's repository, for 12, 20, 28,
    36, 40, 44, 52, 60, 108, 140, 156 and 172, which are all that it has.
    """
    words = [
        f"{_LABELS[name]} of order {n} is {'the same as' if same else 'another one than'} qrot's"
        for name, n, same in _fixed(config)
    ]
    return f"SpinQuant has a fixed R3 and R4: {', '.join(words)}."


def _fixed(config: ModelConfig) -> list[tuple[str, int, bool]]:
    """(Rotation, its order, whether SpinQuant has the same matrix) of the online ones."""
    orders = {name: rotation_site(name).rotation_size(config) for name in ONLINE}
    return [(name, n, n & (n - 1) == 0) for name, n in orders.items()]


def same_as_spinquant(config: ModelConfig) -> dict[str, bool]:
    """By name of an online rotation whether SpinQuant has the same matrix for it."""
    return {name: same for name, _, same in _fixed(config)}


def spinquant_tensors(
    transform: Transform, config: ModelConfig
) -> dict[str, Float32[np.ndarray, "n n"]]:
    """{"R1": [hidden, hidden], "model.layers.{i}.self_attn.R2": [head_dim, head_dim]}.

    x -> x R, as SpinQuant has them: q, k, v, gate, up, embed and head become W R1 in PyTorch's
    [out, in], o and down R1^T W; v's outputs and o's inputs turn by R2 in each head.

    Args:
        transform: with its rotations.
        config: sizes.

    Raises:
        InputError: where R2 differs between the heads of a layer, which the format cannot say.
    """
    value = transform.rotations.get("value")
    if value is not None and len(value.stack) > 1:
        raise InputError(
            "R.bin has one R2 a layer and these rotations have one a kv head; learn them with "
            "learn.value_heads=false"
        )
    tensors = {_R1: _matrix(transform.rotations.get("residual"), config.hidden_size)}
    for i in range(config.num_hidden_layers):
        own = None if value is None else jax.tree.map(lambda x, i=i: x[i], value)
        tensors[_R2.format(i)] = _matrix(own, config.head_dim)
    return tensors


def _matrix(rotation: Any, n: int) -> Float32[np.ndarray, "n n"]:
    return np.array(rotate(jnp.eye(n, dtype=jnp.float32), rotation))


def read_spinquant(path: Path, config: ModelConfig, *, online: bool = True) -> Transform:
    """Rotations out of an R.bin from anywhere.

    Args:
        path: of the file.
        config: of the model that it was learned for.
        online: whether to put R3 and R4 beside them, which SpinQuant does not learn: Hadamard
            matrices without signs, which the file does not hold (see `fixed_rotations`).

    Returns:
        Rotations, orthogonal to within float32: a file in bfloat16 is brought to it in float64.

    Raises:
        InputError: where the file is no R.bin, its sizes are another model's, or a matrix is not
            orthogonal.
    """
    tensors = _read(path)

    def take(name: str, n: int) -> Float32[np.ndarray, "n n"]:
        if name not in tensors:
            raise InputError(f"{path}: has no {name}; it is no R.bin of this model")
        matrix = tensors[name]
        if matrix.shape != (n, n):
            sizes = " x ".join(map(str, matrix.shape))
            raise InputError(f"{path}: {name} is {sizes}, and this model needs {n} x {n}")
        return _orthogonal(matrix, f"{path}: {name}").astype(np.float32)

    layers = range(config.num_hidden_layers)
    rotations: dict[str, Any] = {
        "residual": Dense(jnp.asarray(take(_R1, config.hidden_size))),
        "value": Dense(jnp.stack([take(_R2.format(i), config.head_dim) for i in layers])),
    }
    for name, n, _ in _fixed(config) if online else ():
        rotations[name] = Hadamard(jnp.ones(n, jnp.float32))
        check_size(rotations[name], n)  # a size without a matrix is refused here
    return Transform(rotations)


def _read(path: Path) -> dict[str, Float[np.ndarray, "..."]]:
    import torch

    if not path.is_file():
        raise InputError(f"{path}: no such file")
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
        return {name: x.detach().to(torch.float64).numpy() for name, x in loaded.items()}
    except Exception as error:  # torch's reader, pickle and zipfile raise all kinds
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"{path}: not a file of tensors ({reason})") from error


def _orthogonal(matrix: Float[np.ndarray, "n n"], where: str) -> Float[np.ndarray, "n n"]:
    """The nearest orthogonal matrix to one that is to within 1e-2; raises InputError beyond."""
    if not (first := _error(matrix)) <= _TOLERANCE:
        raise InputError(f"{where} is not orthogonal, R R^T - I reaches {first:.1e}")
    if first <= _FLOAT32:
        return matrix
    with jax.enable_x64(True):
        rotation = Dense(jnp.asarray(matrix))
        for _ in range(_STEPS):  # each squares the error
            rotation = reorthonormalised(rotation)
        refined = rotation.dense()
    if not (last := _error(refined)) <= _FLOAT32:
        raise InputError(f"{where} is not near an orthogonal matrix, R R^T - I stays at {last:.1e}")
    return refined


def _error(matrix: Float[np.ndarray, "n n"]) -> float:
    return float(np.abs(matrix @ matrix.T - np.eye(len(matrix))).max())


def apply_spinquant(model: Any, path: Path) -> Any:
    """Rotate a transformers model with tied or untied embeddings by an R.bin, as SpinQuant does.

    Norms are folded first; no embedding is centred, which RMSNorm would not bear.
    """
    import torch

    tensors = {name: x.double() for name, x in torch.load(path, weights_only=True).items()}
    first, decoder = tensors[_R1], model.model
    with torch.no_grad():
        head = model.lm_head.weight.double() * decoder.norm.weight.double()
        model.lm_head.weight = torch.nn.Parameter((head @ first).to(model.lm_head.weight.dtype))
        table = decoder.embed_tokens.weight
        table.data = (table.double() @ first).to(table.dtype)
        decoder.norm.weight.fill_(1)
        for i, layer in enumerate(decoder.layers):
            _rotate_layer(layer, first, tensors[_R2.format(i)])
    return model


def _rotate_layer(layer: Any, first: Any, second: Any) -> None:
    attention, mlp = layer.self_attn, layer.mlp
    for norm, linears in (
        (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
        (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
    ):
        for linear in linears:
            weight = linear.weight.double() * norm.weight.double()
            linear.weight.copy_(weight @ first)
        norm.weight.fill_(1)
    for linear in (attention.o_proj, mlp.down_proj):
        linear.weight.copy_(first.T @ linear.weight.double())
        if linear.bias is not None:
            linear.bias.copy_(linear.bias.double() @ first)
    _rotate_values(attention, second)


def _rotate_values(attention: Any, second: Any) -> None:
    size = len(second)
    v, o = attention.v_proj, attention.o_proj
    heads = v.weight.double().T.unflatten(-1, (-1, size)) @ second
    v.weight.copy_(heads.flatten(-2).T)
    if v.bias is not None:
        v.bias.copy_((v.bias.double().unflatten(-1, (-1, size)) @ second).flatten(-2))
    o.weight.copy_((o.weight.double().unflatten(-1, (-1, size)) @ second).flatten(-2))
