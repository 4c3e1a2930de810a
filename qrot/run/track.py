"""What a run tells while it is under way, for those who look on from elsewhere.

metrics.jsonl and results.json have all of it, always; a tracker is a view beside them. A new one is
a context manager, its record in TRACKERS, and an extra of its name in pyproject.toml.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from qrot.errors import InputError

Log = Callable[[int | None, dict[str, float]], None]  # of one row
Track = Callable[[str, int | None, Mapping[str, Any]], None]  # (row, step, values)


class Tracker(NamedTuple):
    """One tracker.

    Attributes:
        name: in a configuration, and of the extra that installs it.
        package: that it needs.
        open: (run folder, name of a row, settings of the run, first step to be told) -> a context
            manager that yields the row's `Log`.
    """

    name: str
    package: str
    open: Callable[..., AbstractContextManager[Log]]


def check_trackers(names: Sequence[str]) -> None:
    """Raise InputError, with the command that installs it, where a tracker's package is missing."""
    for name in names:
        package = TRACKERS[name].package
        if importlib.util.find_spec(package) is None:
            raise InputError(
                f"track: {name} needs the package {package}; run `pip install qrot[{name}]`"
            )


@contextmanager
def tracking(names: Sequence[str], folder: Path, settings: Mapping[str, Any]) -> Iterator[Track]:
    """Trackers of these names.

    A row is a run of its own there. A row's trackers are opened when they are first told something,
    and closed when another row begins.

    Args:
        names: of the trackers.
        folder: of the run.
        settings: of the run, for trackers that show them.

    Yields:
        `track(row, step, values)`, step being that of learning, or None for what the row came to
        in the end. Of values only the numbers with a fraction are told, those of a section as
        section/name.
    """
    opened: tuple[str | None, list[Log]] = (None, [])
    with ExitStack() as stack:

        def track(row: str, step: int | None, values: Mapping[str, Any]) -> None:
            nonlocal opened
            if row != opened[0]:
                stack.close()
                openers = [TRACKERS[name].open(folder, row, settings, step) for name in names]
                opened = (row, [stack.enter_context(opener) for opener in openers])
            for log in opened[1]:
                log(step, dict(_numbers(values)))

        yield track


def _numbers(values: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, float):
            yield section + name, value
        elif isinstance(value, Mapping):
            yield from _numbers(value, f"{section}{name}/")


@contextmanager
def _tensorboard(
    folder: Path, row: str, settings: Mapping[str, Any], step: int | None
) -> Iterator[Log]:
    """Event files in folder/tensorboard/<row>.

    step: the first that will be told; what an interrupted run told from there on is hidden.
    """
    from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]

    name = re.sub(r"[^\w.-]+", "-", row)
    path = str(folder / "tensorboard" / name)
    with SummaryWriter(path, purge_step=step, flush_secs=10) as writer:

        def log(step: int | None, values: dict[str, float]) -> None:
            for name, value in values.items():
                place = (name, value, step) if step is not None else (f"result/{name}", value, 0)
                writer.add_scalar(*place)

        yield log


@contextmanager
def _wandb(folder: Path, row: str, settings: Mapping[str, Any], step: int | None) -> Iterator[Log]:
    """A run of Weights & Biases, in the group of the run folder; WANDB_MODE=offline keeps it here.

    The same row of the same folder is the same run, so that one that was interrupted goes on.
    """
    import wandb  # pyright: ignore[reportMissingImports]

    try:
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "qrot"),
            group=folder.name,
            name=f"{folder.name}: {row}",
            id=hashlib.sha256(f"{folder.resolve()}: {row}".encode()).hexdigest()[:16],
            resume="allow",
            config=dict(settings),
            dir=str(folder),
            settings=wandb.Settings(console="off", quiet=True),
        )
    except wandb.Error as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"track: wandb does not start ({reason}); WANDB_MODE=offline needs no account"
        ) from error

    def log(step: int | None, values: dict[str, float]) -> None:
        if step is None:
            run.summary.update(values)
        else:
            run.log(values, step=step)

    with run:
        yield log


TRACKERS: dict[str, Tracker] = {
    tracker.name: tracker
    for tracker in (
        Tracker("tensorboard", "tensorboardX", _tensorboard),
        Tracker("wandb", "wandb", _wandb),
    )
}
