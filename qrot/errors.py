"""The one exception that means: the input is wrong, and here is how."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class InputError(Exception):
    """Bad input from the person using qrot.

    The message is one clear sentence. The command line prints it on stderr and exits with code 2;
    anything else that is raised is a fault in qrot and keeps its traceback.
    """


@contextmanager
def located(where: object) -> Iterator[None]:
    """Put `where`, such as a path, in front of the message of an InputError from inside."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
