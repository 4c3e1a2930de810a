"""GGUF files byte by byte, good ones and others."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import models
import numpy as np

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class Raw(NamedTuple):
    """A value of this GGUF type and these bytes."""

    kind: int
    content: bytes


class Place(NamedTuple):
    """What a header says of a tensor: axes as GGUF has them, type, offset."""

    axes: tuple[int, ...]
    kind: int
    offset: int


def gguf_name(name: str) -> str:
    """GGUF's name of a tensor of Hugging Face's."""
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name


def text(value: str | bytes) -> bytes:
    """A string as GGUF has it."""
    content = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(content)) + content


def value(x: Any) -> Raw:
    """A Python value in the type that GGUF has for it."""
    if isinstance(x, Raw):
        return x
    if isinstance(x, bool):
        return Raw(7, struct.pack("<?", x))
    if isinstance(x, int):
        return Raw(4, struct.pack("<I", x)) if x >= 0 else Raw(5, struct.pack("<i", x))
    if isinstance(x, float):
        return Raw(6, struct.pack("<f", x))
    if isinstance(x, str):
        return Raw(8, text(x))
    items = [value(item) for item in x]
    start = struct.pack("<IQ", items[0].kind if items else 4, len(items))
    return Raw(9, start + b"".join(item.content for item in items))


def header(
    pairs: Iterable[tuple[str | bytes, Any]],
    places: Iterable[tuple[str | bytes, Place]],
    *,
    tensor_count: int | None = None,
    pair_count: int | None = None,
) -> bytes:
    """The bytes before the data of the tensors, not yet aligned."""
    pairs, places = list(pairs), list(places)
    counts = (
        len(places) if tensor_count is None else tensor_count,
        len(pairs) if pair_count is None else pair_count,
    )
    content = b"GGUF" + struct.pack("<IQQ", 3, *counts)
    for key, x in pairs:
        kind, payload = value(x)
        content += text(key) + struct.pack("<I", kind) + payload
    for name, place in places:
        form = f"<I{len(place.axes)}QIQ"
        packed = struct.pack(form, len(place.axes), *place.axes, place.kind, place.offset)
        content += text(name) + packed
    return content


class Parts(NamedTuple):
    """A model: metadata, places of its tensors, and their data."""

    pairs: dict[str, Any]
    places: dict[str, Place]
    data: bytes

    def write(self, path: Path, **counts: int) -> Path:
        """As a file with an alignment of 32."""
        content = header(self.pairs.items(), self.places.items(), **counts)
        path.write_bytes(content + bytes(-len(content) % 32) + self.data)
        return path

    def with_(self, **changes: Any) -> Parts:
        """With other metadata, "__" in place of each point; None takes a key away."""
        named = {key.replace("__", "."): x for key, x in changes.items()}
        pairs = {**self.pairs, **named}
        return self._replace(pairs={key: x for key, x in pairs.items() if x is not None})

    def moved(self, name: str, **changes: Any) -> Parts:
        """With another place of a tensor."""
        return self._replace(places={**self.places, name: self.places[name]._replace(**changes)})

    def named(self, **names: str) -> Parts:
        """With tensors of other names."""
        places = {names.get(name.replace(".", "__"), name): x for name, x in self.places.items()}
        return self._replace(places=places)


def parts(architecture: str = "llama", extra: dict[str, np.ndarray] | None = None) -> Parts:
    """A tiny model of one layer in float32."""
    config = models.config_json(architecture, num_hidden_layers=1)
    pairs = {
        "general.architecture": architecture,
        f"{architecture}.block_count": 1,
        f"{architecture}.context_length": config["max_position_embeddings"],
        f"{architecture}.embedding_length": config["hidden_size"],
        f"{architecture}.feed_forward_length": config["intermediate_size"],
        f"{architecture}.attention.head_count": config["num_attention_heads"],
        f"{architecture}.attention.head_count_kv": config["num_key_value_heads"],
        f"{architecture}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{architecture}.rope.freq_base": config["rope_theta"],
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
    }
    if "head_dim" in config:
        pairs[f"{architecture}.attention.key_length"] = config["head_dim"]
    places, data = {}, b""
    for name, tensor in {**models.weights(config), **(extra or {})}.items():
        places[gguf_name(name)] = Place(tensor.shape[::-1], 0, len(data))
        content = tensor.astype(np.float32).tobytes()
        data += content + bytes(-len(content) % 32)
    return Parts(pairs, places, data)
