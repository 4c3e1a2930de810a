"""Checkpoints of learning: pytrees by their fields' names, with what they belong to."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int
from orbax.checkpoint import v1 as ocp

from qrot.errors import InputError
from qrot.learn.named import named_arrays, with_arrays
from qrot.learn.settings import Learn
from qrot.model.params import Network
from qrot.rotation.random import RotationSites
from qrot.rotation.transform import Transform

_KEY = "belongs_to"
_TRANSFORMS = ("transform", "best")


class State(struct.PyTreeNode):
    """Everything that a resumed run needs.

    Attributes:
        step: steps done.
        transform: what is learned.
        optimiser: its state.
        best: the transform of least held-out loss.
        best_loss: its held-out loss.
        start_loss: held-out loss before the first step.
        slowdown: factor on the learning rate, halved at each rollback.
    """

    step: Int[np.ndarray, ""]
    transform: Transform
    optimiser: Any
    best: Transform
    best_loss: Float[np.ndarray, ""]
    start_loss: Float[np.ndarray, ""]
    slowdown: Float[np.ndarray, ""]


def belonging(
    network: Network,
    tokens: Int[np.ndarray, " tokens"],
    settings: Learn,
    sites: RotationSites,
    seed: int,
    given: Transform | None = None,
) -> str:
    """A hash of all that a checkpoint depends on; of the network scheme and shapes alone.

    Args:
        network: with the scheme of the run.
        tokens: of the calibration text.
        settings: of learning.
        sites: that are rotated.
        seed: of the run.
        given: what learning starts with, where it is given.
    """
    about: dict[str, Any] = {
        "settings": asdict(settings),
        "scheme": asdict(network.scheme),
        "sites": asdict(sites),
        "seed": seed,
        "shapes": _shapes(network.params),
        "text": hashlib.sha256(np.ascontiguousarray(tokens, np.int64).tobytes()).hexdigest(),
    }
    if given is not None:
        about["given"] = {name: _digest(x) for name, x in named_arrays(given).items()}
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _digest(x: Array) -> str:
    return hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()


def _shapes(tree: Any) -> dict[str, list[int]]:
    return {
        jax.tree_util.keystr(path): list(leaf.shape)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


class Checkpoints:
    """The checkpoints in a folder, of which the last is kept."""

    def __init__(self, checkpointer: ocp.training.Checkpointer, folder: Path, key: str):
        self._checkpointer, self._folder, self._key = checkpointer, folder, key

    def save(self, state: State) -> None:
        """Save a state; raises OSError where there is no room for it."""
        saved = _plain(state)
        # Orbax writes from threads of its own, whose errors on a full disk cannot be caught.
        needed = 2 * sum(leaf.nbytes for leaf in jax.tree.leaves(saved))
        if shutil.disk_usage(self._folder.parent).free < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._folder))
        self._checkpointer.save(int(state.step), saved, custom_metadata={_KEY: self._key})

    def load(self, like: Callable[[], State]) -> State | None:
        """The state of the last checkpoint, if there is one.

        Args:
            like: makes a state of the same structure and shapes.

        Raises:
            InputError: where it belongs to something else, or is damaged.
        """
        with _readable(self._folder):
            if (latest := self._checkpointer.latest) is None:
                return None
            about = self._checkpointer.metadata(latest.step).custom_metadata
        if not isinstance(about, Mapping) or _KEY not in about:
            raise InputError(
                f"{self._folder}: these checkpoints are of an older qrot, or damaged; remove the "
                "folder to learn anew"
            )
        if about[_KEY] != self._key:
            raise InputError(
                f"{self._folder}: these checkpoints are of other settings, rotations, scheme, text "
                "or model; remove the folder to learn anew"
            )
        start = like()
        wanted = _plain(start)
        with _readable(self._folder):
            saved = self._checkpointer.load(latest.step, wanted)
        saved["optimiser"] = jax.tree.map(jnp.asarray, saved["optimiser"])
        for name in _TRANSFORMS:
            saved[name] = with_arrays(start.transform, jax.tree.map(jnp.asarray, saved[name]))
        return State(**saved)


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Turn what Orbax and the stores below it raise for a damaged file into a sentence."""
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, RuntimeError) as error:
        raise InputError(
            f"{folder}: these checkpoints are damaged; remove the folder to learn anew"
        ) from error


def _plain(state: State) -> dict[str, Any]:
    """A state as Orbax saves it: numpy arrays by name."""
    trees = {**vars(state), **{name: named_arrays(getattr(state, name)) for name in _TRANSFORMS}}
    return jax.tree.map(np.asarray, trees)


@contextmanager
def checkpoints(folder: Path, key: str) -> Iterator[Checkpoints]:
    """The checkpoints in a folder.

    Args:
        folder: of them.
        key: what they belong to, see `belonging`.

    Raises:
        InputError: where it is no folder.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: is no folder, and checkpoints are to go there; remove it")
    keep_one: Any = ocp.training.preservation_policies.LatestN(1)
    folder.mkdir(parents=True, exist_ok=True)  # what cannot be written is not damaged
    with _readable(folder):
        opened = ocp.training.Checkpointer(str(folder.absolute()), preservation_policy=keep_one)
    with opened as checkpointer:
        yield Checkpoints(checkpointer, folder, key)
