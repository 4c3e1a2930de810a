"""Models in llama.cpp's file format, GGUF, in any tensor type that the `gguf` package reads.

The header is read here rather than by `gguf.GGUFReader`: that makes numpy objects of each of the
100,000 strings of a vocabulary, which takes seconds, and reports a truncated file as an IndexError.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from qrot.errors import InputError, located
from qrot.model.config import ModelConfig, RopeScaling
from qrot.model.io.assemble import (
    EMBED,
    HEAD,
    MODULES,
    NORM,
    Reader,
    Tensor,
    assemble,
    map_file,
    release,
)
from qrot.sites import PROJECTIONS

ARCHITECTURES = ("llama", "qwen2", "qwen3")  # Mistral and SmolLM are stored as llama
_MODULES = {  # field of `Layers` -> GGUF's name inside "blk.{i}."
    "attention_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
_FIELDS = {module: field for field, module in _MODULES.items()}
_GLOBAL = {"token_embd.weight": EMBED, "output_norm.weight": NORM, "output.weight": HEAD}
# Keys of "<architecture>." that are used below or that say nothing about the function.
_KEYS = {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "attention.causal",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
}
# What ends a text, and a turn or a message of a dialogue: llama.cpp stops at each.
_ENDS = [f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom")]
_SCALARS = {  # GGUF value type -> struct format
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9


def open_gguf(path: Path, dtype: Any) -> tuple[ModelConfig, Reader, dict[str, Any], str]:
    """Open a GGUF file.

    Args:
        path: of the file.
        dtype: of the parameters.

    Returns:
        The configuration, what reads the parameters, the metadata, and a note that says which
        quantised types were dequantised, most numbers first ("" if none).

    Raises:
        InputError: for a file that is not GGUF, is truncated, or holds a model that qrot lacks.
    """
    memory = map_file(path)
    try:
        metadata, infos, data_start = _header(memory)
    except (struct.error, UnicodeDecodeError, OverflowError) as error:
        raise InputError(f"{path} is truncated or not a valid GGUF file.") from error
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    with located(path):
        config = _config(metadata, infos, memory, data_start)
        tensors = _tensors(config, metadata, infos, memory, data_start)
        biased = [p for p in PROJECTIONS if f"model.layers.0.{MODULES[p]}.bias" in tensors]
        if config.architecture == "qwen2":
            biased = ["q", "k", "v"]
        read = assemble(config, tensors, dtype, biased=biased)
    return config, read, metadata, _note(infos)


class _Info:
    """Where a tensor is: GGUF type, shape as numpy has it, offset from the start of the data."""

    def __init__(self, kind: int, shape: tuple[int, ...], offset: int):
        try:
            self.kind = gguf.GGMLQuantizationType(kind)
        except ValueError as error:
            raise InputError(f"tensor type {kind} is unknown to the gguf package.") from error
        block, size = gguf.GGML_QUANT_SIZES[self.kind]
        self.shape, self.offset = shape, offset
        self.row_bytes = shape[-1] // block * size
        if shape[-1] % block:
            raise InputError(f"{self.kind.name} needs rows that are multiples of {block}.")


def _header(memory: mmap.mmap) -> tuple[dict[str, Any], dict[str, _Info], int]:
    """Metadata, tensors, and where their data begin (layout: GGUF specification, versions 2, 3)."""
    if memory[:4] != b"GGUF":
        raise InputError("not a GGUF file.")
    (version, tensor_count, pair_count), at = struct.unpack_from("<IQQ", memory, 4), 24
    if version not in (2, 3):
        raise InputError("only little-endian GGUF files of version 2 or 3 are supported.")

    def string(at: int) -> tuple[str, int]:
        (length,) = struct.unpack_from("<Q", memory, at)
        end = at + 8 + length
        if end > len(memory):
            raise struct.error("string runs past the end")
        return memory[at + 8 : end].decode(), end

    def value(kind: int, at: int) -> tuple[Any, int]:
        if kind in _SCALARS:
            (result,) = struct.unpack_from(_SCALARS[kind], memory, at)
            # The shortest decimal with this float32: 1e-05, not 9.999999747378752e-06.
            result = float(str(np.float32(result))) if kind == 6 else result
            return result, at + struct.calcsize(_SCALARS[kind])
        if kind == _STRING:
            return string(at)
        (item, count), at = struct.unpack_from("<IQ", memory, at), at + 12
        if kind != _ARRAY or (item not in _SCALARS and item != _STRING):
            raise struct.error(f"unknown value type {kind}")
        if item in _SCALARS:
            form = _SCALARS[item]
            if count > len(memory):
                raise struct.error("array runs past the end")
            result = struct.unpack_from(f"<{count}{form[1]}", memory, at)
            return list(result), at + count * struct.calcsize(form)
        items = []
        for _ in range(count):
            entry, at = string(at)
            items.append(entry)
        return items, at

    metadata: dict[str, Any] = {}
    for _ in range(pair_count):
        key, at = string(at)
        (kind,) = struct.unpack_from("<I", memory, at)
        metadata[key], at = value(kind, at + 4)
    infos = {}
    for _ in range(tensor_count):
        name, at = string(at)
        (rank,) = struct.unpack_from("<I", memory, at)
        if not 1 <= rank <= 4:
            raise struct.error(f"{rank} dimensions")
        *shape, kind, offset = struct.unpack_from(f"<{rank}QIQ", memory, at + 4)
        at += 4 + 8 * rank + 12
        if 0 in shape:
            raise struct.error("an empty tensor")
        infos[name] = _Info(kind, tuple(reversed(shape)), offset)
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise struct.error("alignment")
    return metadata, infos, -(-at // alignment) * alignment


def _raw(info: _Info, memory: mmap.mmap, data_start: int) -> np.ndarray:
    """The bytes of a tensor, uint8 [rows, bytes of a row]; a 1-D tensor is one row."""
    rows = math.prod(info.shape[:-1])
    start = data_start + info.offset
    if start + rows * info.row_bytes > len(memory):
        raise InputError("the file is truncated.")
    flat = np.frombuffer(memory, np.uint8, rows * info.row_bytes, start)
    return flat.reshape(rows, info.row_bytes)


def _dequantize(raw: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    try:
        return gguf.dequantize(raw, kind)
    except NotImplementedError as error:
        raise InputError(f"tensor type {kind.name} cannot be dequantised by gguf.") from error


def _config(
    metadata: dict[str, Any], infos: dict[str, _Info], memory: mmap.mmap, data_start: int
) -> ModelConfig:
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise InputError(
            f"architecture {architecture!r} is not supported in GGUF; supported are"
            f" {', '.join(ARCHITECTURES)} (which includes Mistral and SmolLM)."
        )
    if metadata.get("split.count", 0) > 1:
        raise InputError("the model is split over several GGUF files, which is not supported.")
    fields = {
        key.removeprefix(f"{architecture}."): value
        for key, value in metadata.items()
        if key.startswith(f"{architecture}.")
    }
    unknown = sorted(key for key, value in fields.items() if key not in _KEYS and value)
    if unknown:
        raise InputError(f"the setting {architecture}.{unknown[0]} is not supported.")

    def integer(key: str, default: int | None = None) -> int:
        value = fields.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"{architecture}.{key} must be a positive integer, not {value!r}.")
        return value

    heads, hidden = integer("attention.head_count"), integer("embedding_length")
    head_dim = integer("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.get(key, head_dim) != head_dim:
            raise InputError(f"{architecture}.{key} differs from the head dimension {head_dim}.")
    if "token_embd.weight" not in infos:
        raise InputError("the weights lack the tensor token_embd.weight.")
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden,
        intermediate_size=integer("feed_forward_length"),
        num_hidden_layers=integer("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab_size=infos["token_embd.weight"].shape[0],
        rms_norm_eps=fields.get("attention.layer_norm_rms_epsilon", 1e-5),
        rope_theta=fields.get("rope.freq_base", 10000.0),
        rope_scaling=_rope_scaling(architecture, fields, infos, memory, data_start),
        max_position_embeddings=integer("context_length"),
        tie_word_embeddings="output.weight" not in infos,
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=tuple(dict.fromkeys(metadata[key] for key in _ENDS if key in metadata)),
    )


def _rope_scaling(
    architecture: str,
    fields: dict[str, Any],
    infos: dict[str, _Info],
    memory: mmap.mmap,
    data_start: int,
) -> RopeScaling | None:
    if "rope_freqs.weight" in infos:
        info = infos["rope_freqs.weight"]
        divisors = _dequantize(_raw(info, memory, data_start), info.kind).ravel()
        return _llama3(divisors, fields.get("rope.freq_base", 10000.0))
    factor = fields.get("rope.scaling.factor", fields.get("rope.scale_linear", 1.0))
    kind = fields.get("rope.scaling.type", "linear")
    if kind not in ("none", "linear"):
        raise InputError(
            f"rope scaling {kind!r} is not supported; supported are none, linear and llama3."
        )
    return RopeScaling("linear", factor) if kind == "linear" and factor not in (0, 1) else None


def _llama3(divisors: np.ndarray, theta: float) -> RopeScaling | None:
    """GGUF stores Llama 3's scaling as one divisor for each frequency; find its settings again.

    Every published model with it has low 1, high 4 and 8192 positions; the factor differs.
    """
    scaling = RopeScaling("llama3", float(divisors.max()), 1.0, 4.0, 8192)
    wavelength = 2 * np.pi * theta ** (np.arange(len(divisors)) / len(divisors))
    smooth = np.clip((8192 / wavelength - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    if not np.allclose(divisors, 1 / ((1 - smooth) / scaling.factor + smooth), rtol=1e-4):
        raise InputError("rope_freqs.weight holds frequencies other than those of Llama 3.")
    return scaling if scaling.factor > 1 else None


def _tensors(
    config: ModelConfig,
    metadata: dict[str, Any],
    infos: dict[str, _Info],
    memory: mmap.mmap,
    data_start: int,
) -> dict[str, Tensor]:
    """The tensors under Hugging Face's names, unpermuted; an unknown name stays as it is."""
    tensors = {}
    for name, info in infos.items():
        if name == "rope_freqs.weight":
            continue
        parts = name.split(".")
        field = _FIELDS.get(parts[2]) if len(parts) == 4 and parts[0] == "blk" else None
        full = _GLOBAL.get(name, name)
        if field is not None:
            full = f"model.layers.{parts[1]}.{MODULES[field]}.{parts[3]}"
        raw = _raw(info, memory, data_start)
        order = None
        if config.architecture == "llama" and field in ("q", "k"):
            heads = config.num_attention_heads if field == "q" else config.num_key_value_heads
            order = _unpermute(info.shape[0], heads)
        tensors[full] = _tensor(info, raw, order, memory)
    return tensors


