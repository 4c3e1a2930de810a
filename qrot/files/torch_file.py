"""Tensors out of what `torch.save` writes, without PyTorch, whose reader trusts sizes in a file.

Such a file is a zip: `data.pkl` says in pickle's language what there is, `data/<key>` are the
numbers. Here nothing of it is executed: of that language only what builds a mapping of tensors is
known.
"""

from __future__ import annotations

import pickletools
import struct
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

from qrot.errors import InputError, located
from qrot.files.plain import open_file, shown
from qrot.files.tensors import Tensor

_DTYPES = {
    "torch.DoubleStorage": np.dtype(np.float64),
    "torch.FloatStorage": np.dtype(np.float32),
    "torch.HalfStorage": np.dtype(np.float16),
    "torch.BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
}
_MOST_PICKLE = 1 << 18  # bytes; a tensor takes about 150
_SLACK = 1 << 20  # bytes of all that is no number
_VALUES = {
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE"),
    *("NONE", "NEWTRUE", "NEWFALSE"),
}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Named(NamedTuple):
    """What a pickle names, of which nothing is imported."""

    name: str


class _Storage(NamedTuple):
    key: str
    dtype: np.dtype


class _Built(NamedTuple):
    """A tensor as `torch._utils._rebuild_tensor_v2` would make it."""

    arguments: tuple


def open_torch_file(path: Path, most: int) -> dict[str, Tensor]:
    """Tensors of floating numbers by name, of which no number is read yet.

    Args:
        path: of a file that `torch.save` has written, of a mapping from names to tensors.
        most: bytes of the numbers; a larger file is refused before it is read.

    Raises:
        InputError: with the path, where it is no such file, is damaged, compressed or too large, or
            holds something else.
    """
    with open_file(path) as file, located(path):
        size = file.seek(0, 2)
        if size > most + _SLACK:
            raise InputError(
                f"{size:,} bytes, which is more than the {most:,} bytes that these tensors can take"
            )
    with _opened(path) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        pickles = [name for name in entries if name.rpartition("/")[2] == "data.pkl"]
        if len(pickles) != 1 or len(entries) != len(archive.infolist()):
            raise InputError("not a file of tensors as torch.save writes it")
        for entry in entries.values():
            if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
                raise InputError(f"{shown(entry.filename)} in it is compressed or encrypted")
            if entry.file_size > size:
                raise InputError("a damaged zip file")
        if entries[pickles[0]].file_size > _MOST_PICKLE:
            raise InputError(f"its pickle is larger than {_MOST_PICKLE:,} bytes")
        prefix = pickles[0].removesuffix("data.pkl")
        order = f"{prefix}byteorder"
        if order in entries and archive.read(order) != b"little":
            raise InputError("its numbers are not little-endian")
        found = _unpickled(archive.read(pickles[0]))
    with located(path):
        if not isinstance(found, dict):
            raise InputError("holds no mapping from names to tensors")
        return {name: _tensor(path, prefix, name, value, entries) for name, value in found.items()}


class _Bounded:
    """A file of which no more is read at once than the directory of a zip may take."""

    def __init__(self, file: BinaryIO):
        self.most: int | None = _SLACK
        self._file = file

    def read(self, size: int = -1) -> bytes:
        if self.most is None:
            return self._file.read(size)
        found = self._file.read(size if 0 <= size <= self.most else self.most + 1)
        if len(found) > self.most:
            raise zipfile.BadZipFile("too large a directory")
        return found

    def seek(self, place: int, whence: int = 0) -> int:
        return self._file.seek(place, whence)

    def tell(self) -> int:
        return self._file.tell()

    def seekable(self) -> bool:
        return True


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    damaged = (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError, struct.error)
    with open_file(path) as file, located(path):
        try:
            with zipfile.ZipFile(bounded := _Bounded(file)) as archive:
                bounded.most = None
                yield archive
        except damaged as error:
            raise InputError("not a file of tensors as torch.save has them, or damaged") from error


