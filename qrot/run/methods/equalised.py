"""Equalisation: scales that make the ranges of neighbouring weights alike; no data is needed."""

from __future__ import annotations

from qrot.quantize.equalise import equalise
from qrot.run.about import keep_transform, kept_transform
from qrot.run.inputs import Inputs
from qrot.run.method import Method, Prepared


def prepare(inputs: Inputs, name: str, seed: int) -> Prepared:
    """The scales, kept in a file."""
    transform = equalise(inputs.network)
    keep_transform(inputs, RECORD.name, transform)
    return Prepared(transform)


RECORD = Method("equalised", prepare, recall=kept_transform)
