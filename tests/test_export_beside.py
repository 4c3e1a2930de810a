"""What lies beside the weights: what comes along, and what does not, which is said."""

import os

import pytest
from models import write_variant

from qrot.errors import InputError
from qrot.export.beside import beside, write_beside
from qrot.model.io.load import open_model

COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tokenizer.model.v3",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "LICENSE",
    "LICENSE.txt",
    "License-Community.md",
    "NOTICE",
    "USE_POLICY.md",
)
LEFT = ("params.json", "notes.txt", "modeling_own.py", "model.safetensors.index.json.bak")
OWN = (
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "consolidated.safetensors",
    "tokenizer.safetensors",
    "training_args.bin",
    "README.md",
    ".gitattributes",
)


@pytest.fixture
def folder(tmp_path):
    """A model with everything beside it, contents like names; tokenizers that qrot can read."""
    folder = tmp_path / "model"
    write_variant(folder, "llama")
    contents = {"generation_config.json": "{}", "tokenizer.json": None}
    for name in (*COPIED, *LEFT, *OWN):
        text = contents.get(name, name)
        if text is not None:
            (folder / name).write_text(text)
    return folder


def copied(folder, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    write_beside(out, open_model(str(folder)))
    return {str(path.relative_to(out)): path for path in out.rglob("*") if path.is_file()}


def test_what_is_copied_and_what_is_named(folder, tmp_path):
    found = copied(folder, tmp_path)
    assert set(found) == set(COPIED) - {"tokenizer.json"}
    assert found["LICENSE"].read_text() == "LICENSE"
    assert set(beside(open_model(str(folder))).left) == set(LEFT)


def test_folders_with_the_names_of_files(folder, tmp_path):
    """As people keep them: they stop nothing, and are named."""
    for name in ("tokenizer_backup", "vocab.d", "LICENSES", "onnx", "chat_template.old"):
        (folder / name).mkdir()
        (folder / name / "tokenizer.json").write_text("{}")
    found = copied(folder, tmp_path)
    assert set(found) == set(COPIED) - {"tokenizer.json"}
    left = beside(open_model(str(folder))).left
    folders = {"tokenizer_backup/", "vocab.d/", "LICENSES/", "onnx/", "chat_template.old/"}
    assert folders <= set(left)


def test_further_chat_templates(folder, tmp_path):
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    (folder / "additional_chat_templates" / "model.safetensors").write_text("weights")
    found = copied(folder, tmp_path)
    assert found["additional_chat_templates/tool_use.jinja"].read_text() == "{{ tools }}"
    assert "additional_chat_templates/model.safetensors" not in found


def test_links_are_followed(folder, tmp_path):
    """A cache of the hub is made of them; one that leads nowhere is named."""
    (tmp_path / "blob").write_text("of the hub")
    (folder / "LICENSE").unlink()
    (folder / "LICENSE").symlink_to(tmp_path / "blob")
    (folder / "NOTICE").unlink()
    (folder / "NOTICE").symlink_to(tmp_path / "absent")
    found = copied(folder, tmp_path)
    assert found["LICENSE"].read_text() == "of the hub"
    assert not found["LICENSE"].is_symlink()
    assert "NOTICE" in beside(open_model(str(folder))).left


def test_a_file_that_cannot_be_read_is_named(folder, tmp_path, monkeypatch):
    opened = open_model(str(folder))
    monkeypatch.setattr("pathlib.Path.open", refuse)
    with pytest.raises(InputError, match=r"cannot be read \(Permission denied\)"):
        write_beside(tmp_path, opened)


def refuse(path, *_):
    raise PermissionError(13, os.strerror(13), str(path))
