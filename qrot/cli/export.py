"""qrot export and qrot import."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from qrot.errors import InputError


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

    from qrot.progress import Stages
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
    from qrot.model.io.load import open_model
    from qrot.rotation.forms import Learned
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
