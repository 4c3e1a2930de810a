"""qrot run: one run, or a sweep of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from qrot.cli.gate import exit_by, print_gate
from qrot.cli.look import print_comparison
from qrot.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from qrot.run.config import RunConfig

_SHOWN = (".yaml", ".json", ".jsonl", ".safetensors", ".png", ".html", ".xml")


class _Launch(NamedTuple):
    """How the runs of a sweep are launched: so many at a time, on a cluster, with its options."""

    jobs: int | None
    cluster: str | None
    options: list[str]


def run(
    config: Annotated[
        str,
        typer.Argument(
            help="A YAML file, such as configs/demo.yaml, or a method as published: quarot, "
            "spinquant_had, spinquant_no_had, llm_int8."
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings on top, such as learn.steps=5."),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=A,B,C",
            help="A run for each of these values, in one study folder; several multiply.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what would be run and what it takes.")
    ] = False,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs of a sweep at a time; 1, or all on a cluster.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Spread a sweep by submitit: slurm, or local to try it.")
    ] = None,
    cluster_option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="For submitit, such as timeout_min=60."),
    ] = None,
) -> None:
    """Measure a model at one scheme by several methods, learned rotations among them.

    A run that was interrupted goes on where it stopped; a sweep skips what is done. Exits with 3
    where the network that is kept is above a limit of the run's gate.
    """
    from qrot.run.read import find_config

    file, overrides = find_config(config), overrides or []
    if not sweep and (jobs or cluster or cluster_option):
        raise InputError("--jobs, --cluster and --cluster-option go with --sweep")
    if sweep or dry_run:
        launch = _Launch(jobs, cluster, cluster_option or [])
        _sweep(file, overrides, sweep or [], dry_run, launch)
    else:
        _run(config, file, overrides)


def _run(name: str, file: Path, overrides: list[str]) -> None:
    """One run of a configuration that the command line has this name for."""
    from rich.console import Console

    from qrot.run.read import PRESETS, applied, read_config

    quieten()
    console, settings = Console(markup=False), read_config(file, overrides)
    if file.parent == PRESETS:
        console.print(f"{name}, with these settings:", applied(settings), sep="\n")
    folder = Path(settings.out)
    try:
        results = run_and_report(settings, console)
    except KeyboardInterrupt:
        print(f"stopped; run again to go on from {folder}", file=sys.stderr)
        raise typer.Exit(130) from None
    show(results, folder, console, gated=settings.gate is not None)


def quieten() -> None:
    """Keep Orbax from logging the traceback of what it raises as well."""
    import logging

    logging.getLogger("absl").setLevel(logging.CRITICAL)


def show(results: dict[str, Any], folder: Path, console: Console, *, gated: bool) -> None:
    """Print what a run has measured and which files it has written; exit by its gate.

    Args:
        results: the contents of results.json.
        folder: of the run.
        console: to print to.
        gated: whether the run has a gate.
    """
    from qrot.run.results import GATE, read_gate

    _show(results, console)
    gate = read_gate(folder / GATE) if gated else None
    if gate is not None:
        print_gate(gate, console)
    files = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.suffix in _SHOWN)
    console.print(f"{folder}: {', '.join(files)}", highlight=False)
    if gate is not None:
        exit_by(gate)


def run_and_report(config: RunConfig, console: Console) -> dict[str, Any]:
    """A run, and its report in its folder: all that `qrot run` writes.

    Args:
        config: of the run.
        console: that progress goes to.

    Returns:
        The contents of results.json.

    Raises:
        InputError: as `qrot.run.run.run` does, and where the report cannot be written; what is in
            the folder by then is whole.
    """
    from qrot.report.run import write_report
    from qrot.run.run import run

    return run(config, console, report=write_report)


def _show(results: dict[str, Any], console: Console) -> None:
    """The tables of a run."""
    from qrot.report.bits import bits_maps
    from qrot.report.results import notes, table, title
    from qrot.report.scores import score_table, score_title

    console.print("", title(results), table(results), notes(results), sep="\n", highlight=False)
    if "zeroshot" in results:
        console.print("", score_title(results), score_table(results), sep="\n", highlight=False)
    for drawn in bits_maps(results):
        console.print("", drawn, sep="\n", highlight=False)


def _sweep(
    file: Path, overrides: list[str], sweeps: list[str], dry_run: bool, launch: _Launch
) -> None:
    """A plan of runs, or all of them and their comparison."""
    from rich.console import Console

    from qrot.study.launch import run_sweep
    from qrot.study.sweep import estimates, plan, read_sweep

    console = Console(markup=False)
    combinations = read_sweep(file, overrides, sweeps)
    if dry_run:
        seconds, source = estimates(combinations)
        gates = dict.fromkeys(str(c.config.gate) for c in combinations if c.config.gate)
        console.print(plan(combinations, seconds), source, *gates, sep="\n", highlight=False)
        return
    study = Path(combinations[0].config.out).parent
    jobs, cluster, options = launch
    try:
        failures = run_sweep(combinations, console, jobs=jobs, cluster=cluster, options=options)
    except KeyboardInterrupt:
        print(f"stopped; run again to go on in {study}", file=sys.stderr)
        raise typer.Exit(130) from None
    try:
        print_comparison([study])
    except InputError as error:  # what was run is there, even if no table holds all of it
        print(f"qrot: no table of the study: {error}", file=sys.stderr)
    for failure in failures:
        print(f"qrot: {failure}", file=sys.stderr)
    if failures:
        raise typer.Exit(1)
