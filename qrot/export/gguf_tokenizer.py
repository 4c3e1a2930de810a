"""A tokenizer in GGUF's words: as the source has it, or made from tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gguf import TokenType
from tokenizers import Tokenizer

from qrot.errors import InputError
from qrot.files.plain import MOST_JSON, read_bytes, read_json
from qrot.model.config import ModelConfig
from qrot.model.io.load import Opened
from qrot.model.io.tokenizer import PRETOKENIZERS, encode, from_gguf
from qrot.text import read_text

_START = "tokenizer.ggml."
# What the ways of cutting a text differ in: digits, contractions, capitals, spaces, lines, scripts,
# and letters of two characters.
_PROBE = (
    "It's 1234567 o'clock, WE'RE 3.14  at   home.\n\n\tdef f(x):\r\n    return x[0] != '\"'\n"
    "Ünïcödé naïve cafe\u0301 — 日本語のテキスト, русский, العربية १२३ 🙂👍🏽 don't ''s  \n "
)
_ENDS = ("eos", "eot", "eom")  # llama.cpp stops at each


def tokenizer_metadata(opened: Opened, config: ModelConfig) -> dict[str, Any]:
    """The keys of a tokenizer.

    Args:
        opened: the model. Of a GGUF file its own keys are taken as they are.
        config: of what is exported.

    Raises:
        InputError: where the tokenizer is none that qrot can say in GGUF.
    """
    if not opened.path.is_dir():
        kept = {k: x for k, x in opened.metadata.items() if k.startswith("tokenizer.")}
        tokens = kept.get(_START + "tokens")
        if tokens is not None and len(tokens) != config.vocab_size:
            raise InputError("an adapter added tokens, which the tokenizer of a GGUF file lacks")
        return kept
    if opened.tokenizer is None:
        return {_START + "model": "none"}
    vocabulary = _vocabulary(opened.tokenizer, config.vocab_size)
    return {
        **_named(opened.tokenizer, vocabulary),
        **_special(opened, config),
        **_template(opened.path),
    }


def _vocabulary(tokenizer: Tokenizer, rows: int) -> dict[str, Any]:
    """Tokens, their types and merges; rows of the embedding without a token have one of their own,
    which no text has."""
    model = json.loads(tokenizer.to_str())["model"]
    if model["type"] != "BPE" or model.get("byte_fallback"):
        raise InputError(
            f"the tokenizer is a {model['type']} of another kind than byte-level BPE, which alone "
            "qrot writes into GGUF"
        )
    names = {index: token for token, index in tokenizer.get_vocab().items()}
    added = tokenizer.get_added_tokens_decoder()
    if names and max(names) >= rows:
        raise InputError(
            f"the tokenizer has {max(names) + 1} tokens, but the embedding {rows} rows"
        )

    def kind(index: int) -> int:
        if index in added:
            return TokenType.CONTROL if added[index].special else TokenType.USER_DEFINED
        return TokenType.NORMAL if index in names else TokenType.UNUSED

    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    said = {
        "model": "gpt2",
        "tokens": [names.get(i, f"[PAD{i}]") for i in range(rows)],
        "token_type": [int(kind(i)) for i in range(rows)],
        "merges": merges,
    }
    return {_START + key: value for key, value in said.items()}


def _named(tokenizer: Tokenizer, vocabulary: dict[str, Any]) -> dict[str, Any]:
    """The vocabulary with the name of what cuts a text into words: the one by which a text that
    tells them apart comes out the same when it is read again."""
    rows = len(vocabulary[_START + "tokens"])
    expected = encode(tokenizer, _PROBE, rows).tolist()
    for name in PRETOKENIZERS:
        said = {**vocabulary, _START + "pre": name}
        if encode(from_gguf(said), _PROBE, rows).tolist() == expected:
            return said
    raise InputError(
        f"the tokenizer cuts texts in another way than {', '.join(PRETOKENIZERS)}, which alone "
        "qrot writes into GGUF"
    )


def _special(opened: Opened, config: ModelConfig) -> dict[str, Any]:
    """Ids of special tokens, and whether a text begins with one."""
    ids: dict[str, int] = dict(zip(_ENDS, config.eos_token_ids, strict=False))
    if config.bos_token_id is not None:
        ids["bos"] = config.bos_token_id
    pad = _settings(opened.path).get("pad_token")
    pad = pad.get("content") if isinstance(pad, dict) else pad
    if isinstance(pad, str) and (index := opened.tokenizer.token_to_id(pad)) is not None:
        ids["padding"] = index
    said: dict[str, Any] = {f"{_START}{kind}_token_id": x for kind, x in ids.items()}
    return said | {f"{_START}add_bos_token": _begins(opened.path, config.bos_token_id)}


def _begins(folder: Path, bos: int | None) -> bool:
    """Whether the tokenizer puts BOS before a text; qrot's own copy of it adds nothing."""
    path = folder / "tokenizer.json"
    if bos is None or not path.is_file():
        return False
    return Tokenizer.from_buffer(read_bytes(path, MOST_JSON)).encode("a").ids[:1] == [bos]


def _template(folder: Path) -> dict[str, Any]:
    """The chat template: a file of its own, or in the settings, where the default one counts."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return {"tokenizer.chat_template": read_text(file)}
    said = _settings(folder).get("chat_template")
    if isinstance(said, list):
        named = {x.get("name"): x.get("template") for x in said if isinstance(x, dict)}
        said = named.get("default")
    return {"tokenizer.chat_template": said} if isinstance(said, str) else {}


def _settings(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json; {} where there is none."""
    path = folder / "tokenizer_config.json"
    said = read_json(path) if path.is_file() else {}
    return said if isinstance(said, dict) else {}
