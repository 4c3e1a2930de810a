"""Progress: one bar with the remaining time while a stage runs, one line when it is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

Advance = Callable[..., None]

# What stages take on 2 cores, roughly, for their remaining time until they can tell it themselves:
# seconds per million parameters, for a forward pass also per thousand tokens.
FUSE, ROUND, FORWARD = 0.08, 0.03, 0.03
EVERY = 30.0  # seconds at least between two lines of a stage, where there is no terminal


def forward_seconds(parameters: float, tokens: float | int) -> float:
    """What a forward pass takes, roughly.

    Args:
        parameters: of the network, in millions; see `millions`.
        tokens: that run through it.

    Returns:
        Seconds on two cores.
    """
    return FORWARD * parameters * tokens / 1000


def millions(tree: Any) -> float:
    """Millions of numbers in a tree of arrays, such as the parameters of a network."""
    return sum(x.size for x in jax.tree.leaves(tree)) / 1e6


class Stages:
    """The stages of a run, one after the other, on a console.

    A terminal shows a bar for each stage that runs. Any other console, such as a log, has a line of
    a stage that runs every half minute. Both have a line of each stage that is done.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic):
        """Stages that print to a console; `clock` tells seconds from any moment on."""
        self._bars = _Bars(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            _Remaining(),
            TextColumn("{task.fields[note]}", markup=False),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._console = console
        self._clock = clock

    def __enter__(self) -> Stages:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    @contextmanager
    def stage(
        self, name: str, total: int | None = None, *, seconds: float | int, lines: bool = True
    ) -> Iterator[Advance]:
        """A stage of `total` parts.

        Args:
            name: of the stage.
            total: its parts; None for a stage that cannot say how far it is.
            seconds: that it may be expected to take. They count down until the first part is done,
                and to the end in a stage that cannot say how far it is.
            lines: whether it has lines while it runs, where there is no terminal.

        Yields:
            `advance(parts=1, note="", done=None)`, to be called when parts are done; `done` is how
            many are in all.
        """
        began = said = self._clock()
        task = self._bars.add_task(
            name, total=total or seconds, note="", counted=total is not None, left=seconds, at=0.0
        )
        completed, skipped, last = 0, None, ""

        def advance(parts: int = 1, note: str = "", done: int | None = None) -> None:
            nonlocal completed, skipped, last, said
            completed, last = completed + parts if done is None else done, note
            if skipped is None:  # a stage that goes on where it stopped starts late
                skipped = completed - parts
            now = self._clock()
            left = (now - began) / (completed - skipped) * ((total or completed) - completed)
            self._bars.update(task, completed=completed, note=note, left=left, at=now - began)
            if lines and not self._console.is_terminal and now - said >= EVERY:
                said = now
                self._print(name, f"{completed}" + (f" of {total}" if total else ""), note, left)

        try:
            yield advance
        finally:
            self._bars.remove_task(task)
        taken = self._clock() - began
        self._say(f"{name}: {taken:.1f} s{last and ', '}{last}")

    def _print(self, name: str, parts: str, note: str, left: float) -> None:
        """The line of a stage that runs."""
        about = f"about {left:.0f} s left" if left else ""
        told = ", ".join(filter(None, [parts, note, about]))
        self._say(f"{name}: {told}")

    def _say(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False)


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
