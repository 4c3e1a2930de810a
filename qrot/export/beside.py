"""What lies beside a model's weights: tokenizer, chat templates, generation config, licence."""

from __future__ import annotations

import json
import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from qrot.export.config import special_tokens
from qrot.files.plain import readable
from qrot.model.io.load import Opened

# Names in lower case. What is not here is left behind, and said to be.
_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "generation_config.json",
    "chat_template*",
    "licen[cs]e*",
    "notice*",
    "use_policy*",
)
_TEMPLATES = "additional_chat_templates"  # a folder
# Weights, what indexes them, and what an export has of its own: not copied and not worth a word.
_OWN = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin",
    "*.bin.index.json",
    "*.pt",
    "*.pth",
    "*.gguf",
    "*.h5",
    "*.msgpack",
    "config.json",
    "readme.md",
    ".*",
)


class Beside(NamedTuple):
    """What lies in a model's folder beside the weights.

    Attributes:
        copied: files by their place in the folder.
        left: names of what is not copied.
    """

    copied: dict[str, Path]
    left: list[str]


def beside(opened: Opened) -> Beside:
    """What comes along from a model's folder, and what does not; nothing from a GGUF file."""
    copied: dict[str, Path] = {}
    left: list[str] = []
    with readable(opened.path):
        for path in sorted(opened.path.iterdir()) if opened.path.is_dir() else ():
            name = path.name.lower()
            if _matches(name, _OWN):
                continue
            if name == _TEMPLATES and path.is_dir():
                files = sorted(path.glob("*.jinja"))
                copied |= {f"{path.name}/{file.name}": file for file in files if file.is_file()}
            elif _matches(name, _FILES) and path.is_file():
                copied[path.name] = path
            else:
                left.append(path.name + "/" * path.is_dir())
    return Beside(copied, left)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def write_beside(folder: Path, opened: Opened) -> None:
    """Copy it into a folder, or make it from what a GGUF file says."""
    for name, source in beside(opened).copied.items():
        (folder / name).parent.mkdir(exist_ok=True)
        with readable(source):
            file = source.open("rb")
        with file, (folder / name).open("wb") as copy:
            shutil.copyfileobj(file, copy)
    if not opened.path.is_dir():
        _write_gguf(folder, opened)


def _write_gguf(folder: Path, opened: Opened) -> None:
    config = opened.config
    _write_json(folder / "generation_config.json", special_tokens(config))
    if opened.tokenizer is None:
        return
    # The library's own `save` says of a full disk what is no OSError.
    (folder / "tokenizer.json").write_text(opened.tokenizer.to_str(pretty=True), encoding="utf-8")
    about: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    first = {"bos_token": config.bos_token_id, "eos_token": next(iter(config.eos_token_ids), None)}
    for key, token in first.items():
        if token is not None:
            about[key] = opened.tokenizer.id_to_token(token)
    template = opened.metadata.get("tokenizer.chat_template")
    if template and isinstance(template, str):
        about["chat_template"] = template
    _write_json(folder / "tokenizer_config.json", about)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
