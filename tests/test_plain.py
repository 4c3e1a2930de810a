"""JSON and YAML from anywhere: plain values, or one sentence."""

import json
import math
import sys
import tracemalloc

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from qrot.errors import InputError
from qrot.files import plain
from qrot.files.plain import (
    MOST_YAML,
    dump_yaml,
    parse_json,
    parse_yaml,
    read_bytes,
    read_json,
    read_yaml,
    readable,
)

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def bomb(levels, width):
    """Lists of lists: width ** levels values in so many lines."""
    lines = [f"a0: &a0 [{', '.join('x' * width)}]"]
    for i in range(1, levels):
        lines.append(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * width)}]")
    return "\n".join(lines)


def is_plain(value):
    if isinstance(value, dict):
        return all(type(key) is str and is_plain(inner) for key, inner in value.items())
    if isinstance(value, list):
        return all(map(is_plain, value))
    if isinstance(value, str):
        value.encode()
    return value is None or type(value) in (bool, int, float, str)


def assert_plain_or_one_sentence(parse, content):
    try:
        found = parse(content)
    except InputError as error:
        said = str(error)
    else:
        assert is_plain(found)
        return
    assert said
    assert "\n" not in said


@given(PLAIN)
@settings(deadline=None)
def test_json_comes_back(value):
    assert parse_json(json.dumps(value)) == value
    assert parse_json(json.dumps(value, ensure_ascii=False).encode()) == value


@given(PLAIN)
@settings(deadline=None)
def test_yaml_comes_back(value):
    text = dump_yaml(value)
    if any(isinstance(x, str) and "\0" in x for x in leaves(value)):
        with pytest.raises(InputError, match="a NUL in a text"):
            parse_yaml(text)
        return
    assert parse_yaml(text) == parse_yaml(text.encode()) == yaml.safe_load(text) == value
    # JSON is YAML, in which characters may be escaped by halves.
    alike = json.dumps(value)
    if len(alike) < 1000 and not any(isinstance(x, float) for x in leaves(value)):  # long keys
        assert parse_yaml(alike) == value


def leaves(value):
    """All that is in a value, keys among it."""
    if isinstance(value, dict):
        return [*value, *leaves(list(value.values()))]
    return [leaf for one in value for leaf in leaves(one)] if isinstance(value, list) else [value]


YAML_PIECES = (
    "a b ab 0 1 -1 1e3 0x_ 0b_ 1:2 .nan .inf ~ null true on = << : :\n - -\n ? [ ] { } , ' \" | > "
    "# & &a *a &b *b ! !! !!int !!bool !!float !!binary !!set !!omap !!timestamp !!python/name:os"
    " !<x> % --- ... \n \\ \\ud800 \\udc00 \\0 \t 2026-01-01 \ufeff \x85 \x1b \ud800 \0"
)
JSON_PIECES = (
    '{ } [ ] : , " a "a" "b": "a": 1 -1 1e999 NaN -Infinity true null \\ \\u \\ud800 \\u0000 '
    '"\\udc00" \ufeff \ud800 \0 \n 0'
)


@given(st.lists(st.sampled_from([*YAML_PIECES.split(" "), " ", "\n "]), max_size=30).map("".join))
@settings(max_examples=300, deadline=None)
def test_yaml_is_plain_or_one_sentence(text):
    for content in (text, text.encode("utf-8", "surrogatepass"), text.encode("utf-16", "replace")):
        assert_plain_or_one_sentence(parse_yaml, content)


@given(st.lists(st.sampled_from(JSON_PIECES.split(" ")), max_size=20).map("".join))
@settings(max_examples=300, deadline=None)
def test_json_is_plain_or_one_sentence(text):
    for content in (text, text.encode("utf-8", "surrogatepass")):
        assert_plain_or_one_sentence(parse_json, content)


