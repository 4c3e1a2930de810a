"""Tokenizers of which nothing is true: token counts are those of a clean one, or a sentence."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import runs
from rich.console import Console
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from qrot import cli
from qrot.errors import InputError
from qrot.evaluate.zeroshot import ZeroShot, read_tasks
from qrot.export.verify import windows_of
from qrot.generate import written
from qrot.model.io.load import load, open_model
from qrot.model.io.tokenizer import encode, from_folder, from_gguf
from qrot.progress import Stages
from qrot.run.prepare import inspected
from qrot.run.run import run
from qrot.text import Data

TEXT = "the cat sat on the mat, and the cat slept. " * 30
WHOLE = {"Sequence": {"id": "A", "type_id": 0}}
OTHER = {"Sequence": {"id": "B", "type_id": 1}}


def letters(merges=(("t", "h"), ("th", "e"))):
    """A BPE of bytes with two merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<unk>", *alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def template(*parts):
    begin = {"id": "<unk>", "ids": [0], "tokens": ["<unk>"]}
    return {
        "type": "TemplateProcessing",
        "single": list(parts),
        "pair": [WHOLE, OTHER],
        "special_tokens": {"<unk>": begin},
    }


def saved(folder, **changes):
    """The tokenizer of a folder with a tokenizer.json that says this, too."""
    raw = json.loads(letters().to_str())
    model = raw["model"] | changes.pop("model", {})
    (folder / "tokenizer.json").write_text(json.dumps({**raw, "model": model, **changes}))
    return from_folder(folder)


def truncation(length, stride=0):
    about = {"direction": "Right", "strategy": "LongestFirst"}
    return {"truncation": {**about, "max_length": length, "stride": stride}}


def padding(strategy):
    about = {"direction": "Left", "pad_id": 0, "pad_type_id": 0, "pad_token": "<unk>"}
    return {"padding": {**about, "strategy": strategy, "pad_to_multiple_of": 64}}


@pytest.mark.parametrize(
    "changes",
    [
        truncation(512),
        truncation(0),
        truncation(3, stride=5),  # at which the library panics
        padding({"Fixed": 4000}),
        padding("BatchLongest"),
        truncation(16) | padding({"Fixed": 32}),
        {"post_processor": template({"SpecialToken": {"id": "<unk>", "type_id": 0}}, WHOLE)},
        {"post_processor": template(WHOLE, WHOLE)},
        {"post_processor": template()},
        {"post_processor": template(OTHER)},  # at which the library panics
        {"model": {"dropout": 0.5}},
        {"model": {"dropout": 1.0}},
    ],
)
def test_what_is_for_training_is_switched_off(tmp_path, changes):
    clean = letters().encode(TEXT).ids
    tokenizer = saved(tmp_path, **changes)
    assert encode(tokenizer, TEXT, 272).tolist() == clean
    assert encode(tokenizer, "", 272).tolist() == []
    assert tokenizer.decode(clean) == letters().decode(clean)


