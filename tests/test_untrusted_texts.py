"""Texts and tasks of which nothing is true: read, or refused in a sentence."""

import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qrot.errors import InputError
from qrot.evaluate.zeroshot import read_rows
from qrot.text import MOST_TEXT, Data, read_text, read_texts

ROW = {"query": "q", "choices": ["a", "b"], "gold": 1}


def refused(read, path):
    """The sentence, which names the path."""
    with pytest.raises(InputError) as error:
        read(path)
    sentence = str(error.value)
    assert str(path)[:50].split("\0")[0] in sentence
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize("read", [read_text, read_rows])
def test_what_is_no_file(tmp_path, read):
    assert "No such file" in refused(read, tmp_path / "absent")
    assert "Is a directory" in refused(read, tmp_path)
    assert "too long" in refused(read, tmp_path / ("x" * 5000))
    assert "too long" in refused(read, tmp_path / "/".join(["x" * 100] * 50))
    assert "NUL" in refused(read, tmp_path / "a\0b")
    assert "Not a directory" in refused(read, _written(tmp_path / "file", b"x") / "inner")
    (tmp_path / "loop").symlink_to("loop")
    assert "symbolic links" in refused(read, tmp_path / "loop")


@pytest.mark.parametrize("read", [read_text, read_rows])
def test_what_never_begins_or_ends(tmp_path, read):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero"):
        assert "neither a file nor a folder" in refused(read, tmp_path / name)


@pytest.mark.parametrize("read", [read_text, read_rows])
def test_what_is_no_text(tmp_path, read):
    for content in (b"\xff\xfea\0", b"caf\xe9", "\ud800".encode("utf-8", "surrogatepass")):
        path = _written(tmp_path / "file", content)
        assert "cannot be read as text" in refused(read, path)
    with path.open("wb") as file:
        file.truncate(MOST_TEXT + 1)
    assert "larger than" in refused(read, path)


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
def test_what_must_not_be_read(tmp_path):
    path = _written(tmp_path / "file", b"x")
    path.chmod(0)
    assert "Permission denied" in refused(read_text, path)


def _written(path, content):
    path.write_bytes(content)
    return path


def test_a_text_is_taken_as_it_is(tmp_path):
    for content, text in (
        (b"", ""),
        (b"a\r\nb\rc\n", "a\nb\nc\n"),
        ("a\0\u2028\U0001f600".encode(), "a\0\u2028\U0001f600"),
    ):
        assert read_text(_written(tmp_path / "file", content)) == text


def test_settings_that_lead_nowhere(tmp_path):
    _written(tmp_path / "evaluation.txt", b"x")
    with pytest.raises(InputError, match="the text that calibrates is the one that judges"):
        read_texts(Data("files", str(tmp_path), calibration="evaluation.txt"))
    for path in (str(tmp_path / "absent"), "x" * 5000, "a\0b", str(tmp_path / "evaluation.txt")):
        for source in ("files", "wikitext2"):
            with pytest.raises(InputError, match="cannot be read"):
                read_texts(Data(source, path))


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"query": ' * 100_000, "nested too deeply"),
        (json.dumps({**ROW, "query": "\ud800"}), "half a character"),
        (json.dumps({**ROW, "choices": ["a", "\udc80"]}), "half a character"),
        (
            '{"query": "a", "query": "b", "choices": ["a", "b"], "gold": 0}',
            "the key 'query' is there twice",
        ),
        (json.dumps({**ROW, "gold": "1"}), "gold is missing"),
        (json.dumps({**ROW, "gold": float("nan")}), "gold is missing"),
        (json.dumps({**ROW, "gold": 1.0}), "gold is missing"),
        (json.dumps({**ROW, "gold": -1}), "gold is missing"),
        (json.dumps({**ROW, "gold": [1]}), "gold is missing"),
        (f'{{"query": "a", "choices": ["a", "b"], "gold": {"9" * 5000}}}', "digits"),
        (json.dumps({**ROW, "choices": []}), "choices is missing"),
        (json.dumps({**ROW, "choices": "ab"}), "choices is missing"),
        (json.dumps({**ROW, "choices": {"0": "a", "1": "b"}}), "choices is missing"),
        (json.dumps({**ROW, "choices": ["a", None]}), "choices holds something"),
        (json.dumps({**ROW, "query": None}), "query is missing"),
        ("\ufeff" + json.dumps(ROW), ""),
        ("\0", "not valid JSON"),
        ("NaN", "not an object"),
    ],
)
def test_a_line_that_no_task_has(tmp_path, line, sentence):
    good = json.dumps(ROW)
    path = _written(tmp_path / "task.jsonl", f"{good}\n{line}\n{good}\n".encode())
    assert sentence in (found := refused(read_rows, path))
    assert found.startswith(f"{path}, line 2: ")
    assert len(found) < len(str(path)) + 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
FIELDS = ("query", "choices", "gold", "context", "continuation", "context_options")


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), JSON) | JSON)
def test_a_row_is_of_a_kind_or_a_sentence(tmp_path_factory, row):
    path = tmp_path_factory.getbasetemp() / "row.jsonl"
    path.write_text(json.dumps(row))
    sentence, kind = f"{path}, line 1: ", None
    try:
        kind, rows, _ = read_rows(path)
    except InputError as error:
        sentence = str(error)
    assert sentence.startswith(f"{path}, line 1: ")
    if kind == "choices":
        assert 0 <= rows[0]["gold"] < len(rows[0]["choices"])
