"""The command line: what is typed, what is printed, and how it exits. A file for each command."""

from __future__ import annotations

import sys
import warnings

import typer

from qrot.cli import bench, export, generate, look, run
from qrot.errors import InputError

app = typer.Typer(
    help="Rotations that make language models easy to quantise.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback()
def _commands() -> None:
    """Rotations that make language models easy to quantise."""


for command in (run.run, look.compare, look.inspect, export.export):
    app.command()(command)
app.command("import")(export.import_)
app.command()(generate.generate)
app.add_typer(bench.app, name="bench")


def main() -> None:
    """The console command: bad input is one sentence on stderr and exit code 2."""
    warnings.showwarning = lambda message, *_: print(f"qrot: warning: {message}", file=sys.stderr)
    try:
        app()
    except InputError as error:
        print(f"qrot: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
