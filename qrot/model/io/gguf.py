"""Models in llama.cpp's file format, GGUF, in any tensor type that the `gguf` package reads."""

from __future__ import annotations

import math
import mmap
from pathlib import Path

import numpy as np

from qrot.errors import InputError, located
from qrot.files.plain import shown
from qrot.files.tensors import Tensor, map_file, release
from qrot.model.config import ModelConfig
from qrot.model.io.assemble import EMBED, HEAD, MODULES, NORM, Stored
from qrot.model.io.gguf_config import check_kind, parse_metadata
from qrot.model.io.gguf_hadamard import is_rotated
from qrot.model.io.gguf_header import Info, dequantise, read_header
from qrot.sites import PROJECTIONS

FIELDS = {  # GGUF's name inside "blk.{i}." -> field of `Layers`
    "attn_norm": "attention_norm",
    "attn_q": "q",
    "attn_k": "k",
    "attn_v": "v",
    "attn_output": "o",
    "attn_q_norm": "q_norm",
    "attn_k_norm": "k_norm",
    "ffn_norm": "mlp_norm",
    "ffn_gate": "gate",
    "ffn_up": "up",
    "ffn_down": "down",
}
_EMBED, _HEAD = "token_embd.weight", "output.weight"
GLOBAL = {_EMBED: EMBED, "output_norm.weight": NORM, _HEAD: HEAD}
FREQUENCIES = "rope_freqs.weight"


def open_gguf(path: Path, *, rotated: bool = False) -> Stored:
    """Open a GGUF file.

    Its note says which quantised types were dequantised, most numbers first ("" if none).

    Args:
        path: of the file.
        rotated: whether the caller sees to what its weights' inputs are rotated by; see
            `qrot.model.io.gguf_hadamard`.

    Raises:
        InputError: for a file that is not GGUF, is truncated or says what cannot be, or holds a
            model that qrot lacks.
    """
    memory = map_file(path)
    with located(path):
        metadata, infos = read_header(memory)
        note, architecture = _note(infos), check_kind(metadata)
        if is_rotated(metadata) and not rotated:
            raise InputError("its weights read rotated inputs (prism.hadamard): start from others.")
        if _EMBED not in infos:
            raise InputError(f"the weights lack the tensor {_EMBED}.")
        divisors = None
        if architecture == "llama" and FREQUENCIES in infos:  # of the others llama.cpp has none
            info = infos.pop(FREQUENCIES)
            divisors = dequantise(_raw(info, memory), info.kind).ravel()
        config = parse_metadata(
            metadata, rows=infos[_EMBED].shape[0], tied=_HEAD not in infos, divisors=divisors
        )
        tensors = _tensors(config, infos, memory)
        biased = [p for p in PROJECTIONS if f"model.layers.0.{MODULES[p]}.bias" in tensors]
        if architecture == "qwen2":
            biased = ["q", "k", "v"]
    return Stored(config, tensors, biased, metadata, [path], note)


def _raw(info: Info, memory: mmap.mmap) -> np.ndarray:
    """The bytes of a tensor, uint8 [rows, bytes of a row]; a 1-D tensor is one row."""
    flat = np.frombuffer(memory, np.uint8, info.rows * info.row_bytes, info.start)
    return flat.reshape(info.rows, info.row_bytes)


def _tensors(config: ModelConfig, infos: dict[str, Info], memory: mmap.mmap) -> dict[str, Tensor]:
    """The tensors under Hugging Face's names, unpermuted."""
    tensors = {}
    for name, info in infos.items():
        parts = name.split(".")
        field = FIELDS.get(parts[2]) if len(parts) == 4 and parts[0] == "blk" else None
        if name in GLOBAL:
            full = GLOBAL[name]
        elif field is not None:
            full = f"model.layers.{parts[1]}.{MODULES[field]}.{parts[3]}"
        else:
            raise InputError(
                f"the weights hold the tensor {shown(name)}, which a {config.architecture} model"
                " does not have."
            )
        order = None
        if config.architecture == "llama" and field in ("q", "k"):
            heads = config.num_attention_heads if field == "q" else config.num_key_value_heads
            order = unpermute(info.shape[0], heads)
        tensors[full] = _tensor(info, order, memory)
    return tensors


def unpermute(rows: int, heads: int) -> np.ndarray | None:
    """Where each row of a q or k projection is: llama.cpp stores the two halves of a head of a
    llama model interleaved, as its rotary embedding pairs neighbours."""
    if rows % (2 * heads):
        return None  # of a wrong shape, as `assemble` will say
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).ravel()


def _tensor(info: Info, order: np.ndarray | None, memory: mmap.mmap) -> Tensor:
    raw = _raw(info, memory)

    def rows(start: int, stop: int) -> np.ndarray:
        release(memory)
        if len(info.shape) == 1:
            whole = dequantise(raw, info.kind)[0]
            return whole[start:stop] if order is None else whole[order[start:stop]]
        block = raw[start:stop] if order is None else raw[order[start:stop]]
        return dequantise(block, info.kind)

    return Tensor(info.shape, np.dtype(np.float32), rows)


def _note(infos: dict[str, Info]) -> str:
    plain = ("F64", "F32", "F16", "BF16")
    counts: dict[str, int] = {}
    for info in infos.values():
        if info.kind.name not in plain:
            count = math.prod(info.shape)
            counts[info.kind.name] = counts.get(info.kind.name, 0) + count
    names = sorted(counts, key=lambda name: -counts[name])
    return f"dequantised from {' and '.join(names)}" if names else ""
