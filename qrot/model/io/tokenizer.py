"""Text to token ids, with the `tokenizers` library: from a GGUF's metadata or tokenizer.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

from qrot.errors import InputError

# How words are cut before BPE, by GGUF's name of it ("tokenizer.ggml.pre").
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
PRETOKENIZERS = ("smollm", "gpt-2", "llama-bpe", "qwen2")
_CONTROL, _USER_DEFINED = 3, 4  # GGUF's token types of tokens that are never cut


def from_gguf(metadata: dict[str, Any]) -> Tokenizer | None:
    """The tokenizer in a GGUF's metadata; None if it is not a BPE of `PRETOKENIZERS`.

    Raises:
        InputError: if the vocabulary is damaged.
    """
    kind = metadata.get("tokenizer.ggml.pre")
    tokens: Any = metadata.get("tokenizer.ggml.tokens")
    merges: Any = metadata.get("tokenizer.ggml.merges")
    if metadata.get("tokenizer.ggml.model") != "gpt2" or kind not in PRETOKENIZERS:
        return None
    if not _strings(tokens) or not _strings(merges):
        raise InputError("tokenizer.ggml.tokens and merges must be lists of strings.")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    # `tokenizers` panics at some such merges, which no `except Exception` would catch.
    if not all(len(p) == 2 and {*p, "".join(p)} <= vocabulary.keys() for p in pairs):
        raise InputError("tokenizer.ggml.merges does not fit tokenizer.ggml.tokens.")
    # Llama 3 takes a word that is in the vocabulary as it is, even where no merge leads to it.
    model = models.BPE(vocabulary, pairs, ignore_merges=kind == "llama-bpe")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = _pretokenizer(kind)
    tokenizer.decoder = decoders.ByteLevel()
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    types = metadata.get("tokenizer.ggml.token_type", [])
    for token, token_type in zip(tokens, types, strict=False):
        if token_type == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif token_type == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False)])
    return tokenizer


def _strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _pretokenizer(kind: str) -> pre_tokenizers.PreTokenizer:
    if kind in ("smollm", "gpt-2"):
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, level]) if kind == "smollm" else level
    pattern = Regex(_LLAMA3 if kind == "llama-bpe" else _QWEN2)
    split = pre_tokenizers.Split(pattern, behavior="isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, level])


def from_folder(folder: Path) -> Tokenizer | None:
    """The tokenizer of a Hugging Face folder; None where there is no tokenizer.json.

    Raises:
        InputError: if the file cannot be read.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing more special
        raise InputError(f"{path} is not a valid tokenizer: {error}") from error


def encode(tokenizer: Tokenizer | None, text: str) -> Int32[np.ndarray, " tokens"]:
    """Token ids of `text`, with nothing added: no BOS, no EOS.

    Raises:
        InputError: if there is no tokenizer.
    """
    if tokenizer is None:
        raise InputError(
            "this model comes without a tokenizer that qrot can read: a folder needs a"
            f" tokenizer.json, a GGUF file a BPE of kind {', '.join(PRETOKENIZERS)}."
        )
    return np.asarray(tokenizer.encode(text, add_special_tokens=False).ids, np.int32)
