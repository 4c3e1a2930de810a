"""The run folder: whose it is, and what happens when it cannot be written."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from qrot.errors import InputError, located
from qrot.files.plain import first_difference, read_yaml, readable
from qrot.files.whole import check_writable
from qrot.run.config import RunConfig, resolved
from qrot.run.lock import LOCK, check_free
from qrot.run.read import validate
from qrot.run.results import ALIGNED, REFRESH

_DEEPEST = 256  # folders in one another
_PLACES = ("", "networks/", "seed*/")  # that a run writes files to
# The same folder may be reached by another path, looked at in another way, keep more or less, and
# have other limits.
_ASIDE = dict.fromkeys(("out", "track", "keep", "gate", "refresh"))


def check_out(folder: Path, config: RunConfig) -> None:
    """Raise InputError where a run cannot enter its folder, before any work: `check_folder` refuses
    it, another run is in it, or it cannot be written. Nothing is left behind."""
    if len(folder.parts) > _DEEPEST:
        raise InputError(f"out: a path of {len(folder.parts)} folders in one another")
    check_folder(folder, config)
    with readable(folder):
        check_free(folder)
        there = folder.is_dir()
    with located("out"):
        if not there:
            check_writable(folder, folder=True)
        elif not os.access(folder, os.W_OK | os.X_OK):
            raise InputError(f"{folder}: cannot be written ({os.strerror(errno.EACCES)})")


def check_folder(folder: Path, config: RunConfig) -> None:
    """Raise InputError where a folder cannot hold this run: another run's, or no run's at all."""
    file = folder / "config.yaml"
    with located("out"), readable(folder):
        new, is_folder = not file.exists(), folder.is_dir()
        # A kill while config.yaml was written leaves a .partial behind.
        foreign = new and is_folder and any(_foreign(path) for path in folder.iterdir())
        if folder.exists() and not is_folder:
            raise InputError(f"{folder}: cannot be a run folder ({os.strerror(errno.ENOTDIR)})")
    if foreign:
        raise InputError(f"{folder}: not empty and not a run folder; choose another with out=")
    if new:
        return
    try:
        old = read_yaml(file)
        if not isinstance(old, dict):
            raise InputError("not the settings of a run")
    except InputError as error:
        reason = str(error).removeprefix(f"{file}: ")
        raise InputError(
            f"{file} is damaged ({reason}); choose another folder with out="
        ) from error
    with suppress(InputError):  # keys that the folder's qrot did not know have their defaults
        old = resolved(validate(old))
    if key := first_difference({**old, **_ASIDE}, {**resolved(config), **_ASIDE}):
        raise InputError(
            f"{folder}: belongs to a run of another config, which differs in {key}; choose another "
            "folder with out="
        )


def remove_halves(folder: Path) -> None:
    """Remove what is left of files that a killed run was writing to its folder. That folder must be
    this run's: entered, and its own."""
    for place in _PLACES:
        for half in folder.glob(f"{place}*.partial"):
            if half.is_file():  # an export beside them writes to a folder
                half.unlink(missing_ok=True)


def _foreign(path: Path) -> bool:
    return path.suffix != ".partial" and path.name not in (LOCK, REFRESH, ALIGNED)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn what goes wrong in writing into an InputError, and leave no half of a file behind."""
    full = os.strerror(errno.ENOSPC)
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError):
            file, reason = error.filename or folder, error.strerror or error
        elif full in str(error):  # Orbax and safetensors raise errors of their own for it
            file, reason = folder, full
        else:
            raise
        remove_halves(folder)
        raise InputError(f"{file}: cannot be written ({reason})") from error
