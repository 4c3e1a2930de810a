"""qrot's own files: safetensors whose header says in JSON what they are and whose."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from qrot.errors import InputError, located
from qrot.files.plain import parse_json, readable, shown
from qrot.files.tensors import Tensor, open_tensor_file

T = TypeVar("T")


def open_own_file(
    path: Path, what: str, formats: Collection[str]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Map one of qrot's own files, of which nothing but the header is read yet.

    Args:
        path: of the file.
        what: it is to be, such as "rotation", for messages.
        formats: one of which its header must name.

    Returns:
        Its tensors by name, and the values of its header.

    Raises:
        InputError: with the path, where there is no such file, it cannot be read, or it is another.
    """
    with readable(path):
        there = path.is_file()
    if not there:
        raise InputError(f"{path}: no such {what} file")
    try:
        tensors, texts = open_tensor_file(path)
    except InputError as error:
        reason = str(error).removeprefix(f"{path}: ")
        raise InputError(f"{path}: not a readable {what} file ({reason})") from error
    if texts.get("format") not in [json.dumps(form) for form in formats]:
        raise InputError(f"{path}: not a {what} file of qrot")
    header = {}
    for key, text in texts.items():
        with located(f"{path}: {shown(key)} in its header"):
            header[key] = parse_json(text)
    return tensors, header


def strictly(kind: type[T], value: Any, name: str | None = None) -> T:
    """Plain values as a type that is made of them: nothing is converted, no key is unknown.

    Args:
        kind: a dataclass or a TypedDict.
        value: as JSON or YAML have it.
        name: of the whole, for messages; that of the type if None.

    Raises:
        InputError: with the key, where the value is not of this kind.
    """
    try:
        return TypeAdapter(kind).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join([name or kind.__name__, *map(str, first["loc"])])
        raise InputError(f"{shown(key)}: {first['msg']}") from error