def _unpermute(rows: int, heads: int) -> np.ndarray | None:
    """Where each row of a q or k projection is: llama.cpp stores the two halves of a head of a
    llama model interleaved, as its rotary embedding pairs neighbours."""
    if rows % (2 * heads):
        return None  # of a wrong shape, as `assemble` will say
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).ravel()


def _tensor(info: _Info, raw: np.ndarray, order: np.ndarray | None, memory: mmap.mmap) -> Tensor:
    def rows(start: int, stop: int) -> np.ndarray:
        release(memory)
        if len(info.shape) == 1:
            whole = _dequantize(raw, info.kind)[0]
            return whole[start:stop] if order is None else whole[order[start:stop]]
        block = raw[start:stop] if order is None else raw[order[start:stop]]
        return _dequantize(block, info.kind)

    return Tensor(info.shape, rows)


def _note(infos: dict[str, _Info]) -> str:
    plain = ("F64", "F32", "F16", "BF16")
    counts: dict[str, int] = {}
    for info in infos.values():
        if info.kind.name not in plain:
            count = math.prod(info.shape)
            counts[info.kind.name] = counts.get(info.kind.name, 0) + count
    names = sorted(counts, key=lambda name: -counts[name])
    return f"dequantised from {' and '.join(names)}" if names else ""
