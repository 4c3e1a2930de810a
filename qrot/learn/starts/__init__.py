"""The starts of learning. Each but the drawn ones draws what it does not say, R2 to R4."""

from __future__ import annotations

from qrot.learn.start import Start
from qrot.records import collect

STARTS: dict[str, Start] = collect(__name__, Start)
