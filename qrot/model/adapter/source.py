"""A model that is a base model and adapters, merged while it is read."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qrot.errors import InputError
from qrot.model.adapter.combine import CombineBy, Combining
from qrot.model.adapter.merge import merged
from qrot.model.adapter.read import Adapter, read_adapter
from qrot.model.io.assemble import Stored


@dataclass(frozen=True)
class Weighted:
    """An adapter and its share.

    Attributes:
        path: of a PEFT folder.
        weight: that its update is multiplied by.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    path: str
    weight: float = 1.0


@dataclass(frozen=True)
class Merge:
    """A base model with adapters merged into it, in place of the name of a model.

    Attributes:
        base: see `qrot.model.io.load.load`.
        adapters: PEFT folders, as paths or with weights.
        combine: how several become one, see `qrot.model.adapter.combine.Combining`.
        density: with ties and dare: the share of entries that is kept.
        seed: of what dare drops.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    base: str
    adapters: tuple[str | Weighted, ...]
    combine: CombineBy = "sum"
    density: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if not self.adapters:
            raise InputError("model.adapters: names no adapter; give model the name of the base")

    @property
    def weighted(self) -> tuple[Weighted, ...]:
        """The adapters, each with a weight."""
        return tuple(Weighted(a) if isinstance(a, str) else a for a in self.adapters)

    def __str__(self) -> str:
        parts = [
            Path(a.path).name if a.weight == 1 else f"{a.weight:g} {Path(a.path).name}"
            for a in self.weighted
        ]
        by = "" if self.combine == "sum" else f" ({self.combine})"
        return " + ".join([self.base, *parts]) + by


def merge_stored(stored: Stored, merge: Merge) -> tuple[Stored, list[str]]:
    """Merge adapters into a model that is yet to be read.

    Args:
        stored: the base model.
        merge: what is merged, and how.

    Returns:
        The merged model, also yet to be read, and sentences on what is to be kept in mind.

    Raises:
        InputError: where an adapter cannot be read or is of another base model.
    """
    adapters = [read_adapter(Path(a.path).expanduser()) for a in merge.weighted]
    weights = tuple(a.weight for a in merge.weighted)
    combining = Combining(weights, merge.combine, merge.density, merge.seed)
    config, tensors = merged(stored.config, stored.tensors, adapters, combining)
    files = [a.path / name for a in adapters for name in _FILES]
    note = ", ".join(filter(None, [stored.note, "merged"]))
    found = stored._replace(
        config=config, tensors=tensors, files=[*stored.files, *files], note=note
    )
    return found, [said for adapter in adapters for said in _doubts(adapter, merge.base)]


_FILES = ("adapter_config.json", "adapter_model.safetensors")


def settings(merge: Merge) -> list[Any]:
    """What of a merge changes its weights beside the files, as JSON has it."""
    plain = asdict(merge)
    return [[a.weight for a in merge.weighted], plain["combine"], plain["density"], plain["seed"]]


def _doubts(adapter: Adapter, base: str) -> list[str]:
    """What an adapter's settings say against this base model, in sentences."""
    named = adapter.config.base_model_name_or_path
    if adapter.config.quantised_base:
        return [
            f"{adapter.path} was trained on quantised weights ({named}): merged into others it is"
            " not quite what was trained; judge what comes out"
        ]
    if named and Path(named).name.lower() != Path(base).name.lower():
        return [f"{adapter.path} was trained on {named}; that this is {base} was not checked"]
    return []
