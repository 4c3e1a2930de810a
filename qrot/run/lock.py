"""One run in a folder at a time."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from qrot.errors import InputError

LOCK = ".lock"
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # of a file system that has none


def check_free(folder: Path) -> None:
    """Raise InputError where another run is in a folder, without entering it."""
    if (folder / LOCK).exists():
        with _locked_file(folder):
            pass


@contextmanager
def entered(folder: Path) -> Iterator[None]:
    """Make a folder if need be and be the only run in it.

    The lock is the kernel's: it ends with the process, however that ends.

    Raises:
        InputError: where another run is in it.
        OSError: where the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _locked_file(folder):
        try:
            yield
        finally:
            (folder / LOCK).unlink(missing_ok=True)


@contextmanager
def _locked_file(folder: Path) -> Iterator[None]:
    path = folder / LOCK
    while True:
        with open(path, "a+", opener=_no_link) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                who = file.read().strip() or "just begun"
                raise InputError(
                    f"{folder}: another run ({who}) is in it; wait for it, or choose another "
                    "folder with out="
                ) from None
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
            if not _is_still(file.fileno(), path):  # who was in it has left, and took it away
                continue
            now = datetime.now().astimezone().isoformat(timespec="seconds")
            file.truncate(0)
            file.write(f"pid {os.getpid()}, since {now}\n")
            file.flush()
            yield
            return


def _no_link(path: str, flags: int) -> int:
    """Open no file elsewhere, whose contents would be lost."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _is_still(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
