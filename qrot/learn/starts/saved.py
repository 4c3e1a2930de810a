"""What another run has fitted, and what steps of the fisher objective make of it."""

from __future__ import annotations

from qrot.learn.start import LearnedFirst, Start
from qrot.learn.starts import fisher

SAVED = Start("saved", given=True)
FISHER = Start(
    "saved_fisher", learned=LearnedFirst(fisher.STEPS, whole="saved", otherwise="saved"), given=True
)
