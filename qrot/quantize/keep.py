"""Kept networks: one safetensors file from which a quantised network comes back as it was.

Weights that are integers on a symmetric grid are kept as these, 4 bits or 8, with their scales;
all others as values. The network that comes back has equal values, so that it computes the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int8
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open

from qrot.errors import InputError, located
from qrot.files import write_tensor_file
from qrot.model.config import ModelConfig
from qrot.model.params import Layers, Linear, Network, Params
from qrot.rotation.store import acting_from, acting_tensors
from qrot.rotation.transform import Online, Transform
from qrot.scheme import Scheme
from qrot.sites import PROJECTIONS, SITE_OF, SITES

FORMAT = "qrot network 1"
_ENDS = ("embed", "norm", "head")
_NORMS = ("attention_norm", "mlp_norm", "q_norm", "k_norm")
_ACTING = {kind.__name__: kind for kind in (Online, Transform)}
_STORED = {0: "weight", 4: "int4", 8: "int8"}
_DAMAGED = (
    SafetensorError,
    ValidationError,
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
)
_CONFIG, _SCHEME = TypeAdapter(ModelConfig), TypeAdapter(Scheme)


def save_network(path: Path, network: Network, about: Mapping[str, Any]) -> None:
    """Write a network to one file, which appears whole or not at all, tensor by tensor.

    Args:
        path: of the file.
        network: with weights as values, not packed.
        about: what there is to say of it, as JSON has it.
    """
    acting, forms = acting_tensors(network.online)
    header = {
        "format": FORMAT,
        "config": asdict(network.config),
        "scheme": asdict(network.scheme),
        "dtypes": {name: _linear(network, name).weight.dtype.name for name in PROJECTIONS},
        "online": {"kind": type(network.online).__name__, "forms": forms},
        "about": about,
    }

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        params, layers = network.params, network.params.layers
        yield from _there({name: getattr(params, name) for name in _ENDS})
        yield from _there({f"layers.{name}": getattr(layers, name) for name in _NORMS})
        for name in PROJECTIONS:
            yield from _linear_tensors(f"layers.{name}", _linear(network, name))
        yield from acting.items()

    write_tensor_file(path, tensors(), {key: json.dumps(value) for key, value in header.items()})


def load_network(path: Path) -> tuple[Network, dict[str, Any]]:
    """Read what `save_network` wrote: the network, and what it was saved with.

    Args:
        path: of the file.

    Raises:
        InputError: where there is none, or it is damaged or not a network of qrot's.
    """
    header = _header(path)
    try:
        with safe_open(path, "numpy") as file:
            tensors = _Tensors(file)
            params = _params(tensors, header["dtypes"])
            acting = {name: tensors.take(name) for name in sorted(tensors.left)}
        config, online = _CONFIG.validate_python(header["config"]), header["online"]
        with located(path):
            scheme = _SCHEME.validate_python(header["scheme"])
        network = Network(
            params,
            acting_from(path, acting, online["forms"], _ACTING[online["kind"]]),
            config,
            scheme,
        )
        _check_shapes(network)
    except _DAMAGED as error:
        raise InputError(f"{path}: a damaged network file ({_reason(error)})") from error
    return network, header["about"]


def read_about(path: Path) -> dict[str, Any]:
    """What a network was saved with, without the network. Raises InputError as `load_network`."""
    return _header(path)["about"]


def _header(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise InputError(f"{path}: no such network file")
    try:
        with safe_open(path, "numpy") as file:
            header = {key: json.loads(text) for key, text in (file.metadata() or {}).items()}
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"{path}: not a readable network file ({_reason(error)})") from error
    if header.get("format") != FORMAT or "about" not in header:
        raise InputError(f"{path}: not a network file of qrot")
    return header


def _reason(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _there(tensors: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    return ((name, np.asarray(x)) for name, x in tensors.items() if x is not None)


class _Tensors:
    """The tensors of an open file, each taken once."""

    def __init__(self, file: Any):
        self._file = file
        self.left = set(file.keys())

    def take(self, name: str) -> np.ndarray:
        """Raises ValueError where there is none."""
        if name not in self.left:
            raise ValueError(f"{name} is missing")
        self.left.remove(name)
        return self._file.get_tensor(name)

    def array(self, name: str) -> jax.Array:
        return jnp.asarray(self.take(name))

    def optional(self, name: str) -> jax.Array | None:
        return self.array(name) if name in self.left else None


def _params(tensors: _Tensors, dtypes: Mapping[str, str]) -> Params:
    linears = {name: _read_linear(tensors, f"layers.{name}", dtypes[name]) for name in PROJECTIONS}
    layers = Layers(
        attention_norm=tensors.array("layers.attention_norm"),
        mlp_norm=tensors.array("layers.mlp_norm"),
        q_norm=tensors.optional("layers.q_norm"),
        k_norm=tensors.optional("layers.k_norm"),
        **linears,
    )
    head = tensors.optional("head")
    return Params(tensors.array("embed"), layers, tensors.array("norm"), head)


def _read_linear(tensors: _Tensors, name: str, dtype: str) -> Linear:
    bias, scale = tensors.optional(f"{name}.bias"), tensors.optional(f"{name}.scale")
    if scale is None:
        return Linear(tensors.array(f"{name}.weight"), bias)
    widths = tensors.take(f"{name}.widths")
    stacks = {
        width: iter(tensors.take(f"{name}.{kind}"))
        for width, kind in _STORED.items()
        if width in widths
    }
    weights = []
    for width, steps in zip(widths, np.asarray(scale), strict=True):
        stored = next(stacks.get(width, iter(())), None)
        if stored is None:
            raise ValueError(f"{name} has fewer layers than it should have")
        if width:
            codes = _wide(stored) if width == 4 else stored
            stored = _values(codes, steps, jnp.dtype(dtype))
        weights.append(stored)
    return Linear(jnp.asarray(np.stack(weights)), bias, scale)


def _check_shapes(network: Network) -> None:
    """Raise ValueError where weights are not those of the configuration."""
    config = network.config
    for name in PROJECTIONS:
        shape = _linear(network, name).weight.shape
        if shape[:-1] != (config.num_hidden_layers, SITES[SITE_OF[name]].width(config)):
            raise ValueError(f"layers.{name} has the shape {shape}")


def _linear(network: Network, name: str) -> Linear:
    return network.params.layers.linear(name)


def _linear_tensors(name: str, linear: Linear) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of one projection.

    Each layer is in one of `int4`, `int8` and `weight`, as `widths` says: bits of its integers, 0
    for values. Those of a kind are stacked in the order of the layers.
    """
    yield from _there({f"{name}.bias": linear.bias, f"{name}.scale": linear.scale})
    if linear.scale is None:
        yield f"{name}.weight", np.asarray(linear.weight)
        return
    kinds: dict[int, list[np.ndarray]] = {0: [], 4: [], 8: []}
    widths = []
    for weight, scale in zip(linear.weight, linear.scale, strict=True):
        width, values = _narrow(np.asarray(weight), np.asarray(scale))
        widths.append(width)
        kinds[width].append(values)
    yield f"{name}.widths", np.asarray(widths, np.int8)
    for width, kind in _STORED.items():
        if kinds[width]:
            yield f"{name}.{kind}", np.stack(kinds[width])


