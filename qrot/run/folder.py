"""The run folder: whose it is, and what happens when it cannot be written."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import yaml

from qrot.errors import InputError
from qrot.files import first_difference
from qrot.run.config import RunConfig, resolved
from qrot.run.lock import LOCK
from qrot.run.read import validate

# The same folder may be reached by another path, looked at in another way, and keep more or less.
_ASIDE = dict.fromkeys(("out", "track", "keep"))


def check_folder(folder: Path, config: RunConfig) -> None:
    """Raise InputError where a folder cannot hold this run: another run's, or no run's at all."""
    try:
        text = (folder / "config.yaml").read_text()
    except FileNotFoundError:
        # A kill while config.yaml was written leaves a .partial behind.
        if folder.is_dir() and any(_foreign(path) for path in folder.iterdir()):
            raise InputError(
                f"{folder}: not empty and not a run folder; choose another with out="
            ) from None
        return
    except OSError as error:
        raise InputError(f"{folder}: cannot be a run folder ({error.strerror})") from error
    try:
        old = yaml.safe_load(text)
    except yaml.YAMLError:
        old = None
    with suppress(InputError):  # keys that the folder's qrot did not know have their defaults
        old = resolved(validate(old)) if isinstance(old, dict) else None
    if not isinstance(old, dict):
        raise InputError(f"{folder}: config.yaml is damaged; choose another folder with out=")
    if key := first_difference({**old, **_ASIDE}, {**resolved(config), **_ASIDE}):
        raise InputError(
            f"{folder}: belongs to a run of another config, which differs in {key}; choose another "
            "folder with out="
        )


def _foreign(path: Path) -> bool:
    return path.suffix != ".partial" and path.name != LOCK


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
        for half in folder.rglob("*.partial"):
            half.unlink(missing_ok=True)
        raise InputError(f"{file}: cannot be written ({reason})") from error
