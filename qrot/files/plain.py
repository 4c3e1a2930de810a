"""JSON and YAML from anywhere: read within bounds, or refused in a sentence.

A file may be written by a person in haste, by a program with another idea of the format, or by
someone who wants a reader to fail: keys that are there twice, nesting without end, aliases that
unfold to gigabytes, halves of characters, values that no key can be. None of it gets past here.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from qrot.errors import InputError, located

MOST_JSON = 1 << 28  # bytes; the index of a model of a trillion parameters has some megabytes
MOST_YAML = 1 << 20
_MOST_VALUES = 50_000  # of YAML, aliases unfolded; a long text counts as several
_LONG = 100  # characters: of a number at most, and those of a text that count as a value
_DEEPEST = 64  # lists and sections in one another


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn what goes wrong in reading a file into an InputError with its path."""
    if "\0" in str(path):
        raise InputError(f"{short(str(path))}: cannot be read (a NUL is in no path)")
    try:
        yield
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise InputError(f"{path}: cannot be read as text ({error.reason})") from error
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"{error.filename or path}: cannot be read ({reason})") from error


@contextmanager
def open_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading; a pipe or device, which may never end or begin, is none.

    Raises:
        InputError: with its path, where it cannot be read.
    """
    with readable(path):
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise InputError(f"{path}: cannot be read (neither a file nor a folder)")
        with path.open("rb") as file:
            yield file


def read_bytes(path: Path, most: int) -> bytes:
    """The contents of a file of at most so many bytes.

    Raises:
        InputError: where it cannot be read, or is larger.
    """
    with open_file(path) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise InputError(f"{path}: larger than {most:,} bytes, which no such file is")
        return file.read()


def read_json(path: Path) -> Any:
    """A JSON file.

    Raises:
        InputError: in one sentence with its path, where it cannot be read or is refused by
            `parse_json`.
    """
    content = read_bytes(path, MOST_JSON)
    with located(path):
        return parse_json(content)


def parse_json(text: str | bytes) -> Any:
    """JSON to plain values.

    Args:
        text: of it; bytes are UTF-8.

    Raises:
        InputError: where it is not JSON, has a key twice, is nested beyond reason, or holds half a
            character, which no file could be written with, or a number that no format has.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8-sig")
        text.encode()
        result = json.loads(text, object_pairs_hook=_object, parse_int=_integer)
        if "\\u" in text:
            json.dumps(result, ensure_ascii=False).encode()
    except RecursionError as error:
        raise InputError("not valid JSON: nested too deeply") from error
    except UnicodeEncodeError as error:
        raise InputError("not valid JSON: half a character (a lone surrogate)") from error
    except ValueError as error:  # JSON's errors, and those of UTF-8
        raise InputError(f"not valid JSON ({_line(error)})") from error
    if text.count("[") + text.count("{") > _DEEPEST:
        _check_depth(result)
    return result


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise InputError(f"the key {short(twice)} is there twice")
    return found


def _integer(text: str) -> int:
    if len(text) > _LONG:
        raise InputError(f"a number of more than {_LONG} digits")
    return int(text)


def _check_depth(result: Any) -> None:
    level = [result]
    for _ in range(_DEEPEST + 1):
        inner = (x.values() if isinstance(x, dict) else x for x in level)
        level = [x for values in inner for x in values if isinstance(x, (dict, list))]
        if not level:
            return
    raise InputError("not valid JSON: nested too deeply")


def read_yaml(path: Path) -> Any:
    """A YAML file.

    Raises:
        InputError: in one sentence with its path, where it cannot be read or is refused by
            `parse_yaml`.
    """
    content = read_bytes(path, MOST_YAML)
    with located(path):
        return parse_yaml(content)


def parse_yaml(text: str | bytes) -> Any:
    """YAML to plain values: texts, numbers, booleans, nulls, lists, and dictionaries by text.

    Args:
        text: of it; of YAML 1.1 but for numbers such as 1e-3, which are numbers, and for dates and
            a lone =, which are texts.

    Returns:
        The values, none of which is another one: what an alias stands for is there again.

    Raises:
        InputError: where it is not YAML, has a key twice or one that is no text, is nested beyond
            reason, unfolds to more values than a configuration has, or holds half a character, a
            NUL, or a tag of what is not plain.
    """
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _check(node, {})
            return _built(loader, node)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}" if mark else ""
        problem = str(error.problem).removeprefix("but ")
        raise InputError(f"not valid YAML ({_cut(problem)}{where})") from error
    except yaml.YAMLError as error:
        raise InputError(f"not valid YAML ({_line(error)})") from error
    except (ValueError, LookupError) as error:  # of !!int x, !!bool x, 0x_
        raise InputError("not valid YAML (a text that is not of the type it has)") from error


def dump_yaml(value: Any, *, flow: bool | None = False) -> str:
    """Plain values as YAML that `parse_yaml` reads as they are.

    Args:
        value: of texts, numbers, booleans, nulls, lists, and dictionaries by text.
        flow: whether lists and sections are in brackets; None for the innermost alone.
    """
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, default_flow_style=flow)


