"""qrot bench: what things cost on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from qrot.errors import InputError

_MOST = 1 << 17  # of rows, windows and their tokens; more is a slip
_Rounds = Annotated[
    int, typer.Option(min=1, max=1000, help="Counted rounds, after one of warm-up.")
]

app = typer.Typer(help="Measure what things cost on this machine.", no_args_is_help=True)


@app.callback()
def _benches() -> None:
    """Measure what things cost on this machine."""


@app.command("learn")
def bench_learn(
    model: Annotated[str, typer.Argument(help="A model, as in a config.")] = "smollm2",
    weight_bits: Annotated[int, typer.Option(help="Bits of the weights in training.")] = 16,
    batch: Annotated[int, typer.Option(min=1, max=_MOST, help="Windows in a step.")] = 2,
    length: Annotated[int, typer.Option(min=2, max=_MOST, help="Tokens in a window.")] = 512,
    rounds: _Rounds = 5,
) -> None:
    """Seconds of one learning step, part by part, and its ratio to a plain forward pass."""
    from rich.console import Console

    from qrot import bench
    from qrot.model.io.load import load
    from qrot.progress import Stages

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


@app.command("gptq")
def bench_gptq(
    model: Annotated[str, typer.Argument(help="A model, as in a config.")] = "smollm2",
    bits: Annotated[int, typer.Option(help="Bits of the weights.")] = 4,
    windows: Annotated[int, typer.Option(min=1, max=_MOST, help="Windows to calibrate on.")] = 128,
    length: Annotated[int, typer.Option(min=2, max=_MOST, help="Tokens in a window.")] = 512,
) -> None:
    """Seconds of GPTQ for a whole model: the capture of what weights read, and the solving."""
    from rich.console import Console

    from qrot import bench
    from qrot.model.io.load import load
    from qrot.progress import Stages, forward_seconds, millions

    console, loaded = Console(), load(model)
    layers = loaded.network.config.num_hidden_layers
    seconds = forward_seconds(millions(loaded.network.params), windows * length)
    with Stages(console) as stages, stages.stage("GPTQ", layers, seconds=3 * seconds) as advance:
        result = bench.bench_gptq(
            loaded, bits=bits, windows=windows, length=length, advance=advance
        )
    console.print(bench.gptq_table(result))


@app.command("kernels")
def bench_kernels(
    size: Annotated[
        int, typer.Option(min=2, max=_MOST, help="Inputs and outputs of a product, tokens cached.")
    ] = 4096,
    rows: Annotated[
        int, typer.Option(min=1, max=_MOST, help="Rows that are transformed or multiplied.")
    ] = 4096,
    rounds: _Rounds = 5,
) -> None:
    """Every kernel against what this machine can copy and multiply, in one run."""
    from rich.console import Console

    from qrot import bench
    from qrot.progress import Stages

    if size % 2:
        raise InputError("--size: it must be even")
    console, count = Console(), bench.KERNEL_FUNCTIONS * (rounds + 1)
    with Stages(console) as stages, stages.stage("measuring", count, seconds=60.0) as advance:
        result = bench.bench_kernels(size=size, rows=rows, rounds=rounds, advance=advance)
    console.print(bench.kernels_table(result))
