"""The rotary embedding that config.json describes, in either of two layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qrot.errors import InputError, located
from qrot.files.plain import short
from qrot.model.config import RopeScaling
from qrot.model.io.settings import (
    THETA,
    Settings,
    take_integer,
    take_number,
    take_object,
    take_text,
)

_THETA, _ORIGINAL = "rope_theta", "original_max_position_embeddings"
_ROTATED = "partial_rotary_factor"
_LAYOUTS = ("rope_scaling", "rope_parameters")
_NUMBERS = {  # of each kind of scaling
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


def take_rope(settings: Settings, positions: int) -> tuple[float, RopeScaling | None]:
    """Take theta and the scaling of its frequencies.

    transformers 5 writes rope_parameters, versions before it rope_theta and rope_scaling. Where a
    file has both they must agree, as each program reads the one that it knows.

    Args:
        settings: of config.json, that lose these keys.
        positions: max_position_embeddings, which Llama 3's scaling takes where it has no length of
            its own.

    Raises:
        InputError: for a scaling that is not supported, and for what contradicts itself.
    """
    old_said = "rope_scaling" in settings
    places = {f"{key}.": take_object(settings, key) for key in _LAYOUTS}
    new_said = bool(places["rope_parameters."])  # an empty one says nothing to transformers 5
    places[""] = {
        key: settings.pop(key) for key in (_THETA, _ORIGINAL, _ROTATED) if key in settings
    }
    for part in places.values():
        for key in [key for key, value in part.items() if value is None]:
            if key not in (_THETA, _ORIGINAL):
                del part[key]
    theta = _take_agreed(places, _THETA, lambda s, k: take_number(s, k, **THETA), 1e4)
    original = _take_agreed(places, _ORIGINAL, take_integer, positions)
    rotated = _take_agreed(places, _ROTATED, take_number, 1)
    if rotated != 1:
        raise InputError(f"{_ROTATED} is {rotated}, which is not supported; supported is 1.")
    old, new = (_scaling(key, places[f"{key}."], original) for key in _LAYOUTS)
    if old_said and new_said and old != new:
        raise InputError("rope_scaling and rope_parameters contradict each other.")
    return theta, old or new


def _take_agreed(
    places: dict[str, Settings], key: str, take: Callable[[Settings, str], Any], default: Any
) -> Any:
    """A setting that may stand in several places, which must say the same."""
    found: dict[str, Any] = {}
    for place, part in places.items():
        if key in part:
            name = place + key
            found[name] = take({name: part.pop(key)}, name)
    for name, value in found.items():
        first = next(iter(found))
        if value != found[first]:
            raise InputError(f"{first} is {found[first]}, but {name} is {value}.")
    return next(iter(found.values()), default)


def _scaling(layout: str, part: Settings, original: int) -> RopeScaling | None:
    with located(layout):
        kind, other = take_text(part, "rope_type"), take_text(part, "type")
        if kind and other and kind != other:
            raise InputError(f"rope_type is {short(kind)}, but type is {short(other)}.")
        kind = kind or other or "default"
        if kind not in _NUMBERS:
            raise InputError(
                f"rope scaling {short(kind)} is not supported; supported are default, linear and"
                " llama3."
            )
        if kind == "default" and part.get("factor") == 1:
            del part["factor"]
        numbers = [take_number(part, key) for key in _NUMBERS[kind]]
        if part:
            key, value = next(iter(part.items()))
            raise InputError(
                f"{key} is set to {short(value)}, which rope scaling {kind} does not have."
            )
        if kind == "llama3" and numbers[1] >= numbers[2]:
            raise InputError("low_freq_factor must be smaller than high_freq_factor.")
    if kind == "default" or numbers == [1]:
        return None
    if kind == "linear":
        return RopeScaling(kind, numbers[0])
    factor, low, high = numbers
    return RopeScaling(kind, factor, low, high, original)
