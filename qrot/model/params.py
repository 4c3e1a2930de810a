"""The parameters of a decoder: frozen pytrees, layers stacked on a leading axis.

Weights are stored `[in, out]`: y = x W + b with row vectors x. A forward pass scans over the
leading axis of `Layers`, so every leaf in it has `layers` as its first dimension.
"""

from __future__ import annotations

from typing import Any

from flax import struct

from qrot.model.config import ModelConfig


@struct.dataclass
class Linear:
    """y = x weight + bias, with weight [..., in, out] and bias [..., out] or None."""

    weight: Any
    bias: Any = None


@struct.dataclass
class PackedLinear:
    """y = x W + b with W = codes * scale; every leaf may have a leading `layers` axis.

    codes: [groups, rows, out] int8, rows the inputs of a group, or half as many, two 4-bit codes a
      byte (`pack_int4`), as `bits` says. scale: [groups, out].
    sums: [groups, out], of a group's codes, for activations with a zero point that is not taken off
      before the product (8 bits); or None.
    shifted: [out], what the constant shift of the activations comes to: mu W; or None.
    """

    codes: Any
    scale: Any
    sums: Any = None
    shifted: Any = None
    bias: Any = None
    bits: int = struct.field(pytree_node=False, default=4)


@struct.dataclass
class Layers:
    """All decoder layers, stacked: every leaf has a leading `layers` axis.

    q to down are each a `Linear`, with weights of the shape given, or a `PackedLinear`.
    """

    attention_norm: Any  # [layers, hidden], the scale of the norm before q, k, v
    q: Any  # [layers, hidden, heads * head_dim]
    k: Any  # [layers, hidden, kv_heads * head_dim]
    v: Any  # [layers, hidden, kv_heads * head_dim]
    o: Any  # [layers, heads * head_dim, hidden]
    mlp_norm: Any  # [layers, hidden], the scale of the norm before gate, up
    gate: Any  # [layers, hidden, intermediate]
    up: Any  # [layers, hidden, intermediate]
    down: Any  # [layers, intermediate, hidden]
    q_norm: Any = None  # [layers, head_dim], only where the architecture norms q and k per head
    k_norm: Any = None  # [layers, head_dim]


@struct.dataclass
class Params:
    """A whole model.

    `head is None` means that the output projection is the transposed embedding (tied); see
    `qrot.model.fuse.untie`.
    """

    embed: Any  # [vocab, hidden]
    layers: Layers
    norm: Any  # [hidden], the scale of the last norm
    head: Any = None  # [hidden, vocab]


PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")


@struct.dataclass
class Model:
    """What `load` returns: parameters with everything needed to use and to name them."""

    params: Params
    config: ModelConfig = struct.field(pytree_node=False)
    tokenizer: Any = struct.field(pytree_node=False)  # tokenizers.Tokenizer or None
    name: str = struct.field(pytree_node=False)  # as the user gave it
    digest: str = struct.field(pytree_node=False)  # sha256 of config and weights, 16 hex digits
    note: str = struct.field(pytree_node=False, default="")  # e.g. "dequantised from Q4_1"
