"""The command line: what is typed, what is printed, and how it exits."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer

from qrot.errors import InputError

app = typer.Typer(
    help="Rotations that make language models easy to quantise.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _commands() -> None:
    """Rotations that make language models easy to quantise."""


@app.command()
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
) -> None:
    """Measure a model at one scheme by several methods, learned rotations among them.

    A run that was interrupted goes on where it stopped.
    """
    import logging

    from rich.console import Console

    from qrot.experiment.config import PRESETS, applied, find_config, read_config
    from qrot.experiment.mixed import bits_maps
    from qrot.experiment.results import notes, table, title
    from qrot.experiment.run import run as run_config

    # Orbax logs the traceback of what it raises as well.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    console = Console()
    file = find_config(config)
    settings = read_config(file, overrides or [])
    if file.parent == PRESETS:
        console.print(f"{config}, with these settings:", applied(settings), sep="\n", markup=False)
    try:
        results = run_config(settings, console)
    except KeyboardInterrupt:
        print(f"stopped; run again to go on from {settings.out}", file=sys.stderr)
        raise typer.Exit(130) from None
    console.print("", title(results), table(results), notes(results), sep="\n", highlight=False)
    for drawn in bits_maps(results):
        console.print("", drawn, sep="\n", highlight=False)
    folder = Path(settings.out)
    files = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.suffix in _SHOWN)
    console.print(f"{folder}: {', '.join(files)}", highlight=False)


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders of them.")],
    by: Annotated[
        list[str] | None,
        typer.Option(help="A key of the config that sets rows apart, such as scheme.keys.bits."),
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="The row to compare with (its first words will do).")
    ] = None,
    kind: Annotated[str, typer.Option("--format", help="terminal, markdown or csv.")] = "terminal",
) -> None:
    """Set runs side by side: spread over seeds, differences, and which of them are real.

    Rows that differ in nothing but the seed are taken together. Runs that were measured by
    different protocols are refused.
    """
    from rich.console import Console

    from qrot.experiment import compare as module
    from qrot.experiment.results import title

    formats = {"terminal": module.terminal, "markdown": module.markdown, "csv": module.as_csv}
    if kind not in formats:
        raise InputError(f"--format: {kind!r} is not one of {', '.join(formats)}")
    found = module.read_runs(runs)
    groups = module.grouped(found, by or [])
    table = formats[kind](module.lines(groups, module.chosen(groups, against)))
    if kind == "terminal":
        everything = [row for run in found for row in run.results["rows"]]
        head = title({**found[0].results, "rows": everything})
        Console().print(head, table, module.NOTE, sep="\n", highlight=False)
    else:
        print(table, end="")


@app.command()
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

    from qrot.experiment.inspect import STEPS, tables
    from qrot.experiment.inspect import inspect as measure
    from qrot.experiment.prepare import inspected
    from qrot.experiment.results import write_text
    from qrot.experiment.stages import Stages
    from qrot.grid import Grid
    from qrot.scheme import Scheme

    if out is not None and not out.parent.is_dir():
        raise InputError(f"--out: {out.parent} is no folder")
    grid = Grid(bits, "asymmetric")
    scheme, console = Scheme(activations=grid, keys=grid, values=grid), Console()
    with Stages(console) as stages:
        loaded, rows, learned = inspected(model, rotations, text, windows, length, stages)
        with stages.stage("measuring", STEPS, seconds=60.0) as advance:
            found = measure(loaded, rows, learned, scheme, advance=advance)
    for table in tables(found, scheme):
        console.print(table, highlight=False)
    if out is not None:
        write_text(out, json.dumps(found, indent=1) + "\n")
        console.print(str(out), highlight=False)


@app.command()
def export(
    source: Annotated[Path, typer.Argument(help="A run folder, or a rotations.safetensors.")],
    out: Annotated[Path, typer.Option(help="The folder to write; not there yet.")],
    kind: Annotated[
        str,
        typer.Option("--format", help="spinquant, huggingface, compressed-tensors or torch."),
    ] = "huggingface",
    scheme: Annotated[
        str | None,
        typer.Option(help="compressed-tensors: W4A16, W8A8, W4A8 or W4A4 in place of the run's."),
    ] = None,
    group: Annotated[
        int | None, typer.Option(help="With --scheme: weights that share a scale; or a channel.")
    ] = None,
    online: Annotated[
        bool, typer.Option("--online", help="compressed-tensors: with R4, as vLLM reads it.")
    ] = False,
    weights: Annotated[
        str | None, typer.Option(help="rtn or gptq; as in the run by default.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; the model's own by default.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Where the model is now, if it has moved since.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Load it in PyTorch and compare on 16 windows.")
    ] = False,
) -> None:
    """Write a rotated model for PyTorch, and prove it there.

    spinquant: R1 and R2 as R.bin. huggingface: rotations fused, full precision, no online ones.
    compressed-tensors: integers. torch: all that was learned, with a module that runs it.
    """
    from rich.console import Console

    from qrot.experiment.stages import Stages
    from qrot.export.export import Options
    from qrot.export.export import export as write
    from qrot.export.fitted import read_fitted

    console = Console()
    options = Options(scheme, group, online, weights, dtype)
    fitted = read_fitted(source, model=model)
    os.environ["TQDM_DISABLE"] = "1"  # read when tqdm is imported: no bars between our own
    with Stages(console) as stages:
        exported, difference = write(fitted, out, kind, options, stages, check=verify)
    size = sum(path.stat().st_size for path in out.iterdir())
    console.print(f"{out}: {size / 1e6:,.1f} MB. {exported.lines[0]}", highlight=False)
    if exported.lost:
        console.print(f"Left out, as the format has no place for it: {exported.lost}.")
    if difference is not None:
        console.print(f"Verified: {difference}", highlight=False)


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="An R.bin of SpinQuant's.")],
    model: Annotated[str, typer.Option(help="The model that it was learned for.")],
    weight_bits: Annotated[int, typer.Option(help="Bits of the weights that it was learned with.")],
    out: Annotated[Path, typer.Option(help="The rotation file to write.")],
    online: Annotated[
        bool, typer.Option("--online/--no-online", help="With SpinQuant's fixed R3 and R4.")
    ] = True,
) -> None:
    """Turn an R.bin into a rotation file, for the method `saved` of a config.

    R.bin says neither the model nor the weights that it was learned for: you have to.
    """
    from qrot.export.spinquant import read_spinquant
    from qrot.model.load import open_model
    from qrot.rotation.rotations import Learned
    from qrot.rotation.store import save_rotations

    if out.exists():
        raise InputError(f"{out}: is there already; choose another --out")
    opened = open_model(model)
    rotations = read_spinquant(file, opened.config, online=online)
    metadata = {
        "model": model,
        "digest": opened.digest,
        "trained_weight_bits": weight_bits,
        "imported": file.name,
    }
    save_rotations(out, Learned(rotations), metadata)
    print(f"{out}: R1 and R2 of {file.name}" + (", with R3 and R4" if online else ""))


bench_app = typer.Typer(help="Measure what things cost on this machine.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")


@bench_app.callback()
def _benches() -> None:
    """Measure what things cost on this machine."""


@bench_app.command("learn")
def bench_learn(
    model: Annotated[str, typer.Argument(help="A model, as in a config.")] = "smollm2",
    weight_bits: Annotated[int, typer.Option(help="Bits of the weights in training.")] = 16,
    batch: Annotated[int, typer.Option(help="Windows in a step.")] = 2,
    length: Annotated[int, typer.Option(help="Tokens in a window.")] = 512,
    rounds: Annotated[int, typer.Option(help="Counted rounds, after one of warm-up.")] = 5,
) -> None:
    """Seconds of one learning step, part by part, and its ratio to a plain forward pass."""
    from rich.console import Console

    from qrot import bench
    from qrot.experiment.stages import Stages
    from qrot.model.load import load

    console = Console()
    with (
        Stages(console) as stages,
        stages.stage("measuring", bench.LEARN_FUNCTIONS * (rounds + 1), seconds=60) as advance,
    ):
        result = bench.bench_learn(
            load(model),
            weight_bits=weight_bits,
            batch=batch,
            length=length,
            rounds=rounds,
            advance=advance,
        )
    console.print(bench.learn_table(result))


@bench_app.command("gptq")
def bench_gptq(
    model: Annotated[str, typer.Argument(help="A model, as in a config.")] = "smollm2",
    bits: Annotated[int, typer.Option(help="Bits of the weights.")] = 4,
    windows: Annotated[int, typer.Option(help="Windows to calibrate on.")] = 128,
    length: Annotated[int, typer.Option(help="Tokens in a window.")] = 512,
) -> None:
    """Seconds of GPTQ for a whole model: the capture of what weights read, and the solving."""
    from rich.console import Console

    from qrot import bench
    from qrot.experiment.stages import Stages, forward_seconds
    from qrot.model.load import load

    console, loaded = Console(), load(model)
    layers, seconds = loaded.config.num_hidden_layers, forward_seconds(loaded, windows * length)
    with Stages(console) as stages, stages.stage("GPTQ", layers, seconds=3 * seconds) as advance:
        result = bench.bench_gptq(
            loaded, bits=bits, windows=windows, length=length, advance=advance
        )
    console.print(bench.gptq_table(result))


@bench_app.command("kernels")
def bench_kernels(
    size: Annotated[
        int, typer.Option(help="Inputs and outputs of a product, tokens cached.")
    ] = 4096,
    rows: Annotated[int, typer.Option(help="Rows that are transformed or multiplied.")] = 4096,
    rounds: Annotated[int, typer.Option(help="Counted rounds, after one of warm-up.")] = 5,
) -> None:
    """Every kernel against what this machine can copy and multiply, in one run."""
    from rich.console import Console

    from qrot import bench
    from qrot.experiment.stages import Stages

    if min(size, rows, rounds) < 1 or size % 2:
        raise InputError("size must be even, and size, rows and rounds positive")
    console, count = Console(), bench.KERNEL_FUNCTIONS * (rounds + 1)
    with Stages(console) as stages, stages.stage("measuring", count, seconds=60.0) as advance:
        result = bench.bench_kernels(size=size, rows=rows, rounds=rounds, advance=advance)
    console.print(bench.kernels_table(result))


_SHOWN = (".yaml", ".json", ".jsonl", ".safetensors", ".png")


def main() -> None:
    """The console command: bad input is one sentence on stderr and exit code 2."""
    warnings.showwarning = lambda message, *_: print(f"qrot: warning: {message}", file=sys.stderr)
    try:
        app()
    except InputError as error:
        print(f"qrot: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
