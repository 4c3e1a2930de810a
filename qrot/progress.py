"""Progress: one bar with the remaining time while a stage runs, one line when it is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from qrot.model.params import Model

Advance = Callable[..., None]

# What stages take on 2 cores, roughly, for their remaining time until they can tell it themselves:
# seconds per million parameters, for a forward pass also per thousand tokens.
FUSE, ROUND, FORWARD = 0.08, 0.03, 0.03


def forward_seconds(model: Model, tokens: int) -> float:
    """What a forward pass takes, roughly."""
    return FORWARD * millions(model) * tokens / 1000


def millions(model: Model) -> float:
    """Millions of parameters."""
    return sum(x.size for x in jax.tree.leaves(model.params)) / 1e6


class Stages:
    """The stages of a run, one after the other, on a console.

    Where the console is not a terminal only the lines of finished stages are printed.
    """

    def __init__(self, console: Console):
        self._bars = _Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            _Remaining(),
            TextColumn("{task.fields[note]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._console = console

    def __enter__(self) -> Stages:
        self._bars.start()
        return self

    def __exit__(self, *_) -> None:
        self._bars.stop()

    @contextmanager
    def stage(self, name: str, total: int | None = None, *, seconds: float) -> Iterator[Advance]:
        """A stage of `total` parts; yields `advance(parts=1, note="", done=None)`.

        seconds: that it may be expected to take. They count down until the first part is done, and
        to the end in a stage that cannot say how far it is (total None).
        """
        began = time.monotonic()
        task = self._bars.add_task(
            name, total=total or seconds, note="", counted=total is not None, left=seconds, at=0.0
        )
        completed, skipped, last = 0, None, ""

        def advance(parts: int = 1, note: str = "", done: int | None = None) -> None:
            nonlocal completed, skipped, last
            completed, last = completed + parts if done is None else done, note
            if skipped is None:  # a stage that goes on where it stopped starts late
                skipped = completed - parts
            at = time.monotonic() - began
            left = at / (completed - skipped) * ((total or completed) - completed)
            self._bars.update(task, completed=completed, note=note, left=left, at=at)

        try:
            yield advance
        finally:
            self._bars.remove_task(task)
        taken = time.monotonic() - began
        self._console.print(f"{name}: {taken:.1f} s{last and ', '}{last}", highlight=False)


class _Bars(Progress):
    def get_renderables(self):
        for task in self.tasks:
            if not task.fields["counted"]:  # past what was expected it waits just before the end
                expected = task.fields["left"]
                self.update(task.id, completed=min(task.elapsed or 0, 0.98 * expected))
        yield from super().get_renderables()


class _Remaining(ProgressColumn):
    """Remaining time: `left` seconds from `at` seconds on."""

    def render(self, task: Task) -> Text:
        left = task.fields["left"] + task.fields["at"] - (task.elapsed or 0)
        minutes, seconds = divmod(max(0, round(left)), 60)
        return Text(f"{minutes}:{seconds:02d}", style="progress.remaining")