def _unpickled(data: bytes) -> Any:
    """What a pickle builds of mappings and tensors; raises InputError where it builds more."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    try:
        for opcode, value in _operations(data):
            name, place = opcode.name, value if isinstance(value, int) else len(memo)
            if name in ("PROTO", "FRAME"):
                continue
            if name == "STOP":
                return stack.pop()
            if name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
                memo[place] = stack[-1]
            elif name in ("BINGET", "LONG_BINGET"):
                stack.append(memo[place])
            elif name == "MARK":
                marks.append(len(stack))
            else:
                _do(name, value, stack, marks)
    except (LookupError, ValueError) as error:  # a stack or a memo that is short; pickletools'
        raise InputError("its pickle is damaged") from error
    raise InputError("its pickle has no end")


def _operations(data: bytes) -> Iterator[tuple[Any, Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of odd escapes in names
        yield from [operation[:2] for operation in pickletools.genops(data)]


def _do(name: str, value: Any, stack: list[Any], marks: list[int]) -> None:
    """An operation of pickle's that has to do with values."""
    if name in _VALUES:
        plain = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
        stack.append(plain.get(name, value))
    elif name in _TUPLES:
        stack.append(tuple(_popped(stack, len(stack) - _TUPLES[name])))
    elif name == "TUPLE":
        stack.append(tuple(_popped(stack, marks.pop())))
    elif name == "EMPTY_DICT":
        stack.append({})
    elif name in ("SETITEM", "SETITEMS"):
        items = _popped(stack, marks.pop() if name == "SETITEMS" else len(stack) - 2)
        for key, item in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str) or not isinstance(stack[-1], dict):
                raise InputError("holds no mapping from names to tensors")
            stack[-1][key] = item
    elif name == "GLOBAL":
        stack.append(_Named(value.replace(" ", ".")))
    elif name == "STACK_GLOBAL":
        module, attribute = _popped(stack, len(stack) - 2)
        stack.append(_Named(f"{module}.{attribute}"))
    elif name == "BINPERSID":
        stack.append(_storage(stack.pop()))
    elif name == "REDUCE":
        made, arguments = _popped(stack, len(stack) - 2)
        stack.append(_made(made, arguments))
    else:
        raise InputError("holds other things than tensors")


def _popped(stack: list[Any], start: int) -> list[Any]:
    if not 0 <= start <= len(stack):
        raise IndexError(start)
    taken = stack[start:]
    del stack[start:]
    return taken


def _made(made: Any, arguments: Any) -> Any:
    name = made.name if isinstance(made, _Named) else ""
    if name == "torch._utils._rebuild_tensor_v2" and isinstance(arguments, tuple):
        return _Built(arguments)
    if name == "torch._utils._rebuild_parameter" and isinstance(arguments, tuple):
        return arguments[0]
    if name == "collections.OrderedDict" and arguments == ():
        return {}
    raise InputError(f"holds {shown(name)}, which is no dense tensor of floating numbers")


def _storage(about: Any) -> _Storage:
    match about:
        case ("storage", _Named(kind), str(key), str(), int()):
            if kind not in _DTYPES:
                raise InputError(f"holds a {shown(kind)}, which is none of {', '.join(_DTYPES)}")
            return _Storage(key, _DTYPES[kind])
    raise InputError("its pickle is damaged")


def _tensor(
    path: Path, prefix: str, name: str, value: Any, entries: dict[str, zipfile.ZipInfo]
) -> Tensor:
    match value:
        case _Built((_Storage(key, dtype), int(offset), tuple(shape), tuple(strides), *rest)):
            pass
        case _:
            raise InputError(f"{shown(name)} is no tensor")
    numbers = (offset, *shape, *strides)
    whole = all(type(n) is int and n >= 0 for n in numbers) and len(shape) == len(strides)
    place = f"{prefix}data/{key}"
    there = entries[place].file_size if place in entries else 0
    if not whole or len(rest) > 3 or any(rest[2:]):
        raise InputError(f"{shown(name)} is no plain tensor")
    last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    if 0 in shape or (last + 1) * dtype.itemsize > there:
        raise InputError(f"{shown(name)} has a shape that its numbers do not fill")

    def rows(first: int, stop: int) -> np.ndarray:
        with _opened(path) as archive:
            flat = np.frombuffer(archive.read(place), np.uint8)
        flat = flat[: len(flat) // dtype.itemsize * dtype.itemsize].view(dtype)
        bytes_ = [step * dtype.itemsize for step in strides]
        array = np.lib.stride_tricks.as_strided(flat[offset:], shape, bytes_, writeable=False)
        return array[first:stop] if shape else array

    return Tensor(shape, dtype, rows)