@given(st.binary(max_size=40))
@settings(deadline=None)
def test_bytes_are_plain_or_one_sentence(content):
    for parse in (parse_json, parse_yaml):
        assert_plain_or_one_sentence(parse, content)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"a": 1, "b": 2, "a": 1}', "the key 'a' is there twice"),
        ('[{"x": {"a": 1, "\\u0061": 2}}]', "the key 'a' is there twice"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ("[" * 70 + "]" * 70, "nested too deeply"),
        ('{"a": ' * 70 + "1" + "}" * 70, "nested too deeply"),
        ('["\\ud800"]', "half a character"),
        ('{"\\udc00\\ud800": 1}', "half a character"),
        ('["\ud800"]', "half a character"),
        (b'["\xed\xa0\x80"]', "'utf-8' codec can't decode"),
        ('"a"'.encode("utf-16"), "'utf-8' codec can't decode"),
        ("9" * 101, "a number of more than 100 digits"),
        ("[-" + "9" * 10_000 + "]", "a number of more than 100 digits"),
        ("", "Expecting value"),
        (b"", "Expecting value"),
        ("{} {}", "Extra data"),
        ("{'a': 1}", "Expecting property name"),
        ("\0", "Expecting value"),
    ],
)  # fmt: skip
def test_json_that_is_refused(text, sentence):
    with pytest.raises(InputError, match=sentence):
        parse_json(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b'\xef\xbb\xbf{"a": 1}', {"a": 1}),
        ('{"a":\r\n1}\r\n', {"a": 1}),
        ("[" * 60 + "]" * 60, None),
        ("[" + ", ".join(["[]"] * 1000) + "]", [[]] * 1000),
        ('"\\ud83d\\ude00"', "\N{GRINNING FACE}"),
        ("1e999", math.inf),
        ("9" * 100, 10**100 - 1),
        ('"\\u0000"', "\0"),
    ],
)
def test_json_that_passes(text, value):
    found = parse_json(text)
    assert value is None or found == value


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        # Keys.
        ("a: 1\nb: 2\na: 1\n", "^line 3: the key 'a' is there twice$"),
        ("x:\n- y: {a: 1, 'a': 2}\n", "^line 2: the key 'a' is there twice$"),
        ('"\\ud83d\\ude00": 1\n\N{GRINNING FACE}: 2', "is there twice"),
        ("a: &x {b: 1, b: 2}\nc: *x", "line 1: the key 'b' is there twice"),
        ("1: a", "line 1: a key must be text"),
        ("1.5: a", "line 1: a key must be text"),
        ("1e3: a", "line 1: a key must be text"),
        ("true: a", "line 1: a key must be text"),
        ("on: a", "line 1: a key must be text"),
        ("null: a", "line 1: a key must be text"),
        ("[a]: b", "line 1: a key must be text"),
        ("{a: 1}: b", "line 1: a key must be text"),
        ("? - a\n: b", "line 1: a key must be text"),
        ("&a [x]: 1\nb: *a", "line 1: a key must be text"),
        # Nesting and aliases.
        ("[" * 100_000, "nested too deeply"),
        ("{a: " * 100_000, "nested too deeply"),
        ("- " * 100_000, "nested too deeply"),
        ("? " * 100_000, "nested too deeply"),
        ("".join(f"{' ' * i}a:\n" for i in range(100)), "nested too deeply"),
        ("a0: &a0 x\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 200)),
         "nested too deeply"),
        ("a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: *a{i - 1}}}\n" for i in range(1, 200)),
         "nested too deeply"),
        ("&a [*a]", "an alias stands inside of what it stands for"),
        ("a: &a\n  b: [1, {c: *a}]", "an alias stands inside of what it stands for"),
        ("a: &a {<<: *a}", "an alias stands inside of what it stands for"),
        ("a: *b", r"found undefined alias 'b', line 1"),
        (bomb(9, 10), "more than 50,000 values"),
        ("a0: &a0 {x: 1}\n" + "".join(
            f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 30)),
         "more than 50,000 values"),
        (f"a: &a {'x' * 5_000}\nb: [{', '.join(['*a'] * 5_000)}]", "more than 50,000 values"),
        # Values.
        ("a: !!int x", "a text that is not of the type it has"),
        ("a: !!int ''", "a text that is not of the type it has"),
        ("a: !!bool x", "a text that is not of the type it has"),
        ("a: !!float x", "a text that is not of the type it has"),
        ("a: 0x_", "a text that is not of the type it has"),
        ("a: !!int [1]", "line 1: the tag 'tag:yaml.org,2002:int' has no place here"),
        ("a: !!str {b: 1}", "has no place here"),
        ("a: !!map [1]", "has no place here"),
        ("a: !!seq {b: 1}", "has no place here"),
        ("a: !!binary aGk=", "the tag 'tag:yaml.org,2002:binary' has no place here"),
        ("a: !!timestamp 2026-01-01", "has no place here"),
        ("b: 1\na: !!set {x, y}", "line 2: the tag 'tag:yaml.org,2002:set' has no place here"),
        ("a: !!omap [{x: 1}]", "has no place here"),
        ("a: !!pairs [{x: 1}]", "has no place here"),
        ("a: !!python/object/apply:os.system [ls]", "has no place here"),
        ("!!python/name:os.system x: 1", "line 1: a key must be text"),
        ("a: !own x", "the tag '!own' has no place here"),
        ("a: <<", "the tag 'tag:yaml.org,2002:merge' has no place here"),
        ("a: 1\n<<: 3", "line 2: << takes a section, or a list of them"),
        ("<<: [{a: 1}, b]", "line 1: << takes a section, or a list of them"),
        ("<<: &a [{b: 1}, [{c: 1}]]", "line 1: << takes a section, or a list of them"),
        (f"a: 1{':59' * 200_000}", "a number of more than 100 characters"),
        (f"a: 1{':59' * 400}.5", "a number of more than 100 characters"),
        (f"a: 0x{'f' * 200}", "a number of more than 100 characters"),
        (f"a: {'9' * 10_000}", "a number of more than 100 characters"),
        ('a: "x\\0y"', "line 1: a NUL in a text"),
        ('"\\0": 1', "line 1: a NUL in a text"),
        ("a: x\0y", "unacceptable character"),
        ('b: 1\na: "\\ud800"', "line 2: half a character"),
        ('a: "\\ude00\\ud83d"', "line 1: half a character"),
        ("a: \udcff", "unacceptable character"),
        (b"a: \xff", "invalid start byte"),
        (b"a: \xed\xa0\x80", "invalid continuation byte"),
        ("a: \x1b[31m", "unacceptable character"),
        # Documents.
        ("a: 1\n---\nb: 2\n", r"found another document, line 2"),
        ("a: [1", "line 1"),
        ("a: b: c", "mapping values are not allowed here"),
        ("\ta: 1", "cannot start any token"),
        ("%YAML 3.0\n---\na: 1", "incompatible"),
        (f"a: *{'b' * 10_000}", r"\.\.\."),
    ],
)  # fmt: skip
def test_yaml_that_is_refused(text, sentence):
    with pytest.raises(InputError, match=sentence) as error:
        parse_yaml(text)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        (b"", None),
        ("# nothing\n", None),
        ("--- {a: 1}\n...\n", {"a": 1}),
        ("a: 1\r\nb: [x,\r\n y]\r\n", {"a": 1, "b": ["x", "y"]}),
        (b"\xef\xbb\xbfa: 1", {"a": 1}),
        ("a: é".encode("utf-16"), {"a": "é"}),
        ("a: 1e-3\nb: 1E5\nc: -.5e+1\nd: 1e999", {"a": 1e-3, "b": 1e5, "c": -5.0, "d": math.inf}),
        ("a: 2026-01-01\nb: =", {"a": "2026-01-01", "b": "="}),
        ("a: !!str 1\n!!str 2: b", {"a": "1", "2": "b"}),
        ("a: !!float 1\nb: !!int '2'", {"a": 1.0, "b": 2}),
        ("'<<': 1", {"<<": 1}),
        ("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}", {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}}),
        ("a: &a {x: 1}\nb: &b {y: 2}\nc: {<<: [*a, *b], z: 3}\nd: {<<: *a, <<: *b}",
         {"a": {"x": 1}, "b": {"y": 2}, "c": {"x": 1, "y": 2, "z": 3}, "d": {"x": 1, "y": 2}}),
        # Of what is merged the first counts, and before it what is said in place.
        ("<<: [{some: 1, other: 2}, {some: 3, more: 4}]\n<<: {more: 5, last: 6}",
         {"some": 1, "other": 2, "more": 4, "last": 6}),
        ("some: 1\n<<: {some: 2, other: 3}", {"some": 1, "other": 3}),
        ("a: &a {x: 1}\nb: {c: &c {<<: *a, x: 2}}\nd: {<<: *c, z: 3}",
         {"a": {"x": 1}, "b": {"c": {"x": 2}}, "d": {"x": 2, "z": 3}}),
        ("a: &a {some: 1}\nb: &b {<<: *a, some: 2}\nc: {<<: *b}",
         {"a": {"some": 1}, "b": {"some": 2}, "c": {"some": 2}}),
        ('a: "\\ud83d\\ude00"', {"a": "\N{GRINNING FACE}"}),
        ("a: &a k\n*a : 1", {"a": "k", "k": 1}),
        ("{a: 1, b: {a: 1}}", {"a": 1, "b": {"a": 1}}),
        (f"a: {'9' * 100}", {"a": 10**100 - 1}),
    ],
)  # fmt: skip
def test_yaml_that_passes(text, value):
    assert parse_yaml(text) == value


