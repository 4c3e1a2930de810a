"""Kept networks: one safetensors file from which a quantised network comes back as it was.

Weights that are integers on a symmetric grid are kept as these, 4 bits or 8, with their scales;
all others as values. The network that comes back has equal values, so that it computes the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int8

from qrot.errors import InputError, located
from qrot.files.own import open_own_file, strictly
from qrot.files.plain import short, shown
from qrot.files.tensors import Tensor, open_tensor_file, write_tensor_file
from qrot.model.config import ModelConfig, check_config
from qrot.model.params import Layers, Linear, Network, Params, layer_shapes
from qrot.rotation.about import check_about
from qrot.rotation.read import acting_from
from qrot.rotation.store import acting_tensors
from qrot.rotation.transform import Online, Transform
from qrot.scheme import Scheme
from qrot.sites import PROJECTIONS

FORMAT = "qrot network 1"
_ENDS = ("embed", "norm", "head")
_NORMS = ("attention_norm", "mlp_norm", "q_norm", "k_norm")
_ACTING = {kind.__name__: kind for kind in (Online, Transform)}
_STORED = {0: "weight", 4: "int4", 8: "int8"}
_DTYPES = ("float64", "float32", "bfloat16", "float16")
# Of a configuration, and the same for a network and the model that it was made of. SliceGPT makes
# hidden_size smaller.
_SAME = (
    "architecture",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
)


@dataclass(frozen=True)
class _Acting:
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    kind: Literal["Online", "Transform"]
    forms: dict[str, Any]


@dataclass(frozen=True)
class _Header:
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    format: str
    config: ModelConfig
    scheme: Scheme
    dtypes: dict[str, str]
    online: _Acting
    about: dict[str, Any]


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


def load_network(path: Path, model: ModelConfig | None = None) -> tuple[Network, dict[str, Any]]:
    """Read what `save_network` wrote: the network, and what it was saved with.

    Memory: the network, and a layer of one projection.

    Args:
        path: of the file.
        model: the configuration of the model that it was made of; None not to compare its sizes.

    Raises:
        InputError: where there is none, it is not a network of qrot's or one of another model, or
            it is damaged: a tensor is missing or not known, has another shape or dtype than the
            configuration says, or a number that is not finite.
    """
    stored, values = open_own_file(path, "network", (FORMAT,))
    with located(f"{path}: a damaged network file"):
        header = strictly(_Header, values, "header")
        check_about(header.about)
        check_config(header.config)
    tensors = _Tensors(stored)
    with located(path):
        if model is not None:
            _check_model(header.config, model)
        with located("a damaged network file"):
            params = _params(tensors, header.config, header.dtypes)
        for name in tensors.left:
            if name.partition(".")[0] not in vars(Transform()):
                raise InputError(f"holds {shown(name)}, which no network has")
        arrays = {name: tensor.view() for name, tensor in tensors.left.items()}
        kind = _ACTING[header.online.kind]
        online = acting_from(arrays, header.online.forms, kind, header.config)
    return Network(params, online, header.config, header.scheme), header.about


def read_about(path: Path) -> dict[str, Any]:
    """What a network was saved with, without the network. Raises InputError as `load_network`."""
    about = open_own_file(path, "network", (FORMAT,))[1].get("about")
    with located(f"{path}: a damaged network file"):
        if not isinstance(about, dict):
            raise InputError(f"says of itself {short(about)}")
        check_about(about)
    return about


def is_network(path: Path) -> bool:
    """Whether a file says that it holds a network; False where it cannot be read, too."""
    try:
        return open_tensor_file(path)[1].get("format") == json.dumps(FORMAT)
    except InputError:
        return False


def _check_model(config: ModelConfig, model: ModelConfig) -> None:
    """Raise InputError where a network has other sizes than the model that it was made of."""
    for name in _SAME:
        own, other = getattr(config, name), getattr(model, name)
        if own != other:
            raise InputError(f"has {name} {shown(str(own))}, where the model has {other}")
    if config.hidden_size > model.hidden_size:
        raise InputError(f"is wider than the model, which has hidden_size {model.hidden_size}")


def _there(tensors: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    return ((name, np.asarray(x)) for name, x in tensors.items() if x is not None)


class _Tensors:
    """The tensors of a file, each taken once."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self.left = dict(tensors)

    def take(self, name: str, shape: tuple[int, ...], *dtypes: str) -> Tensor:
        """Raises InputError where there is none, or one of another shape or dtype."""
        if name not in self.left:
            raise InputError(f"{name} is missing")
        tensor = self.left.pop(name)
        if tensor.shape != shape:
            raise InputError(f"{name} has the shape {list(tensor.shape)}, not {list(shape)}")
        if tensor.dtype.name not in dtypes:
            raise InputError(f"{name} has the dtype {tensor.dtype.name}, not {', '.join(dtypes)}")
        if jax.dtypes.canonicalize_dtype(tensor.dtype) != tensor.dtype:
            raise InputError(f"{name} is in float64, which needs JAX_ENABLE_X64=1")
        return tensor

    def array(self, name: str, *shape: int) -> jax.Array:
        """Finite numbers of any floating dtype."""
        return jnp.asarray(_finite(name, self.take(name, shape, *_DTYPES).whole()))

    def optional(self, name: str, *shape: int) -> jax.Array | None:
        return self.array(name, *shape) if name in self.left else None


