"""What does not go together in a run: known to work against each other, or wrong together."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace

from qrot.errors import InputError
from qrot.grid import OFF
from qrot.model.params import Network
from qrot.rotation.transform import Transform
from qrot.run.config import RunConfig


def check_combinations(
    config: RunConfig, network: Network, expected: Mapping[str, Transform]
) -> None:
    """Refuse what would be wrong together, and warn of what is known to work badly.

    Args:
        config: of the run.
        network: folded, in full precision.
        expected: by method something of the kind that it puts on the network.

    Raises:
        InputError: where the weights cannot be rounded by their method.
    """
    if not config.scheme.rounds_weights:
        return
    _check_weights(config, network)
    if config.weight_method.scales_inputs:
        _check_scaled_inputs(config, expected)


def _check_weights(config: RunConfig, network: Network) -> None:
    check, scheme = config.weight_method.check, config.scheme
    check(network.replace(scheme=scheme), config.weights)
    for bits in () if config.mixed is None else config.mixed.choices:
        if bits < OFF:
            grid = replace(scheme.weights, bits=bits)
            try:
                check(network.replace(scheme=replace(scheme, weights=grid)), config.weights)
            except InputError as error:
                _, _, reason = str(error).partition(": ")  # not by the key that a scheme has for it
                raise InputError(f"mixed.choices: {reason}") from error


def _check_scaled_inputs(config: RunConfig, expected: Mapping[str, Transform]) -> None:
    method, scheme = config.weights.method, config.scheme
    shifted = next((name for name, transform in expected.items() if transform.shifts), None)
    rounds = scheme.activations.on or any((o.activations or OFF) < OFF for o in scheme.overrides)
    if shifted is not None and rounds:
        raise InputError(
            f"weights: {method} scales the activations that the shifts of {shifted} were "
            "measured on; round weights by another method, or leave activations at 16 bits"
        )
    rotating = next((name for name, transform in expected.items() if transform.rotations), None)
    if rotating is not None:
        warnings.warn(
            f"weights: {method} looks for the channels with large activations, and {rotating} "
            "makes all channels alike: scales that still tell them apart fight the rotation "
            "(QuaRot, issue 25); gptq is made for rotated weights",
            stacklevel=2,
        )
