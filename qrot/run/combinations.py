"""Methods of a run that do not go together: known to work against each other, or wrong together."""

from __future__ import annotations

import warnings

import jax

from qrot.errors import InputError
from qrot.run.config import RunConfig
from qrot.grid import OFF
from qrot.quantize.lattice import SCALES
from qrot.rotation.forms import Learned

ROTATING = ("random_orthogonal", "random_hadamard", "random_hadamard_shift", "learned", "saved")


def warn_of_combination(config: RunConfig, saved: Learned | None) -> None:
    """Warn of methods that are known to work against each other.

    saved: the rotations of the method `saved`; it may be scales alone.
    """
    rotating = [method for method in config.methods if method in ROTATING]
    if saved is not None and not jax.tree.leaves(saved.rotations):
        rotating.remove("saved")
    if rotating and config.calibrates and config.weight_method == "awq":
        warnings.warn(
            f"weight_method: awq looks for the channels with large activations, and {rotating[0]} "
            "makes all channels alike: scales that still tell them apart fight the rotation "
            "(QuaRot, issue 25); gptq is made for rotated weights",
            stacklevel=2,
        )


def refuse_combination(config: RunConfig, saved: Learned | None) -> None:
    """Raise InputError for methods that would be wrong together.

    saved: the rotations of the method `saved`.
    """
    shifted = {
        "random_hadamard_shift": True,
        "learned": config.learn.shifts,
        "saved": saved is not None and saved.shifts is not None,
    }
    shifted = [method for method in config.methods if shifted.get(method)]
    scheme = config.scheme
    rounds = scheme.activations.on or any((o.activations or OFF) < OFF for o in scheme.overrides)
    if shifted and rounds and config.calibrates and config.weight_method == "awq":
        raise InputError(
            f"weight_method: awq scales the activations that the shifts of {shifted[0]} were "
            "measured on; round weights by another method, or leave activations at 16 bits"
        )
    if config.mixed is not None and config.weight_method == "quip_sharp":
        missing = sorted(set(config.mixed.choices) - set(SCALES) - {OFF})
        if missing:
            raise InputError(
                f"mixed.choices: quip_sharp has codebooks of {', '.join(map(str, SCALES))} bits, "
                f"none of {missing[0]}"
            )