def _params(tensors: _Tensors, config: ModelConfig, dtypes: Mapping[str, str]) -> Params:
    layers, hidden, table = config.num_hidden_layers, config.hidden_size, config.vocab_size
    fields: dict[str, Any] = {
        name: _read_linear(tensors, name, (layers, *shape), dtypes)
        if name in PROJECTIONS
        else tensors.array(f"layers.{name}", layers, *shape)
        for name, shape in layer_shapes(config).items()
    }
    return Params(
        embed=tensors.array("embed", table, hidden),
        layers=Layers(**fields),
        norm=tensors.array("norm", hidden),
        head=None if config.tie_word_embeddings else tensors.array("head", hidden, table),
    )


def _read_linear(
    tensors: _Tensors, projection: str, shape: tuple[int, ...], dtypes: Mapping[str, str]
) -> Linear:
    name, dtype = f"layers.{projection}", dtypes.get(projection)
    if dtype not in _DTYPES:
        raise InputError(f"says {short(dtype)} of the dtype of {name}")
    n, inputs, outputs = shape
    bias = tensors.optional(f"{name}.bias", n, outputs)
    stored = tensors.left.get(f"{name}.scale")
    if stored is None:
        weight = tensors.take(f"{name}.weight", shape, dtype).whole()
        return Linear(jnp.asarray(_finite(name, weight)), bias)
    groups = stored.shape[1] if len(stored.shape) == 3 else 1
    if not groups or inputs % groups:
        raise InputError(f"{name}.scale has {groups} groups of {inputs} inputs")
    scale = tensors.array(f"{name}.scale", n, groups, outputs)
    weight = _weight(tensors, name, np.asarray(scale), (inputs, outputs), dtype)
    return Linear(jnp.asarray(weight), bias, scale)


def _weight(
    tensors: _Tensors,
    name: str,
    scale: Float[np.ndarray, "layers groups out"],
    shape: tuple[int, int],
    dtype: str,
) -> Float[np.ndarray, "layers in out"]:
    """The layers of a weight, each stored in the way that `widths` says."""
    widths = tensors.take(f"{name}.widths", scale.shape[:1], "int8").whole().tolist()
    if not {*widths} <= {*_STORED} or (4 in widths and shape[0] % 2):
        raise InputError(f"{name}.widths are {short(widths)}")
    stacks = {
        width: tensors.take(
            f"{name}.{kind}",
            (widths.count(width), shape[0] // (2 if width == 4 else 1), shape[1]),
            "int8" if width else dtype,
        )
        for width, kind in _STORED.items()
        if width in widths
    }
    result = np.empty((len(widths), *shape), jnp.dtype(dtype))
    for i, width in enumerate(widths):
        place = widths[:i].count(width)
        (codes,) = values = stacks[width].rows(place, place + 1)
        if width:
            codes = _wide(codes) if width == 4 else codes
            with np.errstate(over="ignore"):  # what is too large is found as not finite
                values = _values(codes, scale[i], result.dtype)
        result[i] = _finite(name, values)
    return result


def _finite(name: str, x: np.ndarray) -> np.ndarray:
    if not np.isfinite(x).all():
        raise InputError(f"{name} holds numbers that are not finite")
    return x


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
