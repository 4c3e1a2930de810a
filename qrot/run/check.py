"""Names in a configuration, and what goes together in one."""

from __future__ import annotations

from qrot.errors import InputError
from qrot.learn.starts import STARTS
from qrot.records import check_name
from qrot.run.config import RunConfig
from qrot.run.methods import METHODS
from qrot.run.track import TRACKERS


def check_names(config: RunConfig) -> None:
    """Raise InputError where a method or a tracker is not known, or lacks a key it goes with;
    and where there is nothing for the gate to judge."""
    for i, name in enumerate(config.methods):
        check_name(name, METHODS, f"methods.{i}")
    for i, name in enumerate(config.track):
        check_name(name, TRACKERS, f"track.{i}")
    for name, record in METHODS.items():
        used = name in config.methods or _starts_with_saved(config)
        if record.file and (getattr(config, record.file) is None) == used:
            raise InputError(
                f"{record.file}: a file of another run goes with the method '{name}' or a start of "
                "learning that is saved, only with them"
            )
    _check_gate(config)


def _check_gate(config: RunConfig) -> None:
    """Raise InputError where nothing would be there that the gate of a run could judge."""
    if config.gate is None:
        return
    exact = [METHODS[name].scheme is not None for name in config.methods]
    if all(exact):
        raise InputError("gate: there is no method to judge beside full precision")
    if config.keep == "none":
        raise InputError("gate: judges the network that the run keeps, and keep is none")
    if config.gate.zeroshot_drop is not None and config.zeroshot is None:
        raise InputError("gate.zeroshot_drop: goes with tasks, and zeroshot names none")
    if config.gate.zeroshot_drop is not None and not any(exact):
        raise InputError("gate.zeroshot_drop: full precision is not among the methods")


def _starts_with_saved(config: RunConfig) -> bool:
    learns = any(METHODS[name].seeds == "learn_seeds" for name in config.methods)
    return learns and STARTS[config.learn.start].given
