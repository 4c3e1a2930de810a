"""What steps of the fisher objective make of `balanced`; takes a minute."""

from __future__ import annotations

from qrot.learn.start import LearnedFirst, Start

RECORD = Start(
    "fisher",
    learned=LearnedFirst(
        {
            "objective": "fisher",
            "optimiser": "cayley_muon",
            "learning_rate": 0.05,
            "schedule": "cosine",
            "batch": 64,
            "accumulate": 1,
            "evaluate_every": 20,
            "checkpoint_every": 20,
        },
        whole="balanced",
        otherwise="hadamard",
    ),
)
