"""Files and folders that appear whole or not at all, tensors written one by one; plain values."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from qrot.errors import InputError

SHARD = 5_000_000_000  # bytes, as the hub has them
_HEADER = 1 << 17  # kept free at the front of each file for what is known only at its end
_ENTRY = 200  # bytes at most of one tensor in a header, beside its name
_CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int8": "I8",
    "uint8": "U8",
}


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield another path to write to, which takes the place of `path` once it is written.

    Args:
        path: of the file; what is there stays there until the new one is whole.

    Yields:
        A path beside it. The block is to write it; if the block fails the path is removed.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        yield partial
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all.

    Args:
        path: of the file.
        text: its contents.

    Raises:
        OSError: where it cannot be written.
    """
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """Yield a folder beside `out` that takes its place once the block ends without an error.

    Args:
        out: the folder; absent or empty.

    Yields:
        The path of a folder to fill, of this block alone.

    Raises:
        InputError: where `out` holds something, before the block or after it, or cannot be written.
    """
    partial = out.with_name(f".{out.name}.{secrets.token_hex(4)}.partial")
    there = f"{out}: is there already; choose another --out"
    try:
        if _holds_something(out):
            raise InputError(there)
        partial.mkdir(parents=True)
        yield partial
        if _holds_something(out):  # of another program, which was faster
            raise InputError(there)
        if out.is_dir():
            out.rmdir()
        partial.rename(out)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError):
            reason = error.strerror or error
            raise InputError(f"{error.filename or out}: cannot be written ({reason})") from error
        raise


def _holds_something(out: Path) -> bool:
    return out.exists() and (not out.is_dir() or any(out.iterdir()))


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


def first_difference(old: Any, new: Any, where: str = "") -> str | None:
    """The first key at which two configurations, or two of anything plain, differ.

    Args:
        old, new: values as JSON or YAML have them.
        where: the key of the two, in dotted form.

    Returns:
        The key in dotted form; None where they are equal.
    """
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return None if old == new else where
    for key in [*new, *(key for key in old if key not in new)]:
        here = f"{where}.{key}" if where else str(key)
        if key not in old or key not in new:
            return here
        if found := first_difference(old[key], new[key], here):
            return found
    return None
