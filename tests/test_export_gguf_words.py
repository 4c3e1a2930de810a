"""What a GGUF file says beside its weights, and what is refused."""

import json

import numpy as np
import pytest
from exports import export, hadamard, save, write_fitted
from gguf_exports import GGUF, byte_level, model, only, rotated
from models import LLAMA3, write_folder
from tokenizers import pre_tokenizers, processors

from qrot.export.gguf_tokenizer import tokenizer_metadata
from qrot.model.io.load import open_model
from qrot.model.io.tokenizer import encode, from_gguf
from qrot.scheme import Scheme
from qrot.text import Data, read_texts

pytestmark = pytest.mark.usefixtures("quick_compile")


def test_the_tokenizer_comes_back(monkeypatch, tmp_path):
    folder, out = model(tmp_path, "llama"), tmp_path / "out"
    made = byte_level()
    made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    made.save(str(folder / "tokenizer.json"))
    folder_config = json.loads((folder / "config.json").read_text())
    ids = {"bos_token_id": 0, "eos_token_id": [1, 4, 5]}
    (folder / "config.json").write_text(json.dumps({**folder_config, **ids}))
    path = save(folder, rotated(folder), Scheme())
    assert export(monkeypatch, path, "--out", out, *GGUF, "--type", "f32") == 0
    read, text = open_model(str(only(out))), read_texts(Data()).evaluation[:20000] + "<|x|></s>"
    expected = encode(open_model(str(folder)).tokenizer, text, 97)
    np.testing.assert_array_equal(encode(read.tokenizer, text, 97), expected)
    said = read.metadata
    assert said["tokenizer.ggml.pre"] == "gpt-2"
    assert said["tokenizer.ggml.add_bos_token"] is True
    assert said["tokenizer.ggml.padding_token_id"] == 1
    assert said["tokenizer.chat_template"] == "{{ messages }}"
    assert (read.config.bos_token_id, read.config.eos_token_ids) == (0, (1, 4, 5))
    assert said["tokenizer.ggml.token_type"][:3] == [3, 3, 1]
    assert said["tokenizer.ggml.token_type"][-1] == 5  # of a row without a token
    assert said["qrot.scheme"] == "W16A16KV16"


@pytest.mark.parametrize("kind", ["smollm", "gpt-2", "llama-bpe", "qwen2"])
def test_the_name_of_what_cuts_texts(tmp_path, kind):
    """Each is told from the others by what it does."""
    tokens = [own_byte for own_byte in sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = [["t", "h"], ["1", "2"], ["3", "4"], ["Ġ", "t"], ["Ċ", "Ċ"], ["'", "s"], ["E", "R"]]
    merges += [["12", "3"], ["'", "R"], ["'R", "E"], ["Ã", "©"], ["e", "Ì"]]
    tokens += ["".join(pair) for pair in merges]
    said = {
        "model": "gpt2",
        "pre": kind,
        "tokens": tokens,
        "merges": [" ".join(pair) for pair in merges],
    }
    made = from_gguf({f"tokenizer.ggml.{key}": value for key, value in said.items()})
    folder = tmp_path / "model"
    write_folder(folder, "llama", vocab_size=len(tokens))
    made.save(str(folder / "tokenizer.json"))
    opened = open_model(str(folder))
    assert tokenizer_metadata(opened, opened.config)["tokenizer.ggml.pre"] == kind


def test_a_gguf_keeps_its_own_words(monkeypatch, tmp_path):
    """Tokenizer, name and licence of a file go on as they are; what it was rounded to does not."""
    folder = model(tmp_path, "llama")
    first = save(folder, rotated(folder), Scheme())
    assert export(monkeypatch, first, "--out", tmp_path / "a", *GGUF, "--type", "f32") == 0
    file = only(tmp_path / "a")
    path = save(file, rotated(file), Scheme())
    assert export(monkeypatch, path, "--out", tmp_path / "b", *GGUF) == 0
    old, new = open_model(str(file)).metadata, open_model(str(only(tmp_path / "b"))).metadata
    tokens = {key: value for key, value in old.items() if key.startswith("tokenizer.")}
    assert {key: new[key] for key in tokens} == tokens
    assert new["general.name"] == old["general.name"] == "llama"
    assert (old["general.file_type"], new["general.file_type"]) == (0, 7)
    assert {*new} == {*old}


REFUSED = [
    ("llama", {}, "--dtype float16", "--dtype: a GGUF file has --type"),
    ("llama", {}, "--type q5_k", "there is no 'q5_k'"),
    ("llama", {"hidden_size": 48}, "--type q4_0", "do not divide 48, the row of embedding"),
    ("llama", {"intermediate_size": 56}, "", "do not divide 56, the row of down"),
    ("llama", {}, "--type q4_1 --weights gptq", "q4_1 takes --weights rtn only"),
    ("llama", {}, "--type f16 --weights gptq", "holds them unrounded"),
    ("llama", {}, "--online", "a power of two, and R4 has 96"),
    ("mistral-window", {}, "", "look back on 4 tokens only"),
    ("qwen2", {}, "--online", "R4 for llama and qwen3, not for qwen2"),
    ("qwen3-biases", {}, "--type f32", "which llama.cpp's qwen3 lacks"),
    ("qwen2", {"rope_scaling": LLAMA3}, "", "in its llama only"),
]


@pytest.mark.parametrize(("name", "changes", "arguments", "message"), REFUSED)
def test_refusals(monkeypatch, tmp_path, capsys, name, changes, arguments, message):
    folder, out = model(tmp_path, name, **changes), tmp_path / "out"
    path = save(folder, rotated(folder), Scheme())
    assert export(monkeypatch, path, "--out", out, *GGUF, *arguments.split()) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not out.exists()


def test_a_tokenizer_of_words_is_refused(monkeypatch, tmp_path, capsys):
    path = write_fitted(tmp_path, "llama", Scheme(), hadamard("llama", tmp_path))
    assert export(monkeypatch, path, "--out", tmp_path / "out", *GGUF, "--type", "f32") == 2
    assert "a WordLevel of another kind than byte-level BPE" in capsys.readouterr().err
