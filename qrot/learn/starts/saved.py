"""What another run has fitted."""

from __future__ import annotations

from qrot.learn.start import Start

SAVED = Start("saved", given=True)
