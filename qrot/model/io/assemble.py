"""From named tensors to `Params`: the checks and the one copy that every file format shares.

A format offers its tensors under Hugging Face's names as `Tensor`s, which read rows on demand.
Here they are checked, transposed to [in, out], cast, and stacked into one array for each leaf.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from qrot.errors import InputError
from qrot.files.plain import shown
from qrot.files.tensors import Tensor
from qrot.model.config import ModelConfig
from qrot.model.params import Layers, Linear, Params, layer_shapes
from qrot.sites import PROJECTIONS

# Rows are read in blocks of about this many numbers, which bounds the memory beside the result.
BLOCK = 1 << 18
DTYPES = ("float64", "float32", "bfloat16", "float16")
EMBED, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
# Field of `Layers` -> module inside "model.layers.{i}.".
MODULES = {
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


_NORMS = ("attention_norm", "mlp_norm", "q_norm", "k_norm")


class _Leaf(NamedTuple):
    names: list[str]  # one stored tensor for each layer; a single one outside the layers
    shape: tuple[int, ...]  # of each, as stored: [out, in] for a weight
    stacked: bool
    transposed: bool


class Stored(NamedTuple):
    """A model as its files have it, whatever their format; no tensor is read yet.

    Attributes:
        config: sizes and switches.
        tensors: by Hugging Face's names, weights [out, in].
        biased: the projections that have a bias.
        metadata: of a GGUF file; config.json of a folder.
        files: that define it.
        note: for tables, such as "dequantised from Q4_1".
    """

    config: ModelConfig
    tensors: Mapping[str, Tensor]
    biased: Collection[str]
    metadata: dict[str, Any]
    files: list[Path]
    note: str = ""


@runtime_checkable
class Reader(Protocol):
    """Reads parameters: all of them, or only some layers.

    Without their ends they have an embedding of no rows, a norm of ones and no head.
    """

    def __call__(self, layers: range | None = None, *, ends: bool = True) -> Params: ...  # noqa: D102


def assemble(stored: Stored, dtype: Any) -> Reader:
    """What stacks tensors into `Params`.

    Memory: the result, one stacked array of it at a time on its way to an accelerator, and a block
    of rows.

    Args:
        stored: the model.
        dtype: of the parameters, one of `DTYPES`.

    Raises:
        InputError: for a missing or unexpected tensor, a wrong shape, and another dtype; when read,
            for a number that is not finite or does not fit the dtype.
    """
    config, tensors = stored.config, stored.tensors
    dtype = _check_dtype(dtype)
    _check_heads(config)
    if config.num_hidden_layers > len(tensors):  # before all their names are made
        raise InputError(
            f"the configuration says {config.num_hidden_layers} layers, but the weights hold only"
            f" {len(tensors)} tensors."
        )
    leaves = _leaves(config, stored.biased)
    _check_tensors(config, tensors, leaves)

    def read(layers: range | None = None, *, ends: bool = True) -> Params:
        # Without ends; by numpy, so that nothing is compiled, which takes memory.
        arrays = {EMBED: jnp.asarray(np.zeros((0, config.hidden_size), dtype))}
        arrays[NORM] = jnp.asarray(np.ones(config.hidden_size, dtype))
        for key, leaf in leaves.items():
            if leaf.stacked and layers is not None:
                leaf = leaf._replace(names=[leaf.names[i] for i in layers])
            if leaf.stacked or ends:
                arrays[key] = _read(leaf, tensors, dtype)
        fields: dict[str, Any] = {norm: arrays.get(f"{norm}.weight") for norm in _NORMS}
        for name in PROJECTIONS:
            fields[name] = Linear(arrays[f"{name}.weight"], arrays.get(f"{name}.bias"))
        return Params(arrays[EMBED], Layers(**fields), arrays[NORM], arrays.get(HEAD))

    return read


def _check_tensors(
    config: ModelConfig, tensors: Mapping[str, Tensor], leaves: dict[str, _Leaf]
) -> None:
    expected = {name for leaf in leaves.values() for name in leaf.names}
    missing = [name for leaf in leaves.values() for name in leaf.names if name not in tensors]
    extra = [name for name in tensors if name not in expected]
    if missing == [HEAD] and not extra:
        raise InputError(
            f"the weights lack the tensor {HEAD}; if the embedding is the head, the configuration"
            " must say so (tie_word_embeddings: true)."
        )
    if missing:
        others = f", and hold {_some(extra)} in their place" if extra else ""
        raise InputError(f"the weights lack {_some(missing)}{others}.")
    if extra:
        raise InputError(
            f"the weights hold {_some(extra)}, which a {config.architecture} model of this"
            " configuration does not have."
        )
    for leaf in leaves.values():
        for name in leaf.names:
            if tensors[name].dtype.name not in DTYPES:
                raise InputError(
                    f"{name} has dtype {tensors[name].dtype.name}; supported are"
                    f" {', '.join(DTYPES)}."
                )
            if tensors[name].shape != leaf.shape:
                raise InputError(
                    f"{name} has shape {list(tensors[name].shape)}, but the configuration says"
                    f" {list(leaf.shape)}."
                )


def _check_dtype(dtype: Any) -> np.dtype:
    try:
        result = jnp.dtype(dtype)
    except TypeError as error:
        raise InputError(f"{dtype!r} is no dtype; use one of {', '.join(DTYPES)}.") from error
    if result.name not in DTYPES:
        raise InputError(f"dtype {result.name} cannot hold weights; use {', '.join(DTYPES)}.")
    if jax.dtypes.canonicalize_dtype(result) != result:
        raise InputError("dtype float64 needs JAX_ENABLE_X64=1 in the environment.")
    return result


def _check_heads(config: ModelConfig) -> None:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        raise InputError(f"{kv_heads} key-value heads do not divide {heads} attention heads.")
    if config.head_dim % 2:
        raise InputError(f"head_dim is {config.head_dim}, but a rotary embedding needs it even.")


def _leaves(config: ModelConfig, biased: Collection[str]) -> dict[str, _Leaf]:
    """Every leaf of `Params` that this configuration has, with its names and stored shape."""

    def stacked(field: str, kind: str, shape: tuple[int, ...]) -> _Leaf:
        layers = range(config.num_hidden_layers)
        names = [f"model.layers.{i}.{MODULES[field]}.{kind}" for i in layers]
        return _Leaf(names, shape, stacked=True, transposed=len(shape) == 2)

    hidden = config.hidden_size
    table = (config.vocab_size, hidden)
    leaves = {EMBED: _Leaf([EMBED], table, stacked=False, transposed=False)}
    for field, own in layer_shapes(config).items():
        shape = own[::-1]  # PyTorch has weights [out, in]
        leaves[f"{field}.weight"] = stacked(field, "weight", shape)
        if field in biased:
            leaves[f"{field}.bias"] = stacked(field, "bias", shape[:1])
    leaves[NORM] = _Leaf([NORM], (hidden,), stacked=False, transposed=False)
    if not config.tie_word_embeddings:
        leaves[HEAD] = _Leaf([HEAD], table, stacked=False, transposed=True)
    return leaves


def _read(leaf: _Leaf, tensors: Mapping[str, Tensor], dtype: np.dtype) -> jax.Array:
    shape = leaf.shape[::-1] if leaf.transposed else leaf.shape
    array = _aligned((len(leaf.names), *shape), dtype)
    step = max(1, BLOCK // math.prod(leaf.shape[1:]))
    for target, name in zip(array, leaf.names, strict=True):
        target = target.T if leaf.transposed else target
        for start in range(0, leaf.shape[0], step):
            stop = min(start + step, leaf.shape[0])
            _copy(name, tensors[name].rows(start, stop), target[start:stop])
    # On a CPU this takes the aligned memory over as it is (jnp.asarray would copy it).
    return jax.device_put(array if leaf.stacked else array[0], may_alias=True)


def _copy(name: str, block: np.ndarray, target: np.ndarray) -> None:
    if not np.isfinite(block).all():
        raise InputError(f"{name} contains NaN or Inf.")
    if block.dtype == target.dtype:
        target[...] = block
        return
    with np.errstate(over="ignore"):
        block = block.astype(target.dtype)
    if not np.isfinite(block).all():
        raise InputError(f"{name} has numbers too large for {target.dtype.name}.")
    target[...] = block


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An empty array whose memory starts at a multiple of 64 bytes, as XLA wants it."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(shape)


def _some(names: Iterable[str]) -> str:
    first, *others = names
    named = shown(first)
    return f"{named} and {len(others)} more tensors" if others else f"the tensor {named}"
