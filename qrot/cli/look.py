"""qrot compare and qrot inspect."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from qrot.errors import InputError
from qrot.files.whole import check_writable


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders of them.")],
    by: Annotated[
        list[str] | None,
        typer.Option(help="A key of the config that sets rows apart, such as scheme.keys.bits."),
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="The row to compare with (its first words will do).")
    ] = None,
    other: Annotated[bool, typer.Option("--other", help="On the other text of the runs.")] = False,
    kind: Annotated[str, typer.Option("--format", help="terminal, markdown or csv.")] = "terminal",
    report: Annotated[
        Path | None, typer.Option(help="An HTML file for figures and tables, to look at.")
    ] = None,
) -> None:
    """Set runs side by side: spread over seeds, differences, and which of them are real.

    Rows that differ in nothing but the seed are taken together. Runs that were measured by
    different protocols are refused.
    """
    print_comparison(runs, by or [], against, kind, report, other)


def print_comparison(
    runs: list[Path],
    by: Sequence[str] = (),
    against: str | None = None,
    kind: str = "terminal",
    report: Path | None = None,
    other: bool = False,
) -> None:
    """What `qrot compare` prints, and its report if one is asked for; the arguments are its own.

    Raises:
        InputError: where an argument or a run folder makes no sense.
        OSError: where the report cannot be written.
    """
    from rich.console import Console

    from qrot.report import differences
    from qrot.report.results import title
    from qrot.study.compare import chosen, grouped, read_runs, together

    formats = {
        "terminal": differences.terminal,
        "markdown": differences.markdown,
        "csv": differences.as_csv,
    }
    if kind not in formats:
        raise InputError(f"--format: {kind!r} is not one of {', '.join(formats)}")
    if report is not None:
        check_writable(report)
    found = read_runs(runs, other)
    groups = grouped(found, by)
    base = chosen(groups, against)
    table = formats[kind](differences.lines(groups, base))
    if kind == "terminal":
        head = title(together(found))
        Console(markup=False).print(head, table, differences.NOTE, sep="\n", highlight=False)
    else:
        print(table, end="")
    if report is not None:
        from qrot.report.comparison import write_comparison

        write_comparison(report, found, groups, base)
        print(report, file=sys.stderr)


def inspect(
    model: Annotated[str, typer.Argument(help="A model, as in a config.")] = "smollm2",
    rotations: Annotated[
        Path | None,
        typer.Option(help="A rotation file; a random Hadamard rotation without one."),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="A text to run; Python's reference manual without one.")
    ] = None,
    windows: Annotated[int, typer.Option(help="Windows of the text.")] = 4,
    length: Annotated[int, typer.Option(help="Tokens in a window.")] = 512,
    bits: Annotated[int, typer.Option(help="Bits of activations, keys and values.")] = 4,
    out: Annotated[Path | None, typer.Option(help="A JSON file for all the figures.")] = None,
) -> None:
    """Show where a model's outliers are, what a rotation does to them, and what rounding costs."""
    import json

    from rich.console import Console

    from qrot.files.whole import write_text
    from qrot.grid import Grid
    from qrot.progress import Stages
    from qrot.report.inspect import tables
    from qrot.run.inspect import STEPS
    from qrot.run.inspect import inspect as measure
    from qrot.run.prepare import inspected
    from qrot.scheme import Scheme

    if out is not None:
        check_writable(out)
    grid = Grid(bits, "asymmetric")
    scheme, console = Scheme(activations=grid, keys=grid, values=grid), Console()
    with Stages(console) as stages:
        loaded, rows, transform = inspected(model, rotations, text, windows, length, stages)
        loaded = loaded.replace(network=loaded.network.replace(scheme=scheme))
        with stages.stage("measuring", STEPS, seconds=60.0) as advance:
            found = measure(loaded, rows, transform, advance=advance)
    for table in tables(found, scheme.name):
        console.print(table, highlight=False)
    if out is not None:
        write_text(out, json.dumps(found, indent=1) + "\n")
        console.print(str(out), highlight=False)
