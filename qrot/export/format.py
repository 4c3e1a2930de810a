"""What an export format is, and what is asked of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import jax

from qrot.errors import InputError
from qrot.export.content import Change, Content, to_nearest
from qrot.export.source import Source
from qrot.export.verify import PYTORCH, Program
from qrot.files.tensors import SHARD
from qrot.model.params import Network
from qrot.rotation.forms import Hadamard, Rotation
from qrot.rotation.transform import Transform
from qrot.scheme import Scheme
from qrot.sites import ONLINE

DTYPES = ("float32", "bfloat16", "float16")  # of --dtype


@dataclass(frozen=True)
class Options:
    """What the command line asks for beside format and folder; None for the format's own.

    Attributes:
        scheme: by name, in place of the one that was judged.
        group: weights that share a scale; a channel if None.
        online: whether rotations come along that act at run time.
        weights: the method that rounds them anew.
        dtype: of the tensors.
        shard: bytes of a file at most.
        type: of the tensors, by a name of the format's own.
    """

    scheme: str | None = None
    group: int | None = None
    online: bool = False
    weights: str | None = None
    dtype: str | None = None
    shard: int = SHARD
    type: str | None = None


@dataclass(frozen=True)
class Plan:
    """What an export is to hold, decided before anything is read, and what is said of it.

    Attributes:
        lines: for the folder's README; the first one is printed.
        scheme: the grids of what is exported.
        dtype: of the tensors.
        judged: the network that was judged, where it is what is exported; otherwise one is built.
        transform: that is fused into what is built.
        before: done to it before weights are rounded, and to the judged network.
        nearest: rounds a layer, where the method is to round to nearest.
        after: done to it at last.
        lost: what was fitted and is not in it.
        exact: whether it is compared in float64, where rounding falls the same way on both sides.
        shard: bytes of a file at most.
        type: of the tensors, by a name of the format's own; "" where it has none.
    """

    lines: tuple[str, ...]
    scheme: Scheme
    dtype: str
    judged: Network | None = None
    transform: Transform = field(default_factory=Transform)
    before: Callable[[Content], Content] = lambda content: content
    nearest: Change = to_nearest
    after: Callable[[Content], Content] = lambda content: content
    lost: str = ""
    exact: bool = False
    shard: int = SHARD
    type: str = ""


class Format(NamedTuple):
    """One format.

    Attributes:
        name: on the command line.
        check: from the source and the options to a plan; raises InputError where the format cannot
            hold what is asked for.
        write: writes what there is in a folder, told of each layer.
        load: what `program` makes of the folder.
        takes: fields of `Options` that not every format has.
        needs: packages that it takes to write it.
        proves: packages that it takes to open it.
        program: that --verify opens it by.
    """

    name: str
    check: Callable[[Source, Options], Plan]
    write: Callable[[Path, Source, Plan, Content, Callable[[int], None]], None]
    load: Callable[[Path, Source], Any]
    takes: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    proves: tuple[str, ...] = ("torch", "transformers")
    program: Program = PYTORCH


def check_dtype(dtype: str | None) -> None:
    """Raise InputError for a --dtype that no tensor is written in; None is each tensor's own."""
    if dtype not in (None, *DTYPES):
        raise InputError(f"--dtype: {dtype!r} is not one of {', '.join(DTYPES)}")


def check_options(options: Options, form: Format, formats: dict[str, Format]) -> None:
    """Raise InputError where something is asked for that only other formats take."""
    for name in (f.name for f in fields(options)):
        takers = [other.name for other in formats.values() if name in other.takes]
        if takers and form.name not in takers and getattr(options, name):
            raise InputError(f"--{name} goes with --format {', '.join(takers)} only")


def fitted(source: Source) -> Transform:
    """The transform of a source; raises InputError where only a network was kept."""
    if source.transform is None:
        raise InputError(
            f"{source.about['file']}: its weights are rounded already and no rotation file of this "
            "row is kept beside it, so that nothing can be built anew; give a rotations.safetensors"
            ", or take the network as it was judged, in a format that can hold it"
        )
    return source.transform


def offline(transform: Transform) -> Transform:
    """What the weights can hold alone: R1, R2 and scales, no online rotation."""
    rotations = {name: r for name, r in transform.rotations.items() if name not in ONLINE}
    return Transform(rotations, transform.scales)


def fixed_r4(rotation: Rotation | None, engine: str) -> Hadamard:
    """R4, as engines transform by it; raises InputError where this one has no transform for it."""
    if rotation is None:
        raise InputError("--online: these rotations have no R4")
    if not isinstance(rotation, Hadamard):
        raise InputError(
            f"{engine} runs a fixed Hadamard R4 only, not a learned one; learn with learn.online=[]"
        )
    order = rotation.block or rotation.size
    if order & (order - 1):
        raise InputError(
            f"{engine}'s Hadamard transform needs a power of two, and R4 has {order}; learn with "
            "rotations.down=128 or another power of two that divides"
        )
    return rotation


def left_out(transform: Transform | None, held: Transform) -> str:
    """What of a transform another one has not, in words; "" where that is nothing."""
    if transform is None:
        return ""
    labels = {"residual": "R1", "value": "R2", "key": "R3", "down": "R4"}
    parts = sorted(labels.get(n, n) for n in transform.rotations if n not in held.rotations)
    for label in ("shifts", "clips", "scales"):
        here, there = (getattr(x, label) for x in (transform, held))
        if jax.tree.leaves(here) and not jax.tree.leaves(there):
            parts.append({"clips": "clip ratios"}.get(label, label))
    return ", ".join(parts)
