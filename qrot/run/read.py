"""One YAML file says all about a run; what it does not say has a default."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from qrot.errors import InputError, located
from qrot.run.check import check_names
from qrot.run.config import RunConfig, resolved
from qrot.run.explain import build
from qrot.run.methods import METHODS
from qrot.run.older import translated
from qrot.scheme import Scheme

PRESETS = Path(__file__).parent / "presets"


def find_config(name: str) -> Path:
    """The file of that name, or the preset: a method as published, of those in `PRESETS`.

    Raises:
        InputError: where it is neither.
    """
    path, preset = Path(name), PRESETS / f"{name}.yaml"
    if path.is_file() or path.suffix:
        return path
    if preset.is_file():
        return preset
    known = sorted(file.stem for file in PRESETS.glob("*.yaml"))
    near = difflib.get_close_matches(name, known, 1, 0.4)
    hint = f"did you mean '{near[0]}'?" if near else f"presets: {', '.join(known)}"
    raise InputError(f"{name}: no such file and no such preset; {hint}")


def applied(config: RunConfig) -> str:
    """The settings that count in a run, as YAML: without the sections of methods it has not."""
    used = {METHODS[name].section for name in config.methods}
    left_out = {record.section for record in METHODS.values()} - used
    kept = {key: value for key, value in resolved(config).items() if key not in left_out}
    return yaml.safe_dump(kept, sort_keys=False, default_flow_style=None)


def read_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file and put settings on top of it.

    Args:
        path: of the file.
        overrides: settings as `key.sub=value`.

    Raises:
        InputError: in one sentence that names the key, where the file cannot be read, a key is not
            known, or a value has the wrong type or is out of range.
    """
    try:
        with located(path):
            settings = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path}: cannot be read ({reason})") from error
    except yaml.YAMLError as error:
        raise InputError(f"{path}: not YAML ({error})") from error
    settings = {} if settings is None else settings
    if not isinstance(settings, dict):
        raise InputError(f"{path}: expected keys with values, not {settings!r}")
    for override in overrides:
        _put(settings, override)
    return validate({"out": f"runs/{path.stem}", **settings})


def validate(settings: dict[str, Any]) -> RunConfig:
    """Settings as a file has them, in the form of today or an older one, to a RunConfig.

    Raises:
        InputError: as `read_config` does.
    """
    config = build(RunConfig, translated(settings))
    check_names(config)
    return config


def read_scheme(settings: Any) -> Scheme:
    """A scheme out of a resolved configuration, or of a rotation file's metadata.

    Raises:
        InputError: as `read_config` does.
    """
    return build(RunConfig, {"scheme": settings}).scheme


class _Loader(yaml.SafeLoader):
    """YAML 1.1 but for numbers such as 1e-3, which it would read as a string; no key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        found: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in found:
                line = key.start_mark.line + 1
                raise InputError(f"line {line}: the key '{key.value}' is there twice")
            found.add(str(key.value))
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def _put(settings: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    *sections, last = dotted.split(".")
    if not equals or not all([*sections, last]):
        raise InputError(f"'{override}': an override has the form key.sub=value")
    for i, section in enumerate(sections):
        settings = settings.setdefault(section, {})
        if not isinstance(settings, dict):
            raise InputError(f"{override}: {'.'.join(sections[: i + 1])} has no keys below it")
    try:
        with located(override):
            settings[last] = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise InputError(f"{override}: the value is not YAML") from error
