"""The objectives of learning, one a file."""

from __future__ import annotations

from qrot.learn.objective import Objective
from qrot.records import collect

OBJECTIVES: dict[str, Objective] = collect(__name__, Objective)
