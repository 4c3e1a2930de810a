"""Folders that appear whole or not at all, and safetensors files written as tensors come."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

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
def whole_folder(out: Path) -> Iterator[Path]:
    """Yield a folder beside `out` that takes its place once the block ends without an error.

    Raises InputError where `out` holds something already, or cannot be written.
    """
    partial = out.with_name(f".{out.name}.partial")
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise InputError(f"{out}: is there already; choose another --out")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        if out.is_dir():
            out.rmdir()
        partial.rename(out)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError):
            reason = error.strerror or error
            raise InputError(f"{error.filename or out}: cannot be written ({reason})") from error
        raise


def write_tensors(
    folder: Path, tensors: Iterable[tuple[str, np.ndarray]], *, shard: int = SHARD
) -> None:
    """Write model.safetensors, or shards of at most so many bytes with an index.

    Tensors go to disk one by one, so only one of them is in memory here; safetensors' own writer
    wants all of a file at once. A tensor larger than a shard has a file to itself.
    """
    places: dict[str, Path] = {}
    files: list[Path] = []
    total = 0
    entries: dict[str, dict] = {}
    file: IO[bytes] | None = None
    for name, tensor in tensors:
        used = 0 if file is None else file.tell() - _HEADER
        room = _HEADER - sum(len(key) + _ENTRY for key in entries)
        if file is not None and (used + tensor.nbytes > shard or room < len(name) + _ENTRY):
            _finish(file, entries)
            file, entries, used = None, {}, 0
        if file is None:
            files.append(folder / f"{len(files)}.safetensors")
            file = files[-1].open("wb")
            file.write(b"\0" * _HEADER)
        entries[name] = {
            "dtype": _CODES[tensor.dtype.name],
            "shape": list(tensor.shape),
            "data_offsets": [used, used + tensor.nbytes],
        }
        file.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)
        places[name], total = files[-1], total + tensor.nbytes
    if file is not None:
        _finish(file, entries)
    _name(folder, files, places, total)


def _finish(file: IO[bytes], entries: dict[str, dict]) -> None:
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    file.seek(0)
    file.write((_HEADER - 8).to_bytes(8, "little"))
    file.write(header.ljust(_HEADER - 8))  # the format allows spaces after the JSON
    file.close()


def _name(folder: Path, files: list[Path], places: dict[str, Path], total: int) -> None:
    if len(files) == 1:
        files[0].rename(folder / "model.safetensors")
        return
    names = {f: f"model-{i:05d}-of-{len(files):05d}.safetensors" for i, f in enumerate(files, 1)}
    for file, name in names.items():
        file.rename(folder / name)
    index = {
        "metadata": {"total_size": total},
        "weight_map": {name: names[file] for name, file in places.items()},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
