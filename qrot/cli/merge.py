"""qrot merge."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qrot.errors import InputError
from qrot.files.whole import check_writable


def merge(
    model: Annotated[str, typer.Argument(help="The base model, as in a config.")],
    adapters: Annotated[list[str], typer.Argument(help="PEFT folders: LoRA or DoRA.")],
    out: Annotated[Path, typer.Option(help="The folder to write; not there yet.")],
    weight: Annotated[
        list[float] | None,
        typer.Option(help="Of an adapter: give it once for each of them; 1 by default."),
    ] = None,
    combine: Annotated[
        str, typer.Option(help="How several become one: sum, linear, ties, dare_linear, dare_ties.")
    ] = "sum",
    density: Annotated[
        float, typer.Option(help="With ties and dare: the share of entries that is kept.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Of what dare drops.")] = 0,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; the model's own by default.")
    ] = None,
) -> None:
    """Merge adapters into a model, tensor by tensor, as PEFT does.

    A config merges without a copy on disk: `model: {base: MODEL, adapters: [DIR, ...]}`.
    """
    from typing import get_args

    from rich.console import Console

    from qrot.export.merged import write_merged
    from qrot.model.adapter.combine import CombineBy
    from qrot.model.adapter.source import Merge, Weighted
    from qrot.model.io.load import open_model
    from qrot.progress import Stages
    from qrot.records import check_name

    check_writable(out, folder=True)
    check_name(combine, get_args(CombineBy), "--combine")
    weights = weight or [1.0] * len(adapters)
    if len(weights) != len(adapters):
        raise InputError(f"--weight: {len(weights)} weights for {len(adapters)} adapters")
    weighted = tuple(Weighted(*pair) for pair in zip(adapters, weights, strict=True))
    merged = Merge(model, weighted, combine, density, seed)  # pyright: ignore[reportArgumentType]
    opened = open_model(merged)
    console, tensors = Console(), len(opened.identity.tensors)
    stage = "merging"
    with Stages(console) as stages, stages.stage(stage, tensors, seconds=0.1 * tensors) as advance:
        write_merged(opened, merged, out, dtype=dtype, advance=advance)
    size = sum(path.stat().st_size for path in out.iterdir())
    console.print(f"{out}: {size / 1e6:,.1f} MB. {merged}", highlight=False)
