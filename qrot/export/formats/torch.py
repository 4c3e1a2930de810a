"""qrot's own PyTorch folder: the network that was judged, on its grids, with all that is online."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from qrot.export.checkpoint import write_checkpoint
from qrot.export.content import Content
from qrot.export.format import Format, Options, Plan, fitted
from qrot.export.online import MODULE, for_module_only, write_online, write_transform
from qrot.export.source import Source
from qrot.export.verify import load_with_module
from qrot.scheme import Scheme


def check(source: Source, options: Options) -> Plan:
    """The judged network, whatever it is; otherwise all that was fitted, at the run's scheme."""
    scheme, dtype = source.scheme, options.dtype or "float32"
    lines = (
        f"The network at {scheme.name}: weights hold the values on their grid; activations, keys "
        "and values are rounded by hooks.",
        "`from qrot_torch import load; model = load(FOLDER)`. Other loaders refuse it: without "
        "that module it is not this network, as its down_proj expects rotated inputs.",
    )
    if source.transform is not None:
        lines += (
            "`apply_rotations(model, 'rotations.safetensors')` of the same module does it to the "
            "original model, weights unrounded.",
        )
    exact = dtype == "float32" and scheme != replace(Scheme(), weights=scheme.weights)
    plan = partial(Plan, lines, scheme, dtype, exact=exact, shard=options.shard)
    if source.network is not None and options.weights is None:
        return plan(judged=source.network)
    return plan(transform=fitted(source))


def write(
    folder: Path, source: Source, plan: Plan, content: Content, advance: Callable[[int], None]
) -> None:
    """Write the folder; see `Format`."""
    write_checkpoint(
        folder,
        source.opened,
        content,
        dtype=plan.dtype,
        config=for_module_only,
        shard=plan.shard,
        advance=advance,
    )
    write_online(folder, source, content.online, plan.scheme)
    write_transform(folder, source)


def load(folder: Path, source: Source) -> Any:
    """What the module in the folder makes of it."""
    return load_with_module(folder, MODULE)


TORCH = Format("torch", check, write, load)
