"""Random rotations, and the identity: see `qrot.rotation.random`."""

from __future__ import annotations

from qrot.learn.start import Start

HADAMARD = Start("hadamard", "hadamard", random=True)
ORTHOGONAL = Start("orthogonal", "orthogonal", random=True)
IDENTITY = Start("identity", "identity")
