"""safetensors files: written tensor by tensor, and read a slice at a time, none of it on trust."""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from qrot.errors import InputError, located
from qrot.files.plain import open_file, parse_json, readable, short
from qrot.files.whole import whole_file

SHARD = 5_000_000_000  # bytes, as the hub has them
_HEADER = 1 << 17  # kept free at the front of each file for what is known only at its end
_ENTRY = 200  # bytes at most of one tensor in a header, beside its name
_MOST_HEADER = 1 << 25  # bytes of the header of a file that is read
_MOST_AXES = 8
_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
# Of what is written; weights in FP8 alone, without their scales, are not read.
_CODES = {dtype.name: code for code, dtype in _DTYPES.items()} | {"float8_e4m3fn": "F8_E4M3"}


class Tensor(NamedTuple):
    """A stored tensor, of which nothing is read yet.

    Attributes:
        shape: as stored.
        dtype: of what is read.
        rows: `rows(start, stop)` reads a slice of its first axis; of a tensor without axes, all.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    rows: Callable[[int, int], np.ndarray]

    def view(self) -> np.ndarray:
        """All of it, read when it is touched where the file holds it as it is."""
        return self.rows(0, self.shape[0] if self.shape else 1)

    def whole(self) -> np.ndarray:
        """All of it, in memory of its own."""
        return np.array(self.view())


def map_file(path: Path) -> mmap.mmap:
    """The bytes of a file, read only when they are touched.

    Raises:
        InputError: where it is empty or cannot be read.
    """
    with open_file(path) as file:
        try:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:
            raise InputError(f"{path}: empty") from error


def release(memory: mmap.mmap) -> None:
    """Give the pages of a mapped file back, which otherwise count as memory of this process."""
    if hasattr(mmap, "MADV_DONTNEED"):
        memory.madvise(mmap.MADV_DONTNEED)


def open_tensor_file(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Map a safetensors file.

    Args:
        path: of the file.

    Returns:
        Its tensors by name, and the texts of its header.

    Raises:
        InputError: with the path, where it cannot be read, is damaged, or holds numbers of a dtype
            that NumPy does not compute with.
    """
    memory = map_file(path)
    length = int.from_bytes(memory[:8], "little")
    with located(path):
        if length > min(_MOST_HEADER, len(memory) - 8):
            raise InputError("truncated or not a safetensors file")
        try:
            # The library checks that names, dtypes, shapes and places are such, that no two tensors
            # overlap and that they fill the file. It has no bfloat16 for NumPy, so that the numbers
            # are read here.
            with readable(path), safe_open(path, "numpy"):
                pass
        except (SafetensorError, OverflowError) as error:
            raise InputError(f"truncated or not a valid safetensors file ({error})") from error
        header = parse_json(memory[8 : 8 + length])
        metadata = header.pop("__metadata__", None) or {}
        return {
            name: _open_tensor(name, entry, memory, 8 + length) for name, entry in header.items()
        }, metadata


def _open_tensor(name: str, entry: dict[str, Any], memory: mmap.mmap, start: int) -> Tensor:
    kind, shape = entry["dtype"], tuple(entry["shape"])
    if kind not in _DTYPES:
        known = ", ".join(_DTYPES)
        raise InputError(f"{short(name)} has dtype {kind}, which is not supported; known: {known}")
    if len(shape) > _MOST_AXES:
        raise InputError(f"{short(name)} has {len(shape)} axes")
    at = start + entry["data_offsets"][0]
    array = np.frombuffer(memory, _DTYPES[kind], math.prod(shape), at).reshape(shape)
    return Tensor(shape, array.dtype, partial(_rows, memory, array))


def _rows(memory: mmap.mmap, array: np.ndarray, first: int, last: int) -> np.ndarray:
    release(memory)
    return array[first:last] if array.shape else array


def write_tensors(
    folder: Path, tensors: Iterable[tuple[str, np.ndarray]], *, shard: int = SHARD
) -> None:
    """Write model.safetensors, or shards of it with an index.

    Tensors go to disk one by one, so only one of them is in memory here; safetensors' own writer
    wants all of a file at once.

    Args:
        folder: that the files go to.
        tensors: names and values, in the order in which they are written.
        shard: bytes of a file at most; a tensor that is larger has a file to itself.
    """
    files: list[_TensorFile] = []
    try:
        for name, tensor in tensors:
            if not files or not files[-1].has_room(name, tensor, shard):
                if files:
                    files[-1].close()
                files.append(_TensorFile(folder / f"{len(files)}.safetensors", {"format": "pt"}))
            files[-1].write(name, tensor)
    finally:
        if files:
            files[-1].close()
    _name(folder, files)


def write_tensor_file(
    path: Path, tensors: Iterable[tuple[str, np.ndarray]], metadata: Mapping[str, str]
) -> None:
    """Write one safetensors file whole or not at all, tensor by tensor as they come.

    Args:
        path: of the file.
        tensors: names and values; their names take at most `_HEADER` bytes.
        metadata: texts by name, of the file's header.

    Raises:
        OSError: where it cannot be written.
        ValueError: where the names of the tensors take more room than there is.
    """
    with whole_file(path) as partial:
        file = _TensorFile(partial, metadata)
        try:
            for name, tensor in tensors:
                if not file.has_room(name, tensor):
                    raise ValueError(f"{path}: too many tensors for one file")
                file.write(name, tensor)
        finally:
            file.close()


class _TensorFile:
    """A safetensors file that grows by one tensor at a time; its header is written at the end."""

    def __init__(self, path: Path, metadata: Mapping[str, str]):
        self.path = path
        self.entries: dict[str, dict[str, Any]] = {}
        self.size = 0  # bytes of the tensors
        self._metadata = dict(metadata)
        own = -(-len(json.dumps(self._metadata)) // 8) * 8
        self._header = _HEADER + own  # tensors begin at a multiple of 8
        self._used = 0
        self._file = path.open("wb")
        self._file.write(b"\0" * self._header)

    def has_room(self, name: str, tensor: np.ndarray, most: int | None = None) -> bool:
        """Whether a tensor fits, the file then being of at most so many bytes."""
        small = most is None or not self.entries or self.size + tensor.nbytes <= most
        return small and self._used + len(name) + _ENTRY <= _HEADER

    def write(self, name: str, tensor: np.ndarray) -> None:
        self.entries[name] = {
            "dtype": _CODES[tensor.dtype.name],
            "shape": list(tensor.shape),
            "data_offsets": [self.size, self.size + tensor.nbytes],
        }
        self._file.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)
        self.size += tensor.nbytes
        self._used += len(name) + _ENTRY

    def close(self) -> None:
        header = json.dumps({"__metadata__": self._metadata, **self.entries}).encode()
        self._file.seek(0)
        self._file.write((self._header - 8).to_bytes(8, "little"))
        self._file.write(header.ljust(self._header - 8))  # the format allows spaces after the JSON
        self._file.close()


def _name(folder: Path, files: list[_TensorFile]) -> None:
    if len(files) == 1:
        files[0].path.rename(folder / "model.safetensors")
        return
    places: dict[str, str] = {}
    for i, file in enumerate(files, 1):
        name = f"model-{i:05d}-of-{len(files):05d}.safetensors"
        file.path.rename(folder / name)
        places |= dict.fromkeys(file.entries, name)
    index = {
        "metadata": {"total_size": sum(file.size for file in files)},
        "weight_map": places,
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
