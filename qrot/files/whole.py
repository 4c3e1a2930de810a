"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path

from qrot.errors import InputError

_FRESH = 60  # seconds
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)  # of a rename onto what holds something


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield another path to write to, which takes the place of `path` once it is written.

    Args:
        path: of the file; what is there stays there until the new one is whole.

    Yields:
        A path beside it, of this block alone. The block is to write it; if the block fails the path
        is removed.

    Raises:
        OSError: with `path` as its filename, where it cannot be written.
    """
    partial = path.with_name(f"{path.name[:50]}.{secrets.token_hex(4)}.partial")
    try:
        yield partial
        partial.replace(path)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (None, str(partial), partial):
            error.filename, error.filename2 = str(path), None
        raise


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all.

    Args:
        path: of the file.
        text: its contents.

    Raises:
        OSError: where it cannot be written.
    """
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """Yield a folder beside `out` that takes its place once the block ends without an error.

    What a killed program left there of the same folder is removed first.

    Args:
        out: the folder; absent or empty.

    Yields:
        The path of a folder to fill, of this block alone.

    Raises:
        InputError: where `out` holds something, before the block or after it, or cannot be written.
    """
    partial = None
    try:
        real = _real_folder(out)
        with _parents(real), _folder_beside(real) as partial:
            yield partial
            partial.rename(real)  # in one step, and only onto a folder that is empty
    except OSError as error:
        if error.errno is None:
            raise
        file = str(error.filename or partial)
        if file == str(partial) and error.errno in _TAKEN:
            raise InputError(_is_there(out)) from error  # another program was faster
        here = file.startswith(str(partial))
        raise InputError(_unwritable(out if here else file, error)) from error


def check_writable(path: Path, *, folder: bool = False) -> None:
    """Refuse a path at which nothing could be written, before there is anything to write.

    Args:
        path: of a file that is absent or will be replaced, in a folder that is there; or of a
            folder that is absent or empty.
        folder: which of the two it is.

    Raises:
        InputError: where it is something else, or cannot be written. Nothing is left behind.
    """
    try:
        if folder:
            real = _real_folder(path)
            with _parents(real, keep=False):
                _try_out(real)
        elif path.exists() and not path.is_file():
            raise InputError(f"{path}: cannot be written (it is no file)")
        elif not path.parent.is_dir():
            raise InputError(f"{short_path(path)}: {short_path(path.parent)} is no folder")
        else:
            _try_out(path)
    except (OSError, ValueError) as error:  # ValueError: of a path with characters of no file name
        raise InputError(_unwritable(path, error)) from error


def short_path(path: object) -> str:
    """A path as a sentence has room for it."""
    text = str(path)
    return text if len(text) <= 300 else f"{text[:100]}..."


def _real_folder(out: Path) -> Path:
    """Where a folder that can be put in place by a rename comes to lie."""
    real = Path(os.path.realpath(out))
    if os.path.lexists(real) and (not real.is_dir() or any(real.iterdir())):
        raise InputError(_is_there(out))
    if Path.cwd().is_relative_to(real):
        raise InputError(f"{out}: is the folder that you are in; choose another")
    if real.is_mount():
        raise InputError(f"{out}: is a file system of its own; choose a folder in it")
    return real


def _is_there(out: Path) -> str:
    return f"{short_path(out)}: is there already; choose another --out"


def _unwritable(file: object, error: OSError | ValueError) -> str:
    reason = (error.strerror if isinstance(error, OSError) else None) or error
    return f"{short_path(file)}: cannot be written ({reason})"


def _try_out(path: Path) -> None:
    """Make something with a name as long as that of `path` beside it, and take it away again."""
    with suppress(FileNotFoundError):
        path.lstat()  # which knows what no name of a file can be
    length = max(16, len(os.fsencode(path.name)))
    probe = path.with_name(secrets.token_hex(length)[:length])
    probe.mkdir()
    probe.rmdir()


@contextmanager
def _parents(path: Path, *, keep: bool = True) -> Iterator[None]:
    """Make the folders above a path; those that were not there go again if the block fails."""
    missing = list(takewhile(lambda parent: not parent.exists(), path.parents))
    try:
        if path.parent.exists() and not path.parent.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path.parent))
        for parent in reversed(missing):  # Path.mkdir would call itself for each of them
            parent.mkdir(exist_ok=True)
        yield
    except BaseException:
        keep = False
        raise
    finally:
        for parent in missing if not keep else ():
            with suppress(OSError):  # what others have put there meanwhile stays
                parent.rmdir()


@contextmanager
def _folder_beside(real: Path) -> Iterator[Path]:
    """A folder beside another one, removed if the block fails.

    It is locked while its process lives, so that others know it from what a killed one left.
    """
    start = f".{real.name[:50]}."
    for left in real.parent.iterdir():
        if left.name.startswith(start) and left.suffix == ".partial":
            _remove_dead(left)
    partial = real.with_name(f"{start}{secrets.token_hex(4)}.partial")
    try:
        partial.mkdir()
        with _locked(partial):
            yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _remove_dead(folder: Path) -> None:
    with suppress(OSError):
        if time.time() - folder.stat().st_mtime < _FRESH:
            return  # it may be about to be locked
        with _locked(folder, always=False):
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path, *, always: bool = True) -> Iterator[None]:
    """The kernel's lock on a folder; `always`: even where the file system has no locks, where no
    one else gets one either. Raises BlockingIOError where another has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            if not always:
                raise
        yield
    finally:
        os.close(descriptor)
