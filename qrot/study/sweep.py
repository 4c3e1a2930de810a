"""A sweep: one config at every combination of some values, each a run folder in one study."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich import box
from rich.table import Table

from qrot.errors import InputError, located
from qrot.files.plain import readable
from qrot.model.adapter.source import Merge
from qrot.model.io.load import local_config
from qrot.run.config import RunConfig
from qrot.run.folder import check_folder
from qrot.run.read import read_config
from qrot.run.run import planned, results_so_far
from qrot.study.estimate import measured_ratio, millions_of, run_seconds

_LONGEST = 200  # bytes of a folder's name; file systems allow 255
_CLOSES = {"[": "]", "{": "}"}


@dataclass(frozen=True)
class Combination:
    """One run of a sweep.

    Attributes:
        name: of its folder in the study.
        swept: the values that are its own, by key, as they were typed.
        config: of the run.
        command: that runs it, in a process of its own.
        left: the methods of the rows that are not done yet, one entry a seed.
    """

    name: str
    swept: dict[str, str]
    config: RunConfig
    command: list[str]
    left: tuple[str, ...]

    @property
    def log(self) -> Path:
        """What the run printed, beside its folder."""
        return Path(self.config.out).parent / f"{self.name}.log"


def read_sweep(
    file: Path, overrides: Sequence[str], sweeps: Sequence[str]
) -> tuple[Combination, ...]:
    """All combinations of a config and some values, validated before any is run.

    The study is the config's `out`.

    Args:
        file: a configuration.
        overrides: settings on top of it, `key=value`.
        sweeps: the values, `key=a,b,c`; without any the run itself is all there is.

    Raises:
        InputError: where a combination is no valid run, two have one name, or a folder is another
            run's.
    """
    study = Path(read_config(file, overrides).out)
    with readable(study):
        run_folder = (study / "config.yaml").exists()
    if sweeps and run_folder:
        raise InputError(f"{study}: is a run folder, no study; choose another folder with out=")
    axes = [read_axis(sweep) for sweep in sweeps]
    keys = [key for key, _ in axes]
    if len(set(keys)) < len(keys):
        raise InputError(f"--sweep: {', '.join(keys)} names a key twice")
    found: dict[str, Combination] = {}
    for values in itertools.product(*(values for _, values in axes)):
        swept = dict(zip(keys, values, strict=True))
        name = _name(swept) if sweeps else study.name
        if name in found:
            raise InputError(f"--sweep: two combinations are called {name}")
        own = [f"{key}={value}" for key, value in swept.items()]
        with located(", ".join(own) or file):
            config = read_config(file, [*overrides, *own])
        config = replace(config, out=str(study / name if sweeps else study))
        check_folder(Path(config.out), config)
        others = [x for x in [*overrides, *own] if not x.startswith("out=")]
        command = run_command(file, [*others, f"out={json.dumps(config.out)}"])
        found[name] = Combination(name, swept, config, command, _left(config))
    return tuple(found.values())


def run_command(file: Path, overrides: Sequence[str]) -> list[str]:
    """`qrot run` for a process of its own, by the Python that runs this."""
    return [sys.executable, "-m", "qrot.cli", "run", str(file), *overrides]


def read_axis(sweep: str) -> tuple[str, list[str]]:
    """The key and the values of `key=a,b,c`.

    Raises:
        InputError: where it has not that form.
    """
    key, equals, text = sweep.partition("=")
    values = list(_split(text)) if equals else []
    if not key or not values or "" in values:
        raise InputError(f"--sweep '{sweep}': a sweep has the form key.sub=a,b,c")
    if key == "out":
        raise InputError("--sweep: each run has its own folder in out, which cannot be swept")
    if len(set(values)) < len(values):
        raise InputError(f"--sweep '{sweep}': a value is there twice")
    return key, values


def _split(text: str) -> Iterator[str]:
    """The parts between commas that are in no bracket, brace or quote."""
    inside, quote, start, before = [], "", 0, ","
    for i, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"" and before in ",[{:":  # elsewhere it is an apostrophe
            quote = character
        elif character in _CLOSES:
            inside.append(_CLOSES[character])
        elif inside and character == inside[-1]:
            inside.pop()
        elif character == "," and not inside:
            yield text[start:i].strip()
            start = i + 1
        if not character.isspace():
            before = character
    if inside or quote:
        raise InputError(f"--sweep: in '{text}' a {inside[-1] if inside else quote} is missing")
    yield text[start:].strip()


def _name(swept: dict[str, str]) -> str:
    """Keys with their values, in characters that a shell leaves alone."""
    parts = [f"{key}={_plain(value)}" for key, value in swept.items()]
    name = ",".join(parts)
    if len(name.encode()) <= _LONGEST:
        return name
    digest = hashlib.sha256(json.dumps(swept).encode()).hexdigest()[:8]
    return f"{name.encode()[: _LONGEST - 9].decode(errors='ignore')}~{digest}"


def _plain(value: str) -> str:
    return re.sub(r"[^\w.+-]+", "_", value).strip("_") or "_"


def _left(config: RunConfig) -> tuple[str, ...]:
    results = results_so_far(config)
    done = {(row["method"], row["seed"]) for row in results["rows"]} if results else set()
    return tuple(method for method, seed in planned(config) if (method, seed) not in done)


def estimates(combinations: Sequence[Combination]) -> tuple[list[float | None], str]:
    """What each run has left to do, by the rates of two CPU cores and what finished rows took.

    Args:
        combinations: the runs of a study.

    Returns:
        Seconds of each, None where its model would have to be fetched; and in a sentence where the
        figures come from.
    """
    models = {c.config.model: local_config(c.config.model) for c in combinations}
    ratios: dict[str | Merge, float] = {}
    sources = []
    for name, model in models.items():
        if model is None:
            sources.append(f"{name} is not on this machine, so its size is not known")
            continue
        done = [
            (c.config, results)
            for c in combinations
            if c.config.model == name and (results := results_so_far(c.config))
        ]
        source = f"{millions_of(model):,.0f} million parameters at the rates of two CPU cores"
        ratio = measured_ratio(done, model)
        if ratio is not None:
            source += f", times {ratio[0]:.2g}, which is what {ratio[1]} finished rows took"
        ratios[name] = 1.0 if ratio is None else ratio[0]
        sources.append(source)
    seconds = []
    for c in combinations:
        model = models[c.config.model]
        left = None if model is None else run_seconds(c.config, model, c.left)
        seconds.append(None if left is None else left * ratios[c.config.model])
    return seconds, f"Estimates: {'; '.join(sources)}."


def plan(combinations: Sequence[Combination], seconds: Sequence[float | None]) -> Table:
    """The runs as a table for a terminal: what differs, what is done, what it will take.

    Args:
        combinations: the runs of a study.
        seconds: of each, as `estimates` has them.
    """
    keys = list(combinations[0].swept) or ["run"]
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    shown = [name for name in ("methods", "scheme") if name not in keys]
    for name in (*keys, *shown):
        drawn.add_column(name, overflow="fold")
    for name in ("rows", "done", "s left"):
        drawn.add_column(name, justify="right", no_wrap=True)
    for c, left in zip(combinations, seconds, strict=True):
        rows = len(planned(c.config))
        about = {"methods": ", ".join(c.config.methods), "scheme": c.config.scheme.name}
        drawn.add_row(
            *(c.swept.values() or [c.name]),
            *(about[name] for name in shown),
            str(rows),
            "yes" if not c.left else str(rows - len(c.left)),
            "?" if left is None else f"{left:,.0f}",
        )
    return drawn
