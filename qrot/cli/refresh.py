"""qrot refresh."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qrot.cli.run import quieten, show
from qrot.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from qrot.model.adapter.source import Merge


def refresh(
    run: Annotated[Path, typer.Argument(help="A run folder with learned rotations.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings on top of the run's own."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="The other weights, as in a config; or the base of --adapter."),
    ] = None,
    adapter: Annotated[
        list[str] | None, typer.Option(help="A PEFT folder to merge while loading; several add up.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The new run folder; RUN-refreshed if not given.")
    ] = None,
) -> None:
    """Carry rotations over to other weights: keep them, learn on from them, or learn them anew.

    Measures how far the outliers moved, decides by that, requantises, judges and gates.
    """
    from rich.console import Console

    from qrot.report.run import write_report
    from qrot.run.refresh import refresh as carry_over

    quieten()
    console, folder = Console(markup=False), out or run.with_name(f"{run.name}-refreshed")

    refreshed = carry_over(
        run,
        _merged(model, adapter),
        folder,
        overrides or [],
        console,
        told=partial(print_refresh, console),
        report=write_report,
    )
    show(refreshed.results, folder, console, gated=refreshed.config.gate is not None)


def print_refresh(console: Console, found: dict[str, Any]) -> None:
    """How far the outliers moved, and what follows.

    Args:
        console: to print to.
        found: the contents of refresh.json.
    """
    from qrot.report.refresh import refresh_table, refresh_title

    console.print("", refresh_title(found), refresh_table(found), sep="\n", highlight=False)


def _merged(model: str | None, adapters: list[str] | None) -> str | Merge | None:
    """The model that the options name; None for that of the settings."""
    from qrot.model.adapter.source import Merge

    if not adapters:
        return model
    if model is None:
        raise InputError("--adapter: goes with --model, the base that it is merged into")
    return Merge(model, tuple(adapters))
