"""One YAML file says all about a run; what it does not say has a default."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from qrot.errors import InputError
from qrot.evaluate.perplexity import Windows
from qrot.evaluate.zeroshot import ZeroShot
from qrot.text import Data
from qrot.grid import OFF
from qrot.quantize.qat import Qat
from qrot.learn.settings import Learn
from qrot.quantize.awq import Awq
from qrot.quantize.gptq import Gptq
from qrot.calibrate.moments import Calibration
from qrot.quantize.mixed import Mixed, check_scheme
from qrot.quantize.quip import Quip
from qrot.quantize.slicegpt import SliceGpt
from qrot.quantize.smoothquant import SmoothQuant
from qrot.rotation.random import RotationSites
from qrot.scheme import Scheme

Method = Literal[
    "full_precision",
    "no_rotation",
    "random_orthogonal",
    "random_hadamard",
    "random_hadamard_shift",
    "smoothquant",
    "equalised",
    "slicegpt",
    "learned",
    "saved",
]
METHODS = (
    "full_precision",
    "no_rotation",
    "random_orthogonal",
    "random_hadamard",
    "random_hadamard_shift",
    "learned",
)
PRESETS = Path(__file__).parent / "presets"
WeightMethod = Literal["rtn", "gptq", "awq", "quip", "quip_sharp", "qat"]
Dtype = Literal["float32", "bfloat16", "float16"]
Tracker = Literal["tensorboard", "wandb"]


@dataclass(frozen=True)
class RunConfig:
    """A run: a model put through some methods at one scheme, judged on one text.

    model: see `qrot.model.io.load.load`. dtype: of the parameters; compute_dtype: of the arithmetic
      when judging.
    methods: what is done to the network, without changing its function, before it is rounded;
      `random_hadamard_shift` has the shifts that learning starts with.
    weight_method: what rounds the weights in every row: `rtn` to the nearest level, or another with
      the settings of its section; rotations are learned for weights at 16 bits then (but not for
      `qat`, which rounds to the nearest level), where learn.weight_bits does not say otherwise.
    mixed: bits of the weights by what rounding them costs, in every row, in place of one number for
      all; rotations are learned for scheme.weights.bits then. None for that number.
    calibration: what all methods but those that learn see of the calibration text.
    saved: the rotation file of the method `saved`, from another run.
    other: a text of another kind to judge by as well, so that adapting to the calibration text
      shows, in `other_count` windows; None for no such text.
    out: the run folder; runs/<name of the config file> where the file does not say.
    rotations: the sites that are rotated, by every method that rotates.
    seeds: of the random rotations; learn_seeds: of the learned ones, each learned on its own.
    evaluate: the windows of text to judge by, `batch` of them at a time.
    zeroshot: tasks to judge every row by as well; None for none.
    track: what is told of the steps of learning and of the rows, see `qrot.run.track`.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    model: str = "smollm2"
    dtype: Dtype = "float32"
    compute_dtype: Dtype = "float32"
    out: str = "runs/run"
    data: Data = field(default_factory=Data)
    other: Data | None = None
    other_count: int = 8
    scheme: Scheme = field(default_factory=Scheme)
    rotations: RotationSites = field(default_factory=RotationSites)
    methods: tuple[Method, ...] = METHODS
    saved: str | None = None
    seeds: tuple[int, ...] = (0, 1, 2)
    learn_seeds: tuple[int, ...] = (0,)
    learn: Learn = field(default_factory=Learn)
    weight_method: WeightMethod = "rtn"
    calibration: Calibration = field(default_factory=Calibration)
    gptq: Gptq = field(default_factory=Gptq)
    slicegpt: SliceGpt = field(default_factory=SliceGpt)
    awq: Awq = field(default_factory=Awq)
    smoothquant: SmoothQuant = field(default_factory=SmoothQuant)
    mixed: Mixed | None = None
    quip: Quip = field(default_factory=Quip)
    qat: Qat = field(default_factory=Qat)
    evaluate: Windows = field(default_factory=Windows)
    batch: int = 2
    zeroshot: ZeroShot | None = None
    track: tuple[Tracker, ...] = ()

    def __post_init__(self):
        for name in ("methods", "seeds", "learn_seeds"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise InputError(f"{name}: {list(values)} is empty or names one twice")
        if min(self.seeds + self.learn_seeds) < 0:
            raise InputError("seeds and learn_seeds: a seed is not negative")
        if ("saved" in self.methods) != (self.saved is not None):
            raise InputError("saved: a rotation file goes with the method 'saved', only with it")
        if self.mixed is not None:
            check_scheme(self.scheme)
        for name in ("batch", "other_count"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}: {getattr(self, name)} is not positive")

    @property
    def calibrates(self) -> bool:
        """Whether the weights are rounded by what they read."""
        return self.weight_method not in ("rtn", "qat") and self.scheme.rounds_weights

    @property
    def trained_weight_bits(self) -> int:
        """Bits of the weights that rotations are learned for."""
        if self.learn.weight_bits is not None:
            return self.learn.weight_bits
        return OFF if self.calibrates else self.scheme.weights.bits


def find_config(name: str) -> Path:
    """The file of that name, or the preset: a method as published, of those in `PRESETS`.

    Raises InputError where it is neither.
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
    settings = resolved(config)
    used = {*config.methods, config.weight_method, "learn" if "learned" in config.methods else ""}
    sections = {"learn", *get_args(Method), *get_args(WeightMethod)}
    kept = {key: value for key, value in settings.items() if key not in sections - used}
    return yaml.safe_dump(kept, sort_keys=False, default_flow_style=None)


def read_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file and put `key.sub=value` on top of it.

    Raises InputError, in one sentence that names the key, where the file cannot be read, a key is
    not known, or a value has the wrong type or is out of range.
    """
    try:
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
    """Settings as a file has them to a RunConfig; raises InputError as `read_config` does."""
    try:
        return _build(RunConfig, settings)
    except ValidationError as error:
        raise InputError(_sentence(error.errors(), settings)) from error
    except InputError:
        _blame(RunConfig, settings, ())
        raise


def read_scheme(settings: Any) -> Scheme:
    """A scheme out of a resolved configuration, or of a rotation file's metadata.

    Raises InputError as `validate` does.
    """
    return validate({"scheme": settings}).scheme


def resolved(config: RunConfig) -> dict[str, Any]:
    """The whole configuration as plain YAML values; `validate` reads it back."""
    return TypeAdapter(RunConfig).dump_python(config, mode="json")


def to_yaml(config: RunConfig) -> str:
    """The whole configuration as YAML."""
    return yaml.safe_dump(resolved(config), sort_keys=False)


def first_difference(old: Any, new: Any, where: str = "") -> str | None:
    """The first key, in dotted form, at which two resolved configurations differ."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return None if old == new else where
    for key in [*new, *(key for key in old if key not in new)]:
        here = f"{where}.{key}" if where else str(key)
        if key not in old or key not in new:
            return here
        if found := first_difference(old[key], new[key], here):
            return found
    return None


class _Loader(yaml.SafeLoader):
    """YAML 1.1 but for numbers such as 1e-3, which it would read as a string."""


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
        settings[last] = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise InputError(f"{override}: the value is not YAML") from error


def _build(kind: Any, settings: Any) -> Any:
    # As JSON, since strict Python mode would refuse lists for tuples and mappings for dataclasses.
    return TypeAdapter(kind).validate_json(json.dumps(settings, default=str), strict=True)


def _blame(kind: Any, settings: dict[str, Any], path: tuple[str, ...]) -> None:
    """Raise what the innermost faulty section raises, with the path to it in front."""
    hints = get_type_hints(kind)
    for name, value in settings.items():
        section = _section(hints.get(name))
        if is_dataclass(section) and isinstance(value, dict):
            _blame(section, value, (*path, name))
    try:
        _build(kind, settings)
    except InputError as error:
        where = "".join(f"{part}." for part in path)
        raise InputError(where + str(error).removeprefix(where)) from error
    except ValidationError:
        return  # a fault of another kind beside the one that is looked for


def _sentence(errors: list[Any], settings: Any) -> str:
    """The first error as a sentence; an unknown key goes before a wrong type."""
    errors = sorted(errors, key=lambda error: error["type"] != "unexpected_keyword_argument")
    path, kind, value = [], RunConfig, settings
    for part in errors[0]["loc"]:
        kind = _section(kind)
        if part == getattr(kind, "__name__", None):
            continue  # names a branch of a union
        if is_dataclass(kind) and isinstance(value, dict):
            known = [known.name for known in fields(kind)]
            if part not in known:
                return _unknown([*path, str(part)], known)
            kind = get_type_hints(kind)[part]
        elif get_origin(kind) is tuple and isinstance(value, list):
            kind = get_args(kind)[0]
        else:
            break  # the part names a branch of a union, not a key
        path.append(str(part))
        if isinstance(value, dict) and part not in value:
            return f"{'.'.join(path)}: this key is needed"
        value = value[part]
    sentence = f"{'.'.join(path)}: expected {_expected(kind)}, not {value!r}"
    names = [str(name) for name in get_args(kind)] if get_origin(kind) is Literal else []
    near = difflib.get_close_matches(str(value), names, 1)
    return f"{sentence}, did you mean '{near[0]}'?" if near else sentence


def _section(kind: Any) -> Any:
    """The dataclass of a section that may also be null; any other kind as it is."""
    if get_origin(kind) in (Union, UnionType):
        return next((k for k in get_args(kind) if is_dataclass(k)), kind)
    return kind


def _unknown(path: list[str], known: list[str]) -> str:
    sentence = f"unknown key '{'.'.join(path)}'"
    if near := difflib.get_close_matches(path[-1], known, 1, 0.4):
        return f"{sentence}, did you mean '{'.'.join([*path[:-1], near[0]])}'?"
    return f"{sentence}, expected one of {', '.join(known)}"


_NAMES = {
    int: "an integer",
    float: "a number",
    str: "a text",
    bool: "true or false",
    NoneType: "null",
}


def _expected(kind: Any) -> str:
    if kind in _NAMES:
        return _NAMES[kind]
    arguments = get_args(kind)
    if get_origin(kind) is Literal:
        names = [f"'{name}'" for name in arguments]
        return names[0] if len(names) == 1 else f"one of {', '.join(names)}"
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(_expected(argument) for argument in arguments)
    if get_origin(kind) is tuple:
        return "a list"
    return f"a section with keys {', '.join(known.name for known in fields(kind))}"