class _Loader(yaml.SafeLoader):
    """As many values as a configuration has, in whole characters; 1e-3 is a number."""

    def __init__(self, text: str | bytes):
        super().__init__(text)
        self.values = self.depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.values += 1
        _check_size(self.values, self.depth)
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        node = super().compose_scalar_node(anchor)
        node.value = _whole(node)
        if node.tag in (_core("int"), _core("float")) and len(node.value) > _LONG:
            raise InputError(f"{_line_of(node)}: a number of more than {_LONG} characters")
        return node


def _whole(node: yaml.ScalarNode) -> str:
    """Its text, whose characters may be escaped by halves, as in JSON."""
    if "\0" in node.value:
        raise InputError(f"{_line_of(node)}: a NUL in a text")
    try:
        return node.value.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError as error:
        raise InputError(f"{_line_of(node)}: half a character (a lone surrogate)") from error


def _core(name: str) -> str:
    return f"tag:yaml.org,2002:{name}"


_MERGE = _core("merge")
_TAGS = {
    yaml.ScalarNode: tuple(map(_core, ("str", "int", "float", "bool", "null"))),
    yaml.SequenceNode: (_core("seq"),),
    yaml.MappingNode: (_core("map"),),
}
_Loader.yaml_implicit_resolvers = {
    first: [pair for pair in pairs if pair[0] not in (_core("timestamp"), _core("value"))]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class _Dumper(yaml.SafeDumper):
    """Quotes round texts that are numbers to `_Loader`, such as 1e-3."""


_POWER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$")
for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(_core("float"), _POWER, list("-+.0123456789"))


def _check(
    node: yaml.Node, known: dict[int, tuple[int, int]], above: tuple[int, ...] = ()
) -> tuple[int, int]:
    """How many values a node unfolds to and how deep; raises InputError as `parse_yaml` does.

    Args:
        node: to look at.
        known: what was found of other nodes, by their ids.
        above: the ids of the nodes that it stands in.
    """
    if id(node) in above:
        raise InputError("an alias stands inside of what it stands for")
    if id(node) not in known:
        if node.tag not in _TAGS[type(node)]:
            raise InputError(f"{_line_of(node)}: the tag {short(node.tag)} has no place here")
        inner = [_check(child, known, (*above, id(node))) for child in _children(node)]
        text = len(node.value) // _LONG if isinstance(node, yaml.ScalarNode) else 0
        values = 1 + text + sum(values for values, _ in inner)
        depth = 1 + max((depth for _, depth in inner), default=-1)
        _check_size(values, depth)
        known[id(node)] = values, depth
    return known[id(node)]


def _children(node: yaml.Node) -> list[yaml.Node]:
    """The nodes in a node; raises InputError where a key is no text or is there twice."""
    if not isinstance(node, yaml.MappingNode):
        return node.value if isinstance(node, yaml.SequenceNode) else []
    found, inner = set(), []
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode) or key.tag not in (_core("str"), _MERGE):
            raise InputError(f"{_line_of(key)}: a key must be text")
        if key.tag != _MERGE and key.value in found:
            raise InputError(f"{_line_of(key)}: the key {short(key.value)} is there twice")
        if key.tag != _MERGE:
            found.add(key.value)
            inner.append(key)
        inner.append(value)
    return inner


def _line_of(node: yaml.Node) -> str:
    return f"line {node.start_mark.line + 1}"


def _check_size(values: int, depth: int) -> None:
    if values > _MOST_VALUES:
        raise InputError(f"it unfolds to more than {_MOST_VALUES:,} values")
    if depth > _DEEPEST:
        raise InputError("not valid YAML: nested too deeply")


def _built(loader: _Loader, node: yaml.Node) -> Any:
    """What a node stands for, each list and dictionary made anew wherever it stands.

    PyYAML merges (`<<`) by another rule from version to version; here what is said in the section
    itself counts, then the first of those that are merged.
    """
    if isinstance(node, yaml.SequenceNode):
        return [_built(loader, inner) for inner in node.value]
    if not isinstance(node, yaml.MappingNode):
        return loader.construct_object(node)
    found: dict[str, Any] = {}
    for key, value in node.value:
        if key.tag == _MERGE:
            merged = _built(loader, value)
            for section in merged if isinstance(merged, list) else [merged]:
                if not isinstance(section, dict):
                    raise InputError(f"{_line_of(key)}: << takes a section, or a list of them")
                found = {**section, **found}
    return found | {k.value: _built(loader, value) for k, value in node.value if k.tag != _MERGE}


def short(value: Any) -> str:
    """A value as a message shows it: as Python writes it, of at most 60 characters."""
    if isinstance(value, int) and value.bit_length() > 200:
        return "a number of more than 60 digits"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def shown(name: str) -> str:
    """A name as a message shows it: as it is, or by `short` where it is long or unprintable."""
    return name if name.isprintable() and 0 < len(name) <= 100 else short(name)


def _line(error: Exception) -> str:
    return _cut((str(error).strip() or type(error).__name__).splitlines()[0])


def _cut(text: str) -> str:
    return text if len(text) <= 200 else text[:197] + "..."


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
