"""R4 in a GGUF file: llama.cpp's contract for weights whose inputs are Hadamard-transformed.

Its keys begin with `prism.hadamard.`. Before each named weight the runtime multiplies its input by
the signs of that width, then applies Sylvester's Hadamard matrix, normalised, in blocks of a power
of two: what `Hadamard.apply` does. llama.cpp b11739 follows it; versions before it do not know the
keys, and compute something else without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from qrot.errors import InputError
from qrot.files.plain import short
from qrot.model.config import ModelConfig
from qrot.rotation.forms import Hadamard

PREFIX = "prism.hadamard."
_FIXED = {
    "version": 1,
    "transform": "normalized-sylvester-walsh-hadamard",
    "axis": "input-last-dimension",
    "sign_mode": "explicit",
}
_OWN = ("block_size", "sign_widths", "sign_values", "weight_names")


def contract(down: Hadamard, layers: int) -> dict[str, Any]:
    """The metadata for R4 before down_proj of each layer.

    Args:
        down: R4, one for all layers, in blocks of a power of two.
        layers: of the model.
    """
    signs = np.asarray(down.signs).astype(int)
    own = {
        "block_size": down.block or len(signs),
        "sign_widths": [len(signs)],
        "sign_values": signs.tolist(),
        "weight_names": _names(layers),
    }
    return {PREFIX + key: value for key, value in {**_FIXED, **own}.items()}


def _names(layers: int) -> list[str]:
    return [f"blk.{i}.ffn_down.weight" for i in range(layers)]


def is_rotated(metadata: Mapping[str, Any]) -> bool:
    """Whether weights of a file read rotated inputs."""
    return any(key.startswith(PREFIX) for key in metadata)


def read_contract(metadata: Mapping[str, Any], config: ModelConfig) -> Hadamard:
    """R4 of a file that `contract` describes.

    Args:
        metadata: of a file that is rotated.
        config: of its model.

    Raises:
        InputError: where it says anything else than `contract` does.
    """
    said = {k.removeprefix(PREFIX): x for k, x in metadata.items() if k.startswith(PREFIX)}
    width, own = config.intermediate_size, {key: said.pop(key, None) for key in _OWN}
    if said != _FIXED:
        raise InputError(f"{PREFIX}* says {short(said)}; supported is {short(_FIXED)}")
    block, signs = own["block_size"], own["sign_values"]
    fine = {
        "block_size": type(block) is int
        and block > 0
        and block & (block - 1) == 0
        and width % block == 0,
        "sign_widths": own["sign_widths"] == [width],
        "sign_values": isinstance(signs, list) and len(signs) == width and {*signs} <= {1, -1},
        "weight_names": own["weight_names"] == _names(config.num_hidden_layers),
    }
    if wrong := [key for key, right in fine.items() if not right]:
        raise InputError(
            f"{PREFIX}{wrong[0]} is {short(own[wrong[0]])}, which is not that of R4 alone"
        )
    return Hadamard(jnp.asarray(signs, jnp.float32), None if block == width else block)
