"""SpinQuant's R.bin, which ExecuTorch reads, too: R1 and R2 as matrices, to PyTorch and back."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32

from qrot.errors import InputError
from qrot.export.checkpoint import write_checkpoint
from qrot.export.content import Content, streamed
from qrot.export.format import Format, Options, Plan, fitted, left_out
from qrot.export.read_spinquant import R1, R2, fixed_rotations, read_spinquant, same_as_spinquant
from qrot.export.source import Source
from qrot.export.verify import load_plain
from qrot.files.torch_file import open_torch_file
from qrot.model.config import ModelConfig
from qrot.rotation.forms import rotate
from qrot.rotation.transform import Transform, of_layer
from qrot.scheme import Scheme
from qrot.sites import ONLINE

__all__ = ["apply_spinquant", "fixed_rotations", "read_spinquant", "same_as_spinquant"]

FILE = "R.bin"


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
    packed = io.BytesIO()  # torch's own writer says of a full disk what is no OSError
    torch.save({name: torch.from_numpy(x) for name, x in tensors.items()}, packed)
    (folder / FILE).write_bytes(packed.getbuffer())
    advance(content.config.num_hidden_layers)


def load(folder: Path, source: Source) -> Any:
    """The model as it came, with R.bin applied to it in PyTorch by SpinQuant's rules."""
    with tempfile.TemporaryDirectory() as plain:
        content = streamed(source.opened, Transform(), Scheme())
        write_checkpoint(Path(plain), source.opened, content, dtype="float32")
        model = load_plain(Path(plain))
    return apply_spinquant(model, folder / FILE)


SPINQUANT = Format("spinquant", check, write, load, needs=("torch",))


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
    tensors = {R1: _matrix(transform.rotations.get("residual"), config.hidden_size)}
    alone = Transform({} if value is None else {"value": value})
    for i in range(config.num_hidden_layers):
        own = of_layer(alone, i).rotations.get("value")
        tensors[R2.format(i)] = _matrix(own, config.head_dim)
    return tensors


def _matrix(rotation: Any, n: int) -> Float32[np.ndarray, "n n"]:
    return np.array(rotate(jnp.eye(n, dtype=jnp.float32), rotation))


def apply_spinquant(model: Any, path: Path) -> Any:
    """Rotate a transformers model with tied or untied embeddings by an R.bin, as SpinQuant does.

    Norms are folded first; no embedding is centred, which RMSNorm would not bear.
    """
    import torch

    most = 8 * sum(x.numel() for x in model.parameters())
    stored = open_torch_file(path, most)
    tensors = {name: torch.from_numpy(x.whole().astype("d")) for name, x in stored.items()}
    first, decoder = tensors[R1], model.model
    with torch.no_grad():
        head = model.lm_head.weight.double() * decoder.norm.weight.double()
        model.lm_head.weight = torch.nn.Parameter((head @ first).to(model.lm_head.weight.dtype))
        table = decoder.embed_tokens.weight
        table.data = (table.double() @ first).to(table.dtype)
        decoder.norm.weight.fill_(1)
        for i, layer in enumerate(decoder.layers):
            _rotate_layer(layer, first, tensors[R2.format(i)])
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
