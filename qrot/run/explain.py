"""One sentence for what is wrong with the settings that a file has."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from qrot.errors import InputError
from qrot.files.plain import short, shown
from qrot.records import check_name

_TAG = "method"  # the key that says which of several sections one is
_LARGEST = 2**32 - 1  # of the integers: random numbers of larger seeds would be those of others
_LONGEST = 4096  # characters of a text, as of a path in Linux


def build(kind: Any, settings: Any) -> Any:
    """An instance of a dataclass out of plain values.

    Args:
        kind: the dataclass, whose fields are sections, numbers, texts and lists of them.
        settings: as YAML has them.

    Raises:
        InputError: in one sentence that names the key, where a key is not known, or a value has
            the wrong type or is out of range.
    """
    try:
        return _build(kind, settings)
    except ValidationError as error:
        raise InputError(_sentence(kind, error.errors(), settings)) from error
    except InputError:
        _blame(kind, settings, ())
        raise


def _build(kind: Any, settings: Any) -> Any:
    # As JSON, since strict Python mode would refuse lists for tuples and mappings for dataclasses.
    return _adapter(kind).validate_json(json.dumps(settings, default=str), strict=True)


@cache
def _adapter(kind: Any) -> TypeAdapter:
    return TypeAdapter(kind)


def check_values(settings: Any, key: str = "") -> None:
    """Raise InputError where a value is none that a setting can have, whatever its key.

    A number is to be finite, and one that an unsigned integer of 32 bits holds, or its negative; a
    text is to be no longer than a path, in whole characters, and without a NUL.

    Args:
        settings: plain values.
        key: of them in dotted form, for the message.
    """
    where = f"{key}." if key else ""
    if isinstance(settings, dict):
        for name, value in settings.items():
            _check_text(name, f"{where}{shown(name)}")
            check_values(value, f"{where}{shown(name)}")
    elif isinstance(settings, list):
        for i, value in enumerate(settings):
            check_values(value, f"{where}{i}")
    elif isinstance(settings, str):
        _check_text(settings, key)
    elif isinstance(settings, float) and not math.isfinite(settings):
        raise InputError(f"{key}: {settings} is not finite")
    elif isinstance(settings, int) and abs(settings) > _LARGEST:
        beyond = f"above {_LARGEST:,}" if settings > 0 else f"below {-_LARGEST:,}"
        raise InputError(f"{key}: {short(settings)} is {beyond}")


def _check_text(text: str, key: str) -> None:
    if len(text) > _LONGEST:
        raise InputError(f"{key}: a text of {len(text):,} characters; {_LONGEST:,} are the most")
    if "\0" in text:
        raise InputError(f"{key}: a NUL in a text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{key}: {short(text)} is not in UTF-8") from error


def _blame(kind: Any, settings: dict[str, Any], path: tuple[str, ...]) -> None:
    """Raise what the innermost faulty section raises, with the path to it in front."""
    hints = get_type_hints(kind)
    for name, value in settings.items():
        for section, inner, where in _sections(hints.get(name), value, (*path, name)):
            _blame(section, inner, where)
    try:
        _build(kind, settings)
    except InputError as error:
        where = "".join(f"{part}." for part in path)
        raise InputError(where + str(error).removeprefix(where)) from error
    except ValidationError:
        return  # a fault of another kind beside the one that is looked for


def _sections(
    kind: Any, value: Any, path: tuple[str, ...]
) -> Iterator[tuple[Any, dict[str, Any], tuple[str, ...]]]:
    """The sections that a value is or that are in it: dataclass, settings and path of each."""
    kind = _section(kind, value)
    if is_dataclass(kind) and isinstance(value, dict):
        yield kind, value, path
    elif get_origin(kind) is dict and isinstance(value, dict):
        for name, inner in value.items():
            yield from _sections(get_args(kind)[1], inner, (*path, name))
    elif get_origin(kind) is tuple and isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _sections(get_args(kind)[0], inner, (*path, str(i)))


def _sentence(kind: Any, errors: list[Any], settings: Any) -> str:
    """The first error as a sentence; an unknown key goes before a wrong type, and what is wrong
    within a section before that it is none of the other things that could stand there."""
    errors = sorted(
        errors, key=lambda e: (e["type"] != "unexpected_keyword_argument", _is_other_branch(e))
    )
    path, value = [], settings
    for part in errors[0]["loc"]:
        union, kind = kind, _section(kind, value)
        if part in (getattr(kind, "__name__", None), _tag(kind)):
            continue  # names a branch of a union
        if is_dataclass(kind) and isinstance(value, dict):
            known = [known.name for known in fields(kind)]
            if part not in known:
                return _unknown([*path, str(part)], known)
            kind = get_type_hints(kind)[part]
        elif get_origin(kind) is dict and isinstance(value, dict):
            kind = get_args(kind)[1]
        elif get_origin(kind) is tuple and isinstance(value, list) and part < len(value):
            kinds = get_args(kind)
            kind = kinds[0] if Ellipsis in kinds else kinds[part]
        else:
            kind = union
            break  # the part names a branch of a union, not a key
        path.append(shown(str(part)))
        if isinstance(value, dict) and part not in value:
            return f"{'.'.join(path)}: this key is needed"
        value = value[part]
    return _wrong_value(kind, ".".join(path), value)


def _is_other_branch(error: Any) -> bool:
    """Whether a section or a list was read as a text or a number, one of several possibilities."""
    return isinstance(error["input"], dict | list) and error["loc"][-1:] in _PLAIN


def _wrong_value(kind: Any, key: str, value: Any) -> str:
    tags = [tag for tag in map(_tag, get_args(kind)) if tag is not None]
    if tags and isinstance(value, dict):
        if _TAG not in value:
            return f"{key}.{_TAG}: this key is needed"
        check_name(str(value[_TAG]), tags, f"{key}.{_TAG}")
    if tags:
        return f"{key}: expected a section with the key {_TAG}, not {short(value)}"
    sentence = f"{key}: expected {_expected(kind)}, not {short(value)}".removeprefix(": ")
    names = [str(name) for name in get_args(kind)] if get_origin(kind) is Literal else []
    near = difflib.get_close_matches(str(value), names, 1)
    return f"{sentence}, did you mean '{near[0]}'?" if near else sentence


def _section(kind: Any, value: Any) -> Any:
    """The dataclass of a section that may also be null, or of the one of several that the value
    says; any other kind as it is."""
    if get_origin(kind) not in (Union, UnionType):
        return kind
    kinds = [k for k in get_args(kind) if is_dataclass(k)]
    if len(kinds) == 1:
        return kinds[0]
    said = value.get(_TAG) if isinstance(value, dict) else None
    return next((k for k in kinds if _tag(k) == said), kind)


def _tag(kind: Any) -> str | None:
    """What the tag has to be for a section of this kind; None where it has none."""
    known = fields(kind) if is_dataclass(kind) else ()
    defaults = (field.default for field in known if field.name == _TAG)
    return next((default for default in defaults if isinstance(default, str)), None)


def _unknown(path: list[str], known: list[str]) -> str:
    path = [shown(part) for part in path]
    sentence = f"unknown key '{'.'.join(path)}'"
    if near := difflib.get_close_matches(path[-1], known, 1, 0.4):
        return f"{sentence}, did you mean '{'.'.join([*path[:-1], near[0]])}'?"
    return f"{sentence}, expected one of {', '.join(known)}"


_NAMES = {
    int: "an integer",
    float: "a number",
    str: "a text",
    bool: "true or false",
    NoneType: "null",
}


_PLAIN = tuple((kind.__name__,) for kind in (int, float, str, bool))


def _expected(kind: Any) -> str:
    if kind in _NAMES:
        return _NAMES[kind]
    arguments = get_args(kind)
    if get_origin(kind) is Literal:
        names = [f"'{name}'" for name in arguments]
        return names[0] if len(names) == 1 else f"one of {', '.join(names)}"
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(_expected(argument) for argument in arguments)
    if get_origin(kind) is tuple:
        return "a list"
    if get_origin(kind) is dict:
        return "a section"
    return f"a section with keys {', '.join(known.name for known in fields(kind))}"
