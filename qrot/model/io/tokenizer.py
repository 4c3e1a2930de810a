"""Text to token ids, with the `tokenizers` library: from a GGUF's metadata or tokenizer.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
    processors,
)

from qrot.errors import InputError, located
from qrot.files.plain import MOST_JSON, parse_json, read_bytes, short, shown

# How words are cut before BPE, by GGUF's name of it ("tokenizer.ggml.pre").
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
PRETOKENIZERS = ("smollm", "gpt-2", "llama-bpe", "qwen2")
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # GGUF's token types; the latter two are never cut
_TYPES = frozenset(range(7))
# What is read of "tokenizer.ggml.", beside ids of tokens, and what says nothing about a BPE.
_KNOWN = {
    "model",
    "pre",
    "tokens",
    "merges",
    "token_type",
    "scores",
    "token_type_count",
    "add_bos_token",
    "add_eos_token",
    "add_sep_token",
    "add_space_prefix",
    "remove_extra_whitespaces",
    "precompiled_charsmap",
}


def from_gguf(metadata: dict[str, Any]) -> Tokenizer | None:
    """The tokenizer in a GGUF's metadata; None if it is not a BPE of `PRETOKENIZERS`.

    Raises:
        InputError: if the vocabulary is damaged, or a setting is there that qrot does not know.
    """
    kind = metadata.get("tokenizer.ggml.pre")
    if metadata.get("tokenizer.ggml.model") != "gpt2" or kind not in PRETOKENIZERS:
        return None
    for key in metadata:
        first, _, rest = key.partition(".ggml.")
        if (
            first == "tokenizer"
            and rest not in _KNOWN
            and not rest.endswith(("_token_id", "_token_ids"))
        ):
            raise InputError(f"the setting {shown(key)} is not supported.")
    if not isinstance(metadata.get("tokenizer.chat_template", ""), str):
        raise InputError("tokenizer.chat_template must be text.")
    tokens: Any = metadata.get("tokenizer.ggml.tokens")
    merges: Any = metadata.get("tokenizer.ggml.merges")
    if not _strings(tokens) or not _strings(merges):
        raise InputError("tokenizer.ggml.tokens and merges must be lists of strings.")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    if not _fits(pairs, vocabulary):
        raise InputError("tokenizer.ggml.merges does not fit tokenizer.ggml.tokens.")
    types: Any = metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens) or not _TYPES.issuperset(types):
        raise InputError("tokenizer.ggml.token_type must give each token a type of 0 to 6.")
    # Llama 3 takes a word that is in the vocabulary as it is, even where no merge leads to it.
    model = models.BPE(vocabulary, pairs, ignore_merges=kind == "llama-bpe")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = _pretokenizer(kind)
    tokenizer.decoder = decoders.ByteLevel()
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    for token, token_type in zip(tokens, types, strict=True):
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

    What a file may hold beside the tokenizer for the sake of training is switched off: it would
    cut texts, fill them up, double them or draw other tokens each time.

    Raises:
        InputError: if the file cannot be read.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    content = read_bytes(path, MOST_JSON)
    with located(path):
        raw = parse_json(content)
        model = raw.get("model") if isinstance(raw, dict) else None
        if isinstance(model, dict) and "merges" in model:
            _check_merges(model)
        with _library("not a valid tokenizer"):
            tokenizer = Tokenizer.from_buffer(content)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.post_processor = processors.Sequence([])
    if isinstance(tokenizer.model, models.BPE):
        tokenizer.model.dropout = None
    return tokenizer


def _check_merges(model: dict[str, Any]) -> None:
    merges, vocabulary = model["merges"], model.get("vocab")
    prefix = model.get("continuing_subword_prefix") or ""
    if not isinstance(merges, list) or not isinstance(vocabulary, dict):
        raise InputError("model.merges must be a list, and model.vocab an object.")
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
    if isinstance(prefix, str) and all(map(_strings, pairs)) and _fits(pairs, vocabulary, prefix):
        return
    raise InputError("model.merges does not fit model.vocab.")


def _fits(pairs: list[Any], vocabulary: Mapping[str, Any], prefix: str = "") -> bool:
    """Whether all that merges join, and what comes of it, are tokens.

    `tokenizers` panics at some merges where it is not so, which no `except Exception` would catch,
    and at some it ends the process.
    """
    return all(
        len(pair) == 2
        and pair[1].startswith(prefix)
        and {*pair, pair[0] + pair[1].removeprefix(prefix)} <= vocabulary.keys()
        for pair in pairs
    )


@contextmanager
def _library(what: str) -> Iterator[None]:
    """Turn what `tokenizers` raises into an InputError."""
    try:
        yield
    except BaseException as error:
        # Exception itself, and where it panics something that is none.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"{what} ({reason})") from error


def encode(tokenizer: Tokenizer | None, text: str, vocab_size: int) -> Int32[np.ndarray, " tokens"]:
    """Token ids of `text`, with nothing added: no BOS, no EOS.

    Args:
        tokenizer: of the model.
        text: any.
        vocab_size: rows of the embedding.

    Raises:
        InputError: if there is no tokenizer, if it cannot read the text, or if it gives a token
            that the embedding has no row for.
    """
    if tokenizer is None:
        raise InputError(
            "this model comes without a tokenizer that qrot can read: a folder needs a"
            f" tokenizer.json, a GGUF file a BPE of kind {', '.join(PRETOKENIZERS)}."
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError("the text holds half a character (a lone surrogate)") from error
    with _library("the tokenizer cannot read the text"):
        ids = np.asarray(tokenizer.encode(text, add_special_tokens=False).ids, np.int64)
    if (beyond := ids[ids >= vocab_size]).size:
        token = int(beyond[0])
        raise InputError(
            f"the tokenizer gives token {token} ({short(tokenizer.id_to_token(token))}), but the"
            f" embedding has {vocab_size} rows"
        )
    return ids.astype(np.int32)
