"""Configurations of older versions, in the form of today. Plain values: needs no JAX."""

from __future__ import annotations

from typing import Any

from qrot.errors import InputError

# Until weights were one section, `weight_method` named the method and these had its settings.
_SECTIONS = {"gptq": "gptq", "awq": "awq", "quip": "quip", "quip_sharp": "quip", "qat": "qat"}


def translated(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings with the section `weights`, where an older file has its parts elsewhere.

    Args:
        settings: as YAML has them, of today or older.

    Raises:
        InputError: where both forms are there, with what is to be written in place of the older.
    """
    older = {k: settings[k] for k in ("weight_method", *_SECTIONS.values()) if k in settings}
    if not older:
        return settings
    if "weights" in settings:
        key, value = next(iter(older.items()))
        if isinstance(value, dict):
            keys = ", ".join(f"weights.{sub}" for sub in value)
            raise InputError(f"{key}: the section weights has its settings now; write {keys}")
        raise InputError(f"{key}: the section weights names it now; write weights.method={value}")
    method = str(older.get("weight_method", "rtn"))
    name = _SECTIONS.get(method, "")
    section = older.get(name, {})
    if isinstance(section, dict) and "method" in section:
        raise InputError(f"{name}.method: weight_method names the method in this form")
    weights = {"method": method, **section} if isinstance(section, dict) else section
    return {**{k: v for k, v in settings.items() if k not in older}, "weights": weights}
