"""Random rotations: orthogonal, Hadamard, and Hadamard with the shifts learning starts with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from qrot.learn.starting_point import no_shifts
from qrot.model.config import ModelConfig
from qrot.model.params import Model
from qrot.rotation.random import random_rotations
from qrot.rotation.transform import Transform
from qrot.run.config import RunConfig
from qrot.run.inputs import Inputs
from qrot.run.method import Method, Prepared


def _method(name: str, kind: Literal["orthogonal", "hadamard"], *, shift: bool = False) -> Method:
    def random(config: RunConfig, sizes: ModelConfig, seed: int) -> Transform:
        return Transform(random_rotations(sizes, seed, kind=kind, sites=config.rotations))

    def transform(inputs: Inputs, seed: int) -> Transform:
        found = random(inputs.config, inputs.network.config, seed)
        return found.replace(shifts=inputs.shifts) if shift else found

    def prepare(inputs: Inputs, name: str, seed: int) -> Prepared:
        return Prepared(transform(inputs, seed))

    def expect(config: RunConfig, model: Model) -> Transform:
        sizes = model.network.config
        found = random(config, sizes, 0)
        return found.replace(shifts=no_shifts(sizes)) if shift else found

    def recall(inputs: Inputs, row: Mapping[str, Any]) -> Transform:
        return transform(inputs, row["seed"])

    return Method(
        name,
        prepare,
        seeds="seeds",
        text="learning" if shift else "none",
        section="learn" if shift else "",
        expect=expect,
        recall=recall,
    )


ORTHOGONAL = _method("random_orthogonal", "orthogonal")
HADAMARD = _method("random_hadamard", "hadamard")
HADAMARD_SHIFT = _method("random_hadamard_shift", "hadamard", shift=True)