def refused(path, folder=None):
    with pytest.raises(InputError) as error:
        from_folder(folder or path.parent)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"hello",
        b"\xff\xfe",
        b"{" * 10_000,
        b'{"model": {"type": "BPE"}}',
        b'{"model": null, "model": null}',
        b'{"model": "\\ud800"}',
        b'{"model": {"merges": 3, "vocab": {}}}',
        b'{"model": {"merges": [], "vocab": []}}',
    ],
)
def test_a_file_that_is_none(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    refused(path)


def test_a_folder_in_the_place_of_the_file(tmp_path):
    assert from_folder(tmp_path) is None
    (tmp_path / "tokenizer.json").mkdir()
    assert "Is a directory" in refused(tmp_path / "tokenizer.json")


def test_a_file_that_is_too_large(tmp_path):
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(1 << 40)
    assert "larger than" in refused(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    "model",
    [
        {"merges": [["t", "nowhere"]]},
        {"merges": [["t", "e"]]},  # what comes of it is no token
        {"merges": ["t h e"]},
        {"merges": [["t"]]},
        {"merges": [[]]},
        {"merges": [None]},
        {"merges": [[1, 2]]},
        {"continuing_subword_prefix": "######"},  # at which the library panics
        {"continuing_subword_prefix": 3},
        # Half of a character is cut off, at which the library ends the process.
        {"merges": [["a", "é"]], "vocab": {"a": 0, "é": 1}, "continuing_subword_prefix": "#"},
        {"dropout": 7.0},
        {"vocab": {"a": -1}},
        {"vocab": {"a": 2**32}},
    ],
)
def test_a_model_that_cannot_be(tmp_path, model):
    with pytest.raises(InputError) as error:
        saved(tmp_path, model=model)
    assert str(error.value).startswith(f"{tmp_path}/tokenizer.json: ")


def test_merges_of_an_older_form(tmp_path):
    assert encode(saved(tmp_path, model={"merges": ["t h", "th e"]}), "the", 272).tolist() == [258]
    assert encode(saved(tmp_path, model={"continuing_subword_prefix": ""}), "the", 272).size == 1


@pytest.mark.parametrize(
    "part",
    [
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
        {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]", "merges": []}},
    ],
)
def test_a_panic_is_a_sentence(tmp_path, capfd, part):
    """What `tokenizers` raises then is no Exception."""
    with pytest.raises(InputError, match=r"not a valid tokenizer|the tokenizer cannot read"):
        encode(saved(tmp_path, **part), "the", 272)
    capfd.readouterr()


def test_half_a_character():
    with pytest.raises(InputError, match="half a character"):
        encode(letters(), "a\ud800b", 272)
    with pytest.raises(InputError, match="half a character"):
        encode(letters(), "a\udc80", 272)
    assert encode(letters(), "a\0b\U0001f600", 272).size == 7


# Tokens that the embedding lacks: 97 rows.


@pytest.fixture
def beyond(tiny, tmp_path):
    """The tiny model with two tokens more than its embedding has rows, of which texts hold one."""
    folder = tmp_path / "beyond"
    shutil.copytree(tiny, folder)
    path = folder / "model" / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_tokens([AddedToken("unused"), AddedToken("used")])
    tokenizer.save(str(path))
    for name in ("calibration.txt", "evaluation.txt"):
        (folder / name).write_text((folder / name).read_text() + " used")
    return folder


SENTENCE = r"the tokenizer gives token 98 \('used'\), but the embedding has 97 rows"


def test_ids_that_no_text_uses_are_not_refused(beyond):
    model = load(str(beyond / "model"))
    assert model.tokenizer.get_vocab_size() == 99
    assert encode(model.tokenizer, "w3 w96", 97).tolist() == [3, 96]
    with pytest.raises(InputError, match=SENTENCE):
        encode(model.tokenizer, "w3 used", 97)


def test_a_run_with_ids_beyond_the_embedding(beyond, tmp_path):
    config = runs.tiny_config(beyond, tmp_path / "run")
    with pytest.raises(InputError, match=SENTENCE):
        run(config, runs.quiet())
    assert not Path(config.out).exists()


def test_inspect_with_ids_beyond_the_embedding(beyond):
    with Stages(Console(quiet=True)) as stages, pytest.raises(InputError, match=SENTENCE):
        inspected(str(beyond / "model"), None, beyond / "evaluation.txt", 1, 8, stages)


def test_tasks_with_ids_beyond_the_embedding(beyond):
    file = beyond / "task.jsonl"
    file.write_text('{"context": "w1", "continuation": "used"}\n')
    with pytest.raises(InputError, match=rf"{file}, line 1: {SENTENCE}"):
        read_tasks(ZeroShot((str(file),)), load(str(beyond / "model")))


def test_verify_with_ids_beyond_the_embedding(beyond, monkeypatch):
    from qrot.export import verify
    from qrot.text import read_texts

    texts = read_texts(Data("files", str(beyond)))
    monkeypatch.setattr(verify, "read_texts", lambda data: texts)
    with pytest.raises(InputError, match=SENTENCE):
        windows_of(open_model(str(beyond / "model")))


def test_lm_eval_with_ids_beyond_the_embedding(beyond):
    pytest.importorskip("lm_eval")
    from types import SimpleNamespace

    from qrot.evaluate.lm_eval import LikelihoodModel

    adapter = LikelihoodModel(lambda rows: rows, load(str(beyond / "model")))
    for ask in (adapter.loglikelihood, adapter.loglikelihood_rolling):
        with pytest.raises(InputError, match=SENTENCE):
            ask([SimpleNamespace(args=("used", "w1")[: 2 if ask == adapter.loglikelihood else 1])])


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [("w1 used", "prompt: the tokenizer gives token 98"), ("w1 \udc80", "prompt: the text holds")],
)
def test_a_prompt_that_cannot_be_read(beyond, monkeypatch, capsys, prompt, sentence):
    monkeypatch.setattr("sys.argv", ["qrot", "generate", str(beyond / "model"), prompt])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    out, err = capsys.readouterr()
    assert stopped.value.code == 2
    assert out == ""
    assert sentence in " ".join(err.split())


def test_a_prompt_of_ids_beyond_the_embedding(tiny):
    network = load(str(tiny / "model")).network
    for prompt in ([3, 97], [-1], [2**31 - 1]):
        with pytest.raises(InputError, match=f"token {prompt[-1]}, but the embedding has 97 rows"):
            next(written(network, np.array(prompt, np.int32), steps=1))


# A GGUF's.

TOKENS = [*"abĠ", "ab", "<end>"]
METADATA = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.token_type": [1, 1, 1, 1, 3],
}


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("tokenizer.ggml.tokens", [None, "ab", [1, 2], ["a"]]),
        ("tokenizer.ggml.merges", [None, "a b", [1], ["a"], ["a c"], ["b a"], [""], [" "]]),
        ("tokenizer.ggml.token_type", [[1], [1] * 6, 3, "11113", [7] * 5, [-1] * 5, ["1"] * 5]),
        ("tokenizer.chat_template", [3, True, ["x"]]),
        ("tokenizer.ggml.normalizer.lowercase", [True, False]),
        ("tokenizer.ggml.of_next_year", [0]),
    ],
)
def test_a_vocabulary_that_cannot_be(key, values):
    assert from_gguf(METADATA) is not None
    for value in values:
        with pytest.raises(InputError) as error:
            from_gguf({**METADATA, key: value})
        assert key.removeprefix("tokenizer.ggml.") in str(error.value)
