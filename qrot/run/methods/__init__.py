"""The methods of a run, one file each (one for all random rotations)."""

from __future__ import annotations

from qrot.records import collect
from qrot.run.method import Method

METHODS: dict[str, Method] = collect(__name__, Method)