def test_what_an_alias_stands_for_is_there_again():
    """A setting on top of one of them is none of the other's."""
    found = parse_yaml("a: &a {x: [1]}\nb: *a\nc: [*a]\n")
    found["a"]["x"].append(2)
    assert found == {"a": {"x": [1, 2]}, "b": {"x": [1]}, "c": [{"x": [1]}]}


@pytest.mark.parametrize("text", [bomb(9, 10), "[" * 100_000, "[" + "a," * 400_000 + "]"])
def test_no_file_takes_much_memory(monkeypatch, text):
    monkeypatch.setattr(plain, "_MOST_VALUES", 1_000)  # for the sake of time
    tracemalloc.start()
    try:
        with pytest.raises(InputError):
            parse_yaml(text)
        assert tracemalloc.get_traced_memory()[1] < 5e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("read", [read_json, read_yaml])
def test_a_file_is_named_once(tmp_path, read):
    with pytest.raises(InputError) as error:
        read(tmp_path / "absent")
    assert str(error.value) == f"{tmp_path}/absent: cannot be read (No such file or directory)"
    (tmp_path / "bad").write_text('{"a": 1, "a": 2}')
    with pytest.raises(InputError, match=r"^[^:]*/bad: (line 1: )?the key 'a' is there twice$"):
        read(tmp_path / "bad")


def test_a_file_that_is_too_large(tmp_path):
    (tmp_path / "a").write_bytes(b" " * (MOST_YAML + 1))
    with pytest.raises(InputError, match="a: larger than 1,048,576 bytes, which no such file is"):
        read_yaml(tmp_path / "a")
    assert len(read_bytes(tmp_path / "a", MOST_YAML + 1)) == MOST_YAML + 1


@pytest.mark.parametrize(
    "name", ["x" * 5_000, "a\0b", "\ud800", ".", "file/x"], ids=lambda name: repr(name)[:9]
)
def test_paths_that_are_none(tmp_path, name):
    (tmp_path / "file").write_text("x")
    path = tmp_path / name
    with pytest.raises(InputError, match="cannot be read"):
        read_yaml(path)
    with pytest.raises(InputError, match="cannot be read"), readable(path):
        path.read_text()


def test_the_stack_of_the_caller_does_not_count():
    """Depth is bounded by number, not by what is left of the stack."""

    def inside(depth):
        if depth:
            return inside(depth - 1)
        return parse_yaml("[" * 60 + "]" * 60), parse_json("[" * 60 + "]" * 60)

    yaml_found, json_found = inside(sys.getrecursionlimit() // 3)
    assert yaml_found == json_found