def _narrow(
    weight: Float[np.ndarray, "in out"], scale: Float[np.ndarray, "groups out"]
) -> tuple[int, np.ndarray]:
    """(Bits, integers) of a weight that is what they stand for to the last bit, or (0, weight)."""
    with np.errstate(invalid="ignore"):  # what is no integer of 8 bits is found by its value
        steps = weight.reshape(len(scale), -1, weight.shape[1]) / scale[:, None]
        codes = np.rint(steps, out=steps).astype(np.int8).reshape(weight.shape)
    if not np.array_equal(_values(codes, scale, weight.dtype), weight):
        return 0, weight
    if len(codes) % 2 or codes.min() < -8 or codes.max() > 7:
        return 8, codes
    low, high = np.split(codes, 2)  # two to a byte, as in `pack_int4`
    return 4, (low & 15) | (high << 4)


def _wide(packed: Int8[np.ndarray, "half out"]) -> Int8[np.ndarray, "in out"]:
    return np.concatenate([(packed << 4) >> 4, packed >> 4])


def _values(
    codes: Int8[np.ndarray, "in out"], scale: Float[np.ndarray, "groups out"], dtype: np.dtype
) -> Float[np.ndarray, "in out"]:
    """Integers times their steps, computed as rounding does: in the scale's dtype, then cast."""
    steps = codes.astype(scale.dtype).reshape(len(scale), -1, codes.shape[1])
    steps *= scale[:, None]
    return steps.reshape(codes.shape).astype(dtype, copy=False)
