"""qrot export and qrot import."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from qrot.errors import InputError
from qrot.files.whole import check_writable


def _formats() -> str:
    """The names of all formats, whose files are named like them, without importing JAX."""
    package = find_spec("qrot.export.formats")
    folders = package.submodule_search_locations if package else None
    files = [file.stem for folder in folders or () for file in Path(folder).glob("[!_]*.py")]
    return ", ".join(name.replace("_", "-") for name in sorted(files))


def export(
    source: Annotated[
        Path, typer.Argument(help="A run folder, a rotations.safetensors or a kept network.")
    ],
    out: Annotated[Path, typer.Option(help="The folder to write; not there yet.")],
    kind: Annotated[str, typer.Option("--format", help=f"One of {_formats()}.")] = "huggingface",
    scheme: Annotated[
        str | None,
        typer.Option(help="W4A16, W8A8, NVFP4, FP8 or the like in place of the run's scheme."),
    ] = None,
    group: Annotated[
        int | None, typer.Option(help="With --scheme: weights that share a scale; or a channel.")
    ] = None,
    online: Annotated[
        bool, typer.Option("--online", help="Integers with R4, as vLLM or llama.cpp reads it.")
    ] = False,
    type_: Annotated[
        str | None, typer.Option("--type", help="Of a GGUF file: q8_0, q4_0, q4_1, f16, bf16, f32.")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="Round them anew by this method: rtn, gptq or another.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; the model's own by default.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Where the model is now, if it has moved since.")
    ] = None,
    row: Annotated[
        str | None, typer.Option(help="Of the run's results, where it kept several networks.")
    ] = None,
    allow_mismatch: Annotated[
        bool, typer.Option("--allow-mismatch", help="Though it was fitted to other weights.")
    ] = False,
    ungated: Annotated[
        bool, typer.Option("--ungated", help="Though the gate of the run is against it.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Open it again and compare on 16 windows.")
    ] = False,
) -> None:
    """Write a model for PyTorch, vLLM or llama.cpp, and prove it.

    What the run kept is written as it was judged, where the format can hold it. Where it cannot,
    what differs is printed, and stands in the README of the folder.
    """
    from rich.console import Console

    from qrot.export.export import export as write
    from qrot.export.format import Options
    from qrot.export.source import open_source
    from qrot.progress import Stages
    from qrot.run.gated import gated

    check_writable(out, folder=True)
    console = Console()
    options = Options(scheme, group, online, weights, dtype, type=type_)
    opened = open_source(source, model=model, row=row, allow_mismatch=allow_mismatch)
    opened = gated(opened, options, ungated=ungated)
    os.environ["TQDM_DISABLE"] = "1"  # read when tqdm is imported: no bars between our own
    with Stages(console) as stages:
        (first, *_, last), proof = write(opened, out, kind, options, stages, check=verify)
    size = sum(path.stat().st_size for path in out.rglob("*"))
    console.print(f"{out}: {size / 1e6:,.1f} MB. {first}", highlight=False)
    console.print(last, highlight=False)
    if proof is not None:
        console.print(f"Verified: {proof}", highlight=False)


def import_(
    files: Annotated[
        list[Path],
        typer.Argument(help="An R.bin of SpinQuant's, or DartQuant's files of R1 and R2."),
    ],
    model: Annotated[str, typer.Option(help="The model that it was learned for.")],
    weight_bits: Annotated[int, typer.Option(help="Bits of the weights that it was learned with.")],
    out: Annotated[Path, typer.Option(help="The rotation file to write.")],
    online: Annotated[
        bool, typer.Option("--online/--no-online", help="With R3 and R4, which the file has not.")
    ] = True,
) -> None:
    """Turn an R.bin into a rotation file, for the method `saved` of a config.

    R.bin says neither the model nor the weights that it was learned for: you have to.
    """
    import warnings
    from dataclasses import asdict

    from qrot.export.read_spinquant import fixed_rotations, read_spinquant, same_as_spinquant
    from qrot.model.io.load import open_model
    from qrot.rotation.store import save_rotations

    check_writable(out)
    if out.exists():
        raise InputError(f"{out}: is there already; choose another --out")
    opened = open_model(model)
    file, *more = files
    transform = read_spinquant(file, opened.config, more=more, online=online)
    metadata = {
        "model": model,
        "digest": opened.identity.of_files,
        "fingerprint": asdict(opened.identity.fingerprint),
        "trained_weight_bits": weight_bits,
        "imported": file.name,
    }
    with_them = ""
    if online:
        same, with_them = same_as_spinquant(opened.config), ", with R3 and R4"
        metadata["same_as_spinquant"] = same
        if not all(same.values()):
            warnings.warn(
                f"{fixed_rotations(opened.config)} The file was learned beside its own.",
                stacklevel=1,
            )
    save_rotations(out, transform, metadata)
    print(f"{out}: R1 and R2 of {file.name}{with_them}")
