"""Names in a configuration, and what goes together in one."""

from __future__ import annotations

from qrot.errors import InputError
from qrot.records import check_name
from qrot.run.config import RunConfig
from qrot.run.methods import METHODS
from qrot.run.track import TRACKERS


def check_names(config: RunConfig) -> None:
    """Raise InputError where a method or a tracker is not known, or lacks a key it goes with."""
    for i, name in enumerate(config.methods):
        check_name(name, METHODS, f"methods.{i}")
    for i, name in enumerate(config.track):
        check_name(name, TRACKERS, f"track.{i}")
    for name, record in METHODS.items():
        if record.file and (getattr(config, record.file) is None) == (name in config.methods):
            raise InputError(
                f"{record.file}: a file of another run goes with the method '{name}', only with it"
            )
