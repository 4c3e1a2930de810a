"""Records instead of names: a package's modules each hold theirs, and are found by it."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Iterable
from typing import Any, TypeVar

from qrot.errors import InputError

T = TypeVar("T")


def collect(package: str, kind: type[T]) -> dict[str, T]:
    """The records of this kind in the modules of a package, by their `name`.

    Args:
        package: its dotted name.
        kind: a class with a field `name`.
    """
    found: dict[str, Any] = {}
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        for value in vars(importlib.import_module(f"{package}.{module.name}")).values():
            if isinstance(value, kind):
                record: Any = value
                found[record.name] = record
    return found


def check_count(count: int, key: str, most: int = 1_000_000) -> None:
    """Raise InputError where there cannot be as many of something.

    Args:
        count: of it.
        key: of the configuration that it was given for.
        most: there can be.
    """
    if count < 1:
        raise InputError(f"{key}: {count} is not positive")
    if count > most:
        raise InputError(f"{key}: {count:,} is above {most:,}")


def check_name(name: str, known: Iterable[str], key: str) -> None:
    """Raise InputError where a name is not known, with the nearest one that is.

    Args:
        name: as the user gave it.
        known: the names that there are.
        key: of the configuration or the command line that it was given for.
    """
    known = list(known)
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean '{near[0]}'?" if near else f"expected one of {', '.join(known)}"
        said = repr(name) if len(name) <= 60 else f"{name[:57]!r}..."
        raise InputError(f"{key}: there is no {said}; {hint}")
