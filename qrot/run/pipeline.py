"""Merge, refresh, gate and export in one go, for a machine to call again and again.

What comes out lies in folders named by what went in, and a lock file says of both what they were;
where both are still the same nothing is done.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from rich.console import Console

import qrot
from qrot.errors import InputError, located
from qrot.export.export import export
from qrot.export.format import Options
from qrot.export.registry import FORMATS
from qrot.export.source import open_source
from qrot.files.plain import read_json, read_yaml
from qrot.files.whole import write_text
from qrot.identity import digest
from qrot.model.adapter.source import Merge
from qrot.model.io.load import open_model
from qrot.progress import Stages
from qrot.records import check_name
from qrot.run.environment import environment
from qrot.run.explain import build, check_values
from qrot.run.folder import writing
from qrot.run.gated import gated
from qrot.run.lock import entered
from qrot.run.refresh import refresh
from qrot.run.results import GATE, RESULTS, read_gate

LOCK = "pipeline.json"  # in the pipeline's folder: what went in, and what came out


@dataclass(frozen=True)
class Export:
    """One export of a pipeline; as the options of `qrot export`.

    Attributes:
        format: its name.
        scheme, group, online, weights, dtype, type: see `qrot.export.format.Options`.
        verify: whether to load it in PyTorch and compare.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    format: str
    scheme: str | None = None
    group: int | None = None
    online: bool = False
    weights: str | None = None
    dtype: str | None = None
    type: str | None = None
    verify: bool = False

    def __post_init__(self):
        check_name(self.format, FORMATS, "format")

    @property
    def options(self) -> Options:
        """What is asked of the format."""
        return Options(
            self.scheme, self.group, self.online, self.weights, self.dtype, type=self.type
        )


@dataclass(frozen=True)
class Pipeline:
    """From a run and other weights to exports that serve them.

    Attributes:
        parent: the folder of a run that learned rotations.
        model: the other weights: see `qrot.model.io.load.load`, or a base model and adapters.
        out: the folder of all that is made.
        settings: of the new run, on top of the parent's: keys of a config, such as `gate`.
        exports: of the network that the new run keeps.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    parent: str
    model: str | Merge
    out: str
    settings: dict[str, Any] = field(default_factory=dict)
    exports: tuple[Export, ...] = ()

    def __post_init__(self):
        for name in ("parent", "model", "out"):
            if getattr(self, name) == "":
                raise InputError(f"{name}: is empty")
        if len(set(self.exports)) < len(self.exports):
            raise InputError("exports: names one twice")


def read_pipeline(file: Path) -> Pipeline:
    """Read a pipeline's YAML file.

    Args:
        file: of it.

    Raises:
        InputError: in one sentence that names the key, where something in it is wrong.
    """
    settings = read_yaml(file)
    if not isinstance(settings, dict):
        raise InputError(f"{file}: expected the keys parent, model, out, settings, exports")
    with located(file):
        check_values(settings)
        return build(Pipeline, settings)


def run_pipeline(
    pipeline: Pipeline,
    console: Console,
    *,
    told: Callable[[dict[str, Any]], None] = lambda found: None,
    report: Callable[[Path], None] = lambda folder: None,
) -> tuple[dict[str, Any], bool]:
    """Do what is left to do of a pipeline.

    Called again after a kill it goes on where it stopped; where nothing changed it does nothing. If
    the gate fails nothing is exported.

    Args:
        pipeline: its settings.
        console: that progress goes to.
        told: see `qrot.run.refresh.refresh`.
        report: see `qrot.run.run.run`.

    Returns:
        The contents of the lock file, and whether anything was done.

    Raises:
        InputError: as the parts of it do.
    """
    out, began = Path(pipeline.out), time.perf_counter()
    consumed = _consumed(pipeline)
    with writing(out), entered(out):
        file = out / LOCK
        old = read_json(file) if file.exists() else None
        if isinstance(old, dict) and _is_current(old, consumed, out):
            return old, False
        key = hashlib.sha256(json.dumps(consumed, sort_keys=True).encode()).hexdigest()[:8]
        folder = out / f"run-{key}"
        overrides = list(_flat(pipeline.settings))
        refresh(
            Path(pipeline.parent),
            pipeline.model,
            folder,
            overrides,
            console,
            told=told,
            report=report,
        )
        gate = read_gate(folder / GATE)
        passed = gate is None or gate["passed"]
        exports = [_exported(out, key, folder, one, console) for one in pipeline.exports * passed]
        found = {
            "consumed": consumed,
            "gate": None if gate is None else gate["passed"],
            "run": folder.name,
            "exports": [path.name for path in exports],
            "made": _made(out, [folder / RESULTS, *_files(exports)]),
            "environment": environment(),
            "seconds": time.perf_counter() - began,
        }
        write_text(file, json.dumps(found, indent=2) + "\n")
        return found, True


def _consumed(pipeline: Pipeline) -> dict[str, Any]:
    """All that the outcome depends on."""
    parent = Path(pipeline.parent)
    source = open_source(parent)
    kept = Path(source.about["file"])
    return {
        "settings": TypeAdapter(Pipeline).dump_python(pipeline, mode="json"),
        "parent": {
            "config": digest([parent / "config.yaml"]),
            "kept": digest([kept]),
            "rotations": digest([source.rotations or kept]),
            "fingerprint": source.opened.identity.fingerprint.total,
        },
        "model": open_model(pipeline.model).identity.fingerprint.total,
        "qrot": qrot.__version__,
    }


def _is_current(old: dict[str, Any], consumed: dict[str, Any], out: Path) -> bool:
    """Whether a lock file is of the same that went in, and all that came out is as it was."""
    if old.get("consumed") != consumed:
        return False
    made = old.get("made")
    if not isinstance(made, dict) or not made:
        return False
    files = [out / name for name in made]
    return all(file.is_file() for file in files) and _made(out, files) == made


def _made(out: Path, files: list[Path]) -> dict[str, str]:
    return {str(file.relative_to(out)): digest([file]) for file in files}


def _files(folders: list[Path]) -> Iterator[Path]:
    for folder in folders:
        yield from sorted(path for path in folder.rglob("*") if path.is_file())


def _exported(out: Path, key: str, run: Path, one: Export, console: Console) -> Path:
    """An export; what is there already is whole."""
    about = hashlib.sha256(json.dumps(asdict(one), sort_keys=True).encode()).hexdigest()[:4]
    folder = out / f"{one.format}-{key}-{about}"
    if not folder.exists():
        source = gated(open_source(run), one.options)
        with Stages(console) as stages:
            export(source, folder, one.format, one.options, stages, check=one.verify)
    return folder


def _flat(settings: dict[str, Any], above: str = "") -> Iterator[str]:
    """Settings as overrides of a config: key.sub=value."""
    for name, value in settings.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}={json.dumps(value)}"
