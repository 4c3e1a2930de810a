"""A base model and adapters as one checkpoint, as transformers loads it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from qrot.export.beside import write_beside
from qrot.export.checkpoint import finite
from qrot.export.config import config_json
from qrot.export.content import as_numpy
from qrot.export.format import check_dtype
from qrot.files.tensors import write_tensors
from qrot.files.whole import whole_folder
from qrot.model.adapter.source import Merge
from qrot.model.io.assemble import MODULES
from qrot.model.io.config_json import BIASES
from qrot.model.io.load import Opened

# Of an adapter that adds tokens.
_TOKENIZER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*")


def write_merged(
    opened: Opened,
    merge: Merge,
    out: Path,
    *,
    dtype: str | None = None,
    advance: Callable[[int], None] = lambda tensors: None,
) -> None:
    """Write a folder, tensor by tensor.

    Args:
        opened: the merged model.
        merge: what it is made of.
        out: the folder, which is not there yet.
        dtype: of the tensors; each its own if None.
        advance: told of each tensor.

    Raises:
        InputError: where a number is not finite, or does not fit the dtype.
    """
    check_dtype(dtype)
    tensors = opened.identity.tensors

    def written() -> Iterator[tuple[str, np.ndarray]]:
        for name, tensor in tensors.items():
            yield name, as_numpy(tensor.view(), jnp.dtype(dtype) if dtype else tensor.dtype)
            advance(1)

    with whole_folder(out) as folder:
        write_tensors(folder, finite(written()))
        kind = dtype or next(iter(tensors.values())).dtype.name
        config = opened.config
        text = {
            **config_json(opened),
            **_biases(opened),
            "tie_word_embeddings": config.tie_word_embeddings,
            "dtype": kind,
            "torch_dtype": kind,
        }
        (folder / "config.json").write_text(json.dumps(text, indent=2) + "\n", encoding="utf-8")
        write_beside(folder, opened)
        _copy_tokenizer(folder, opened, merge)
        parts = "\n".join(f"- {a.path}, weight {a.weight:g}" for a in merge.weighted)
        said = f"# {merge}\n\n{merge.base} with, by {merge.combine}:\n\n{parts}\n"
        (folder / "README.md").write_text(said, encoding="utf-8", errors="backslashreplace")


def _biases(opened: Opened) -> dict[str, bool]:
    """The settings that say which projections have a bias."""
    tensors = opened.identity.tensors
    return {
        key: any(f"model.layers.0.{MODULES[name]}.bias" in tensors for name in names)
        for key, names in BIASES[opened.config.architecture].items()
    }


def _copy_tokenizer(folder: Path, opened: Opened, merge: Merge) -> None:
    """Take the tokenizer of an adapter that adds tokens, where it has one."""
    if not opened.grown:
        return
    for adapter in merge.weighted:
        source = Path(adapter.path).expanduser()
        for pattern in _TOKENIZER if (source / "tokenizer.json").is_file() else ():
            for file in source.glob(pattern):
                if file.is_file():
                    shutil.copyfile(file, folder / file.name)
