"""The network as it is, with nothing rounded."""

from __future__ import annotations

from qrot.run.inputs import Inputs
from qrot.run.method import Method, Prepared
from qrot.scheme import Scheme


def prepare(inputs: Inputs, name: str, seed: int) -> Prepared:
    """Nothing."""
    return Prepared()


RECORD = Method("full_precision", prepare, scheme=Scheme(), fuses=False)
