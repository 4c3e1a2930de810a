"""The settings in a model's file, taken out one by one: of the right type and in range, or refused.

What is left once a reader has taken all that it implements is what it does not know.
"""

from __future__ import annotations

from typing import Any

from qrot.errors import InputError
from qrot.files.plain import short

Settings = dict[str, Any]
# Bounds of what both a config.json and a GGUF file say; those of a factor are the usual ones.
EPSILON = {"least": 1e-12, "most": 1.0}
THETA = {"least": 1.0, "most": 1e15}
MOST = (1 << 31) - 1  # of an integer: more is no size, and the positions of a text are 32 bits


def take_integer(
    settings: Settings,
    key: str,
    default: int | None = None,
    *,
    null: int | None = None,
    least: int = 1,
    most: int = MOST,
) -> int:
    """Take an integer.

    Args:
        settings: that lose the key.
        key: of the setting.
        default: where it is absent; None where it must not be.
        null: what a null means; None where it is refused.
        least, most: bounds.

    Raises:
        InputError: where it is missing, of another type or out of range.
    """
    value = _take(settings, key, default, null)
    if type(value) is not int or value < least:
        kind = "a positive integer" if least == 1 else f"an integer of at least {least}"
        raise InputError(f"{key} must be {kind}, not {short(value)}.")
    if value > most:
        raise InputError(f"{key} is {short(value)}; at most {most:,} is taken.")
    return value


def take_number(
    settings: Settings,
    key: str,
    default: float | None = None,
    *,
    least: float = 1e-6,
    most: float = 1e6,
) -> float:
    """Take a positive number; arguments and errors as for `take_integer`."""
    value = _take(settings, key, default)
    if type(value) not in (int, float) or not value > 0:
        raise InputError(f"{key} must be a positive number, not {short(value)}.")
    if not least <= value <= most:
        raise InputError(f"{key} is {short(value)}; {least:g} to {most:g} is taken.")
    return float(value)


def take_flag(settings: Settings, key: str, default: bool = False) -> bool:
    """Take true or false; arguments and errors as for `take_integer`."""
    value = _take(settings, key, default)
    if type(value) is not bool:
        raise InputError(f"{key} must be true or false, not {short(value)}.")
    return value


def take_text(settings: Settings, key: str) -> str | None:
    """Take a text; None where it is absent or null. Errors as for `take_integer`."""
    value = settings.pop(key, None)
    if value is not None and not isinstance(value, str):
        raise InputError(f"{key} must be text, not {short(value)}.")
    return value


def take_texts(settings: Settings, key: str) -> list[str] | None:
    """Take a list of texts; None where it is absent or null. Errors as for `take_integer`."""
    value = settings.pop(key, None)
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise InputError(f"{key} must be a list of texts, not {short(value)}.")
    return value


def take_object(settings: Settings, key: str) -> Settings:
    """Take an object, as a copy; {} where it is absent or null. Errors as for `take_integer`."""
    value = settings.pop(key, None)
    if not isinstance(value, dict | None):
        raise InputError(f"{key} must be an object, not {short(value)}.")
    return dict(value or {})


def take_tokens(
    settings: Settings, key: str, vocabulary: int, default: int | None = None
) -> tuple[int, ...]:
    """Take the ids of tokens: one, a list of them, or null for none.

    Args:
        settings: that lose the key.
        key: of the setting.
        vocabulary: how many tokens there are.
        default: where the key is absent.

    Raises:
        InputError: for anything that is no id, and for an id that is not in the vocabulary.
    """
    value = settings.pop(key, default)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if type(token) is not int or token < 0:
            raise InputError(
                f"{key} must be the id of a token or a list of ids, not {short(token)}."
            )
        if token >= vocabulary:
            raise InputError(
                f"{key} names token {short(token)}, but the vocabulary has {vocabulary}"
                f" (0 to {vocabulary - 1})."
            )
    return tuple(dict.fromkeys(ids))


def _take(settings: Settings, key: str, default: Any, null: Any = None) -> Any:
    if key not in settings and default is None:
        raise InputError(f"{key} is missing.")
    value = settings.pop(key, default)
    return null if value is None and null is not None else value
