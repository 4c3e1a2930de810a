"""The header of a GGUF file: its metadata, and where its tensors are, none of it on trust.

It is read here rather than by `gguf.GGUFReader`: that makes numpy objects of each of the 100,000
strings of a vocabulary, which takes seconds, and reports a truncated file as an IndexError.
"""

from __future__ import annotations

import math
import mmap
import struct
from functools import cache
from typing import Any, NamedTuple

import gguf
import numpy as np

from qrot.errors import InputError, located
from qrot.files.plain import short, shown

_MOST_HEADER = 1 << 28  # bytes; those of the largest vocabularies are some 20 MB
_MOST_VALUES = 1 << 23  # keys, tensors and entries of lists, all together
_ALIGNMENTS = tuple(1 << power for power in range(21))
_SCALARS = {  # GGUF value type -> struct format
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
_FLOAT32, _BOOL, _STRING, _ARRAY = 6, 7, 8, 9
_LEAST_PAIR, _LEAST_TENSOR, _LEAST_STRING = 13, 32, 8  # bytes


class Info(NamedTuple):
    """A tensor of a GGUF file.

    Attributes:
        kind: its type.
        shape: as NumPy has it, the last axis the one whose numbers are neighbours.
        start: of its first byte in the file.
        row_bytes: of a row of the last axis.
    """

    kind: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    start: int
    row_bytes: int

    @property
    def rows(self) -> int:
        """Of the last axis."""
        return math.prod(self.shape[:-1])

    @property
    def stop(self) -> int:
        """One past its last byte in the file."""
        return self.start + self.rows * self.row_bytes


def read_header(memory: mmap.mmap) -> tuple[dict[str, Any], dict[str, Info]]:
    """Metadata and tensors by name (layout: GGUF specification, versions 2 and 3).

    Args:
        memory: the whole file.

    Raises:
        InputError: where it is no GGUF file, is truncated, has a name twice, or says of its tensors
            what cannot be.
    """
    if memory[:4] != b"GGUF":
        raise InputError("not a GGUF file.")
    cursor = _Cursor(memory, 4)
    if cursor.number("<I") not in (2, 3):
        raise InputError("only little-endian GGUF files of version 2 or 3 are supported.")
    counts = cursor.number("<Q"), cursor.number("<Q")
    tensors = cursor.check(counts[0], _LEAST_TENSOR)
    pairs = cursor.check(counts[1], _LEAST_PAIR)
    metadata: dict[str, Any] = {}
    for _ in range(pairs):
        key = cursor.text()
        if key in metadata:
            raise InputError(f"the key {shown(key)} is there twice.")
        with located(shown(key)):
            metadata[key] = _value(cursor)
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment not in _ALIGNMENTS:
        most = _ALIGNMENTS[-1]
        raise InputError(
            f"general.alignment must be a power of two of at most {most:,}, not {short(alignment)}."
        )
    infos: dict[str, Info] = {}
    for _ in range(tensors):
        name = cursor.text()
        if name in infos:
            raise InputError(f"the tensor {shown(name)} is there twice.")
        with located(f"the tensor {shown(name)}"):
            infos[name] = _info(cursor, alignment)
    start = -(-cursor.at // alignment) * alignment
    infos = {name: info._replace(start=start + info.start) for name, info in infos.items()}
    _check_places(infos, len(memory))
    return metadata, infos


class _Cursor:
    """Reads a header from front to back and never past its end."""

    def __init__(self, memory: mmap.mmap, at: int):
        self.at = at
        self._memory, self._end = memory, min(len(memory), _MOST_HEADER)
        self._values = 0

    def take(self, size: int) -> bytes:
        """The next bytes."""
        start = self.at
        if size > self._end - start:
            raise InputError("truncated or not a valid GGUF file.")
        self.at = start + size
        return self._memory[start : self.at]

    def number(self, form: str) -> Any:
        """The next number."""
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def text(self) -> str:
        """The next string."""
        try:
            return self.take(self.number("<Q")).decode()
        except UnicodeDecodeError as error:
            raise InputError(f"a text before byte {self.at:,} is not UTF-8.") from error

    def check(self, count: int, least: int) -> int:
        """How many things of at least so many bytes follow, before anything is made of them."""
        self._values += count
        if count * least > self._end - self.at or self._values > _MOST_VALUES:
            raise InputError(f"truncated or not a valid GGUF file: {count:,} entries do not fit.")
        return count


def _value(cursor: _Cursor) -> Any:
    kind = cursor.number("<I")
    if kind in _SCALARS:
        value = _scalars(cursor, kind, 1)[0]
        # The shortest decimal with this float32: 1e-05, not 9.999999747378752e-06.
        return float(str(np.float32(value))) if kind == _FLOAT32 else value
    if kind == _STRING:
        return cursor.text()
    if kind != _ARRAY:
        raise InputError(f"a value is of type {kind}, which GGUF lacks.")
    item, count = cursor.number("<I"), cursor.number("<Q")
    if item in _SCALARS:
        return _scalars(cursor, item, cursor.check(count, struct.calcsize(_SCALARS[item])))
    if item != _STRING:
        raise InputError(f"a list holds values of type {item}, which is not supported.")
    return [cursor.text() for _ in range(cursor.check(count, _LEAST_STRING))]


def _scalars(cursor: _Cursor, kind: int, count: int) -> list[Any]:
    form = f"<{count}{_SCALARS[kind][1]}"
    values = list(struct.unpack(form, cursor.take(struct.calcsize(form))))
    if kind != _BOOL:
        return values
    if not {0, 1}.issuperset(values):
        raise InputError("a boolean is neither 0 nor 1.")
    return [value == 1 for value in values]


def _info(cursor: _Cursor, alignment: int) -> Info:
    """The next tensor, its start counted from the first one's."""
    rank = cursor.number("<I")
    if not 1 <= rank <= 4:
        raise InputError(f"it has {rank} axes.")
    shape = tuple(cursor.number("<Q") for _ in range(rank))[::-1]
    code, start = cursor.number("<I"), cursor.number("<Q")
    try:
        kind = gguf.GGMLQuantizationType(code)
    except ValueError as error:
        raise InputError(f"its type, {code}, is unknown to the gguf package.") from error
    if not _readable(kind):
        raise InputError(f"its type, {kind.name}, cannot be dequantised by the gguf package.")
    block, size = gguf.GGML_QUANT_SIZES[kind]
    if 0 in shape:
        raise InputError("it is empty.")
    if shape[-1] % block:
        raise InputError(f"{kind.name} needs rows that are multiples of {block}.")
    if start % alignment:
        raise InputError(f"its data are not aligned to {alignment} bytes.")
    return Info(kind, shape, start, shape[-1] // block * size)


@cache
def _readable(kind: gguf.GGMLQuantizationType) -> bool:
    try:
        dequantise(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def dequantise(raw: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Rows of numbers, float32, from rows of bytes; not finite where a scale is not."""
    with np.errstate(all="ignore"):
        return gguf.dequantize(raw, kind)


def _check_places(infos: dict[str, Info], size: int) -> None:
    end, before = 0, ""
    for name, info in sorted(infos.items(), key=lambda item: item[1].start):
        if info.stop > size:
            raise InputError(f"truncated: the tensor {shown(name)} runs past the file's end.")
        if info.start < end:
            raise InputError(f"the tensors {shown(before)} and {shown(name)} overlap.")
        end, before = info.stop, name
