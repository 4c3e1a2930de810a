"""The network rounded as it is."""

from __future__ import annotations

from qrot.run.inputs import Inputs
from qrot.run.method import Method, Prepared


def prepare(inputs: Inputs, name: str, seed: int) -> Prepared:
    """Nothing."""
    return Prepared()


RECORD = Method("no_rotation", prepare, fuses=False)
