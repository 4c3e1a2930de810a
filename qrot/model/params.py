"""The parameters of a decoder, and the network that they make: frozen pytrees.

Weights are stored `[in, out]`: y = x W + b with row vectors x. Layers are stacked: a forward pass
scans over the leading axis of `Layers`, so every leaf in it has `layers` as its first dimension.
"""

from __future__ import annotations

from typing import Any

from flax import struct
from jaxtyping import Float, Int8, Int32

from qrot.identity import Identity
from qrot.model.config import ModelConfig
from qrot.rotation.forms import Values
from qrot.rotation.transform import Online, Transform
from qrot.scheme import Scheme


class Linear(struct.PyTreeNode):
    """y = x weight + bias.

    Attributes:
        weight: W, of any floating dtype.
        bias: b; None for none.
        scale: where the weight is rounded to a symmetric grid, the step of the grid for each group
            of inputs and output: weight ~ integer * scale (1 group where the grid has none). None
            where it is not rounded, or its values are on no such grid.
    """

    weight: Float[Values, "*layers in out"]
    bias: Float[Values, "*layers out"] | None = None
    scale: Float[Values, "*layers groups out"] | None = None


class PackedLinear(struct.PyTreeNode):
    """y = x W + b with W ~ codes * scale, a group of inputs at a time.

    Attributes:
        codes: integers of the groups, rows the inputs of a group, or half as many, two 4-bit codes
            a byte (`pack_int4`), as `bits` says.
        scale: the step of each group and output.
        sums: of a group's codes, for activations with a zero point that is not taken off before the
            product (8 bits); or None.
        shifted: what the constant shift of the activations comes to, mu W; or None.
        bias: b; None for none.
        bits: of a code.
    """

    codes: Int8[Values, "*layers groups rows out"]
    scale: Float[Values, "*layers groups out"]
    sums: Int32[Values, "*layers groups out"] | None = None
    shifted: Float[Values, "*layers out"] | None = None
    bias: Float[Values, "*layers out"] | None = None
    bits: int = struct.field(pytree_node=False, default=4)


AnyLinear = Linear | PackedLinear


class Layers(struct.PyTreeNode):
    """All decoder layers stacked, or one of them without the `layers` axis.

    Attributes:
        attention_norm: the scale of the norm before q, k, v.
        q, k, v, o, gate, up, down: the projections. Inputs and outputs are q: hidden, heads *
            head_dim; k, v: hidden, kv_heads * head_dim; o: heads * head_dim, hidden; gate, up:
            hidden, intermediate; down: intermediate, hidden.
        mlp_norm: the scale of the norm before gate, up.
        q_norm, k_norm: only where the architecture norms q and k head by head.
    """

    attention_norm: Float[Values, "*layers hidden"]
    q: AnyLinear
    k: AnyLinear
    v: AnyLinear
    o: AnyLinear
    mlp_norm: Float[Values, "*layers hidden"]
    gate: AnyLinear
    up: AnyLinear
    down: AnyLinear
    q_norm: Float[Values, "*layers head_dim"] | None = None
    k_norm: Float[Values, "*layers head_dim"] | None = None

    def linear(self, name: str) -> Any:
        """The projection of this name, one of `PROJECTIONS`."""
        return getattr(self, name)


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The fields of `Layers` that a configuration has, with the shapes of one layer.

    Of a projection it is that of its weight, (inputs, outputs).
    """
    hidden, mlp, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "attention_norm": (hidden,),
        "q": (hidden, queries),
        "k": (hidden, keys),
        "v": (hidden, keys),
        "o": (queries, hidden),
        "mlp_norm": (hidden,),
        "gate": (hidden, mlp),
        "up": (hidden, mlp),
        "down": (mlp, hidden),
    }
    if config.architecture == "qwen3":
        shapes |= {"q_norm": (head_dim,), "k_norm": (head_dim,)}
    return shapes


class Params(struct.PyTreeNode):
    """A whole model.

    Attributes:
        embed: the table of embeddings.
        layers: the decoder layers.
        norm: the scale of the last norm.
        head: the output projection; None where it is the transposed embedding (tied).
    """

    embed: Float[Values, "vocab hidden"]
    layers: Layers
    norm: Float[Values, " hidden"]
    head: Float[Values, "hidden vocab"] | None = None


class Network(struct.PyTreeNode):
    """All that computes logits: what is judged, exported and written with.

    Attributes:
        params: the parameters.
        online: what acts beside them. `Online` is what `fuse` has left. A `Transform` acts as a
            whole: each site computes Q(x A) A^-1 in place of x, which is what the fused network
            computes as long as its weights are not quantised, without touching a weight.
        config: sizes and switches.
        scheme: the grids of weights and sites. Weights are used as they are: those that a scheme
            rounds have been rounded (`qrot.quantize`), or will be.
    """

    params: Params
    online: Transform | Online
    config: ModelConfig = struct.field(pytree_node=False)
    scheme: Scheme = struct.field(pytree_node=False, default=Scheme())


class Model(struct.PyTreeNode):
    """What `load` returns: a network with what names it and reads text for it.

    Attributes:
        network: in full precision, with nothing online.
        tokenizer: of the package `tokenizers`, or None.
        name: as the user gave it.
        identity: what tells it from others.
        note: for tables, such as "dequantised from Q4_1".
        revision: of the hub, the commit that was fetched; "" for a model from elsewhere.
    """

    network: Network
    tokenizer: Any = struct.field(pytree_node=False)
    name: str = struct.field(pytree_node=False)
    identity: Identity = struct.field(pytree_node=False)
    note: str = struct.field(pytree_node=False, default="")
    revision: str = struct.field(pytree_node=False, default="")

    @property
    def digest(self) -> str:
        """sha256 of the files of configuration and weights, 16 hex digits."""
        return self.identity.of_files
