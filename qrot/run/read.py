"""One YAML file says all about a run; what it does not say has a default."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qrot.errors import InputError, located
from qrot.files.plain import dump_yaml, parse_yaml, read_yaml, readable, short, shown
from qrot.run.check import check_names
from qrot.run.config import RunConfig, resolved
from qrot.run.explain import build, check_values
from qrot.run.methods import METHODS
from qrot.run.named import expanded
from qrot.run.older import translated
from qrot.scheme import Scheme

PRESETS = Path(__file__).parent / "presets"
_DEEPEST = 16  # sections in one another, more than there are


def find_config(name: str) -> Path:
    """The file of that name, or the preset: a method as published, of those in `PRESETS`.

    Raises:
        InputError: where it is neither.
    """
    path, preset = Path(name), PRESETS / f"{name}.yaml"
    with readable(path):
        if path.is_file() or path.suffix:
            return path
        if preset.is_file():
            return preset
    known = sorted(file.stem for file in PRESETS.glob("*.yaml"))
    near = difflib.get_close_matches(name, known, 1, 0.4)
    hint = f"did you mean '{near[0]}'?" if near else f"presets: {', '.join(known)}"
    raise InputError(f"{shown(name)}: no such file and no such preset; {hint}")


def applied(config: RunConfig) -> str:
    """The settings that count in a run, as YAML: without the sections of methods it has not."""
    used = {METHODS[name].section for name in config.methods}
    left_out = {record.section for record in METHODS.values()} - used
    kept = {key: value for key, value in resolved(config).items() if key not in left_out}
    return dump_yaml(kept, flow=None)


def read_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file and put settings on top of it.

    Args:
        path: of the file.
        overrides: settings as `key.sub=value`, each put on top of those before it; one that undoes
            another is warned of.

    Raises:
        InputError: in one sentence that names the key, where the file cannot be read, a key is not
            known, or a value has the wrong type or is out of range.
    """
    settings = read_yaml(path)
    settings = {} if settings is None else settings
    if not isinstance(settings, dict):
        raise InputError(f"{path}: expected keys with values, not {short(settings)}")
    settings = expanded(settings)
    done: dict[str, str] = {}  # overrides by their keys
    for override in overrides:
        key = _put(settings, override)
        settings = expanded(settings)
        for earlier in done:
            if earlier == key or earlier.startswith(f"{key}."):
                undone = f"{shown(override)} undoes {shown(done[earlier])} before it"
                warnings.warn(undone, stacklevel=2)
        done[key] = override
    return validate({"out": f"runs/{path.stem}", **settings})


def read_run(folder: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration of a run folder; as `read_config`.

    Args:
        folder: of a run.
        overrides: settings on top of it.

    Raises:
        InputError: also where it is no run folder.
    """
    file = folder / "config.yaml"
    with readable(file):
        there = file.is_file()
    if not there:
        raise InputError(f"{folder}: no run folder (it has no config.yaml)")
    return read_config(file, overrides)


def validate(settings: dict[str, Any]) -> RunConfig:
    """Settings as a file has them, in the form of today or an older one, to a RunConfig.

    Raises:
        InputError: as `read_config` does.
    """
    settings = expanded(translated(settings))
    check_values(settings)
    config = build(RunConfig, settings)
    check_names(config)
    return config


def read_scheme(settings: Any) -> Scheme:
    """A scheme out of a resolved configuration, or of a rotation file's metadata.

    Raises:
        InputError: as `read_config` does.
    """
    check_values(settings, "scheme")
    return build(RunConfig, {"scheme": settings}).scheme


def _put(settings: dict[str, Any], override: str) -> str:
    """Put an override on top of settings; returns its key."""
    dotted, equals, text = override.partition("=")
    *sections, last = dotted.split(".")
    if not equals or not all([*sections, last]):
        raise InputError(f"'{shown(override)}': an override has the form key.sub=value")
    if len(sections) >= _DEEPEST:
        raise InputError(f"{shown(override)}: no key is as deep")
    for i, section in enumerate(sections):
        if settings.get(section) is None:  # null stands for no section
            settings[section] = {}
        settings = settings[section]
        if not isinstance(settings, dict):
            above = ".".join(sections[: i + 1])
            raise InputError(f"{shown(override)}: {shown(above)} has no keys below it")
    with located(shown(override)):
        settings[last] = parse_yaml(text)
    return dotted
