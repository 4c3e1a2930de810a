"""Which model this is: a fingerprint of its weights, however they are stored.

Rotations, kept networks and exports are worth nothing on other weights than those that they were
made for, and nothing would say so: the program runs, and its answers are wrong. So each carries the
fingerprint of its model, and is compared with that of the one it meets.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from qrot.files.plain import open_file
from qrot.files.tensors import Tensor

_DIGITS = 16  # of a hash, in hex
_BLOCK = 1 << 20  # numbers that are hashed at once
SETTINGS = "config"  # the entry of a fingerprint that is no tensor's


@dataclass(frozen=True)
class Fingerprint:
    """Of a model's weights and of the settings that change its function.

    Attributes:
        total: of all of it, 16 hex digits.
        tensors: by Hugging Face's names, and that of the settings as `SETTINGS`.
    """

    total: str
    tensors: dict[str, str]


def fingerprint(settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Fingerprint:
    """The fingerprint of a model, tensor by tensor as a stream.

    It is that of the values: equal weights have an equal one in bfloat16 or float32, in one file,
    in shards, in a folder or in GGUF.

    Args:
        settings: plain values beside the tensors that change its function.
        tensors: of it, by Hugging Face's names; a tied head is not among them.
    """
    with ThreadPoolExecutor() as pool:
        found = dict(zip(tensors, pool.map(_hash, tensors.values()), strict=True))
    found[SETTINGS] = _hex(json.dumps(settings, sort_keys=True).encode())
    return Fingerprint(_hex(json.dumps(found, sort_keys=True).encode()), found)


def _hash(tensor: Tensor) -> str:
    # Half precision is widened without loss, float64 is not narrowed.
    dtype = np.float64 if tensor.dtype == np.float64 else np.float32
    total = hashlib.sha256(json.dumps(tensor.shape).encode())
    count = tensor.shape[0] if tensor.shape else 1
    step = max(1, _BLOCK // max(1, math.prod(tensor.shape[1:])))
    for start in range(0, count, step):
        block = tensor.rows(start, min(start + step, count))
        total.update(np.ascontiguousarray(block, dtype).data)
    return total.hexdigest()[:_DIGITS]


def _hex(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:_DIGITS]


def difference(of_file: Mapping[str, str], of_model: Mapping[str, str]) -> str | None:
    """Where two models differ, by the hashes of their tensors.

    Args:
        of_file: those that an artefact carries.
        of_model: those of the model that it meets.

    Returns:
        The first tensor that differs and how many do; None where none does.
    """
    apart = {name for name in {**of_model, **of_file} if of_file.get(name) != of_model.get(name)}
    if not apart:
        return None
    if apart == {SETTINGS}:
        return "the settings differ (config.json)"
    differing = apart - {SETTINGS}
    others = len(({*of_model} | {*of_file}) - {SETTINGS}) - 1
    first = min(differing, key=_by_layer)
    return f"{first} differs, and so do {len(differing) - 1} of the other {others} tensors"


def _by_layer(name: str) -> list[int | str]:
    """Sorts layer 2 before layer 10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


@dataclass(frozen=True, eq=False)
class Identity:
    """What tells a model from others; computed when it is asked for, once for each state of its
    files.

    Attributes:
        settings: plain values beside the tensors that change its function.
        tensors: of it, by Hugging Face's names.
        files: that define it.
        more: what else it depends on, such as the weights of adapters.
    """

    settings: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    files: Sequence[Path]
    more: Sequence[Any] = ()

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Of the weights."""

        def compute() -> dict[str, Any]:
            return asdict(fingerprint(self.settings, self.tensors))

        more = [*self.more, dict(self.settings)]
        return Fingerprint(**_remembered("fingerprints", self.files, more, compute))

    @cached_property
    def of_files(self) -> str:
        """sha256 of the files' bytes, 16 hex digits: the digest that artefacts of qrot 0.2 and
        before carry."""

        return digest(self.files, self.more)


def digest(files: Sequence[Path], more: Sequence[Any] = ()) -> str:
    """sha256 of the files' bytes in this order, 16 hex digits.

    Args:
        files: that are read.
        more: plain values that the digest depends on as well.

    Raises:
        InputError: for what is no file or cannot be read.
    """

    def compute() -> str:
        total = hashlib.sha256(json.dumps([*more]).encode() if more else b"")
        for path in files:
            with open_file(path) as file:
                while block := file.read(1 << 20):
                    total.update(block)
        return total.hexdigest()[:_DIGITS]

    return _remembered("digests", files, [*more], compute)


def _remembered(
    kind: str, files: Sequence[Path], more: list[Any], compute: Callable[[], Any]
) -> Any:
    """What was computed from files, kept in the user's cache.

    By path, inode, size and times of change, so that a large model is read once; `cp -p` keeps the
    time of modification, but no copy keeps the others. A cache that cannot be read or written is
    done without.
    """
    state = []
    for path in files:
        with open_file(path) as file:  # which refuses what is no file
            s = os.fstat(file.fileno())
        state.append((str(path.resolve()), s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns))
    key = json.dumps([*state, *more])
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    entry = root / "qrot" / kind / f"{hashlib.sha256(key.encode()).hexdigest()[:_DIGITS]}.json"
    try:
        known = json.loads(entry.read_text())
        if known["key"] == key:
            return known["value"]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    value = compute()
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=entry.parent, delete=False) as file:
            json.dump({"key": key, "value": value}, file)
        os.replace(file.name, entry)
    except OSError:
        pass
    return value
