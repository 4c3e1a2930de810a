"""qrot gate."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

FAILED = 3  # the exit code of a run that is above a limit


def gate(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    limits: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="Limits on top of the run's own, such as kl=0.1."
        ),
    ] = None,
) -> None:
    """Judge the network that a run kept against full precision, by limits.

    Writes gate.json, and gate.xml in the form of JUnit, into the run folder. Exits with 3 where a
    limit is not kept to.
    """
    from rich.console import Console

    from qrot.report.run import write_report
    from qrot.run.gate import gate_run
    from qrot.run.results import GATE, GATE_XML

    console = Console(markup=False)
    found = gate_run(run, limits or [], console, report=write_report)
    print_gate(found, console)
    console.print(f"{run}: {GATE}, {GATE_XML}", highlight=False)
    exit_by(found)


def print_gate(found: dict[str, Any], console: Console) -> None:
    """The verdict and the table of limits.

    Args:
        found: the contents of gate.json.
        console: to print to.
    """
    from qrot.report.gate import gate_table, gate_title

    console.print("", gate_title(found), gate_table(found), sep="\n", highlight=False)


def exit_by(found: dict[str, Any]) -> None:
    """Say which limits are not kept to, and by how much, and exit with 3 if there are any.

    Args:
        found: the contents of gate.json.
    """
    from qrot.run.verdict import failures

    if not found["passed"]:
        print(f"qrot: gate failed: {'; '.join(failures(found['limits']))}", file=sys.stderr)
        raise typer.Exit(FAILED)
