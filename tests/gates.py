"""Tiny runs with a gate."""

from dataclasses import replace
from pathlib import Path

from runs import quiet, tiny_config

from qrot.run import gate as module
from qrot.run.limits import Gate
from qrot.run.run import run

ROTATED = ("full_precision", "no_rotation", "random_hadamard")
LOOSE = Gate(perplexity_ratio=9.0, nats=2.0, kl=9.0, kl_p99=50.0, flips=1.0)


def passing(config, **more):
    """The configuration with a gate that it passes."""
    return replace(config, methods=ROTATED, seeds=(0,), gate=LOOSE, **more)


def gated_run(tiny, path: Path) -> Path:
    """The folder of a run whose gate passed."""
    run(passing(tiny_config(tiny, path / "run")), quiet())
    return path / "run"


def measures_nothing(monkeypatch) -> None:
    """Fail where anything is measured."""

    def fail(*_, **__):
        raise AssertionError("measured again")

    for name in ("on_texts", "site_costs", "kept_network"):
        monkeypatch.setattr(module, name, fail)
