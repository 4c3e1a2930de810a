"""qrot pipeline."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from qrot.cli.gate import exit_by, print_gate
from qrot.cli.refresh import print_refresh
from qrot.cli.run import quieten


def pipeline(
    config: Annotated[
        Path, typer.Argument(help="A YAML file with parent, model, out, settings and exports.")
    ],
) -> None:
    """Merge, refresh, gate and export in one go; again, it does what is left, or nothing.

    Exits with 3 where the gate fails; nothing is exported then.
    """
    from rich.console import Console

    from qrot.report.run import write_report
    from qrot.run.pipeline import LOCK, read_pipeline, run_pipeline
    from qrot.run.results import GATE, read_gate

    quieten()
    console, settings = Console(markup=False), read_pipeline(config)
    out = Path(settings.out)

    found, done = run_pipeline(
        settings, console, told=partial(print_refresh, console), report=write_report
    )
    if not done:
        console.print(f"{out}: nothing changed since {found['environment']['date']}")
    gate = read_gate(out / found["run"] / GATE)
    if gate is not None:
        print_gate(gate, console)
    names = ", ".join([found["run"], *found["exports"], LOCK])
    console.print(f"{out}: {names}", highlight=False)
    if gate is not None:
        exit_by(gate)
