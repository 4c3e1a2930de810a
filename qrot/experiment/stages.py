"""Progress: one bar with the remaining time while a stage runs, one line when it is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

Advance = Callable[..., None]


class Stages:
    """The stages of a run, one after the other, on a console.

    Where the console is not a terminal only the lines of finished stages are printed.
    """

    def __init__(self, console: Console):
        self._bars = _Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeRemainingColumn(),
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
    def stage(
        self, name: str, total: int | None = None, *, seconds: float = 2.0
    ) -> Iterator[Advance]:
        """A stage of `total` parts; yields `advance(parts=1, note="", done=None)`.

        A stage that cannot say how far it is (total None) counts down from the `seconds` that it
        is expected to take.
        """
        began = time.monotonic()
        expected = seconds if total is None else None
        task = self._bars.add_task(name, total=total or seconds, note="", expected=expected)
        last = ""

        def advance(parts: int = 1, note: str = "", done: int | None = None) -> None:
            nonlocal last
            last = note
            how = {"advance": parts} if done is None else {"completed": done}
            self._bars.update(task, note=note, **how)

        try:
            yield advance
        finally:
            self._bars.remove_task(task)
        taken = time.monotonic() - began
        self._console.print(f"{name}: {taken:.1f} s{last and ', '}{last}", highlight=False)


class _Bars(Progress):
    def get_renderables(self):
        for task in self.tasks:
            if (expected := task.fields["expected"]) and task.elapsed is not None:
                self._count_down(task.id, task.elapsed, expected)
        yield from super().get_renderables()

    def _count_down(self, task: TaskID, elapsed: float, expected: float) -> None:
        # Past what was expected the bar waits just before its end.
        self.update(task, completed=min(elapsed, 0.98 * expected))
