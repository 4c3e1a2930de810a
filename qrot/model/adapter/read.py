"""An adapter's folder: its tensors, each with the module that it belongs to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from jaxtyping import Float64

from qrot.errors import InputError, located
from qrot.files.tensors import Tensor, open_tensor_file
from qrot.model.adapter.config import AdapterConfig, read_adapter_config

_PREFIX = re.compile(r"^(base_model\.model\.)+")
_FLOATS = ("float64", "float32", "float16", np.dtype(ml_dtypes.bfloat16).name)


class Update(NamedTuple):
    """A low-rank update of one stored weight: W + scaling * B A.

    Attributes:
        a: [rank, in]; of an embedding [rank, vocab].
        b: [out, rank]; of an embedding [hidden, rank].
        scaling: that their product is multiplied by.
        magnitude: lengths that the rows of the sum get (DoRA), of an embedding its columns; None
            where they keep their own.
        bias: that `scaling` times is added to the layer's bias; None for none.
    """

    a: Float64[np.ndarray, "rank in"]
    b: Float64[np.ndarray, "out rank"]
    scaling: float
    magnitude: Float64[np.ndarray, " out"] | None = None
    bias: Float64[np.ndarray, " out"] | None = None


class Adapter(NamedTuple):
    """What an adapter does to a model.

    Attributes:
        path: of its folder.
        config: its settings.
        updates: by module, such as model.layers.0.self_attn.q_proj.
        whole: tensors that take the place of the base model's, by their name there.
    """

    path: Path
    config: AdapterConfig
    updates: dict[str, Update]
    whole: dict[str, Tensor]


def read_adapter(folder: Path) -> Adapter:
    """Read a PEFT folder: adapter_config.json and adapter_model.safetensors.

    Args:
        folder: of the adapter.

    Returns:
        Its updates, in memory, and the tensors that were trained whole, which are not read yet.

    Raises:
        InputError: in one sentence, where it is no LoRA or DoRA, is damaged, holds NaN, or lacks or
            has modules that its settings do not say.
    """
    config = read_adapter_config(folder)
    path = folder / "adapter_model.safetensors"
    if not path.is_file():
        old = folder / "adapter_model.bin"
        how = "; convert adapter_model.bin to safetensors first" if old.is_file() else ""
        raise InputError(f"{folder}: has no {path.name}{how}")
    tensors, _ = open_tensor_file(path)
    with located(path):
        parts, whole = _sorted(tensors)
        updates = {module: _update(module, own, config) for module, own in parts.items()}
        for name in whole:
            _check_whole(name, config)
        missing = [
            name
            for name in config.modules_to_save or ()
            if not any(_module(tensor).endswith(name) for tensor in whole)
        ]
        if missing:
            raise InputError(f"modules_to_save names {missing[0]}, which is not in the file")
        if not updates and not whole:
            raise InputError("it holds no update of any module")
    return Adapter(folder, config, updates, whole)


def _sorted(
    tensors: Mapping[str, Tensor],
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """(Parts of updates by module and part, whole tensors by the base model's name)."""
    parts: dict[str, dict[str, Tensor]] = {}
    whole: dict[str, Tensor] = {}
    for stored, tensor in tensors.items():
        if tensor.dtype.name not in _FLOATS:
            raise InputError(f"{stored} has dtype {tensor.dtype.name}, which no adapter has")
        name = _PREFIX.sub("", stored).replace(".modules_to_save.", ".")
        found = re.fullmatch(
            r"(?P<module>.+)\.(?P<part>lora_(?:embedding_)?[AB]|lora_magnitude_vector)"
            r"(?P<kind>\.weight|\.bias)?",
            name,
        )
        if found is None:
            whole[name.replace(".base_layer.", ".")] = tensor
            continue
        part = found["part"] + (found["kind"] or "").removesuffix(".weight")
        own = parts.setdefault(found["module"], {})
        if part in own:
            raise InputError(f"{stored} is there under two names")
        own[part] = tensor
    return parts, whole


def _update(module: str, own: Mapping[str, Tensor], config: AdapterConfig) -> Update:
    embedding = "lora_embedding_A" in own
    names = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A", "lora_B")
    known = {*names}
    known |= {"lora_magnitude_vector"} if config.use_dora else set()
    known |= {"lora_B.bias"} if config.lora_bias and not embedding else set()
    if own.keys() != known:
        odd = sorted(own.keys() ^ known)[0]
        raise InputError(f"{module}: {'has' if odd in own else 'lacks'} {odd}")
    if not config.targets(module):
        raise InputError(f"{module} has an update, but target_modules does not name it")
    a, b = (_numbers(f"{module}.{name}", own[name], axes=2) for name in names)
    rank = config.rank(module)
    if a.shape[0] != rank or b.shape[1] != rank:
        raise InputError(
            f"{module} has updates of rank {a.shape[0]} and {b.shape[1]}, the settings say {rank}"
        )
    optional = {
        field: _numbers(f"{module}.{part}", own[part], axes=1)
        for field, part in (("magnitude", "lora_magnitude_vector"), ("bias", "lora_B.bias"))
        if part in own
    }
    for part, x in optional.items():
        if len(x) != len(b):
            raise InputError(f"{module}: the {part} has {len(x)} numbers, the update {len(b)}")
    return Update(a, b, config.scaling(module), **optional)


def _numbers(name: str, tensor: Tensor, *, axes: int) -> Any:
    values = tensor.whole().astype(np.float64)
    if axes == 1 and values.ndim == 2 and 1 in values.shape:  # as PEFT had magnitudes before
        values = values.reshape(-1)
    if values.ndim != axes:
        raise InputError(f"{name} has {values.ndim} axes, it should have {axes}")
    if not np.isfinite(values).all():
        raise InputError(f"{name} contains NaN or Inf")
    return values


def _check_whole(name: str, config: AdapterConfig) -> None:
    """Raise InputError for a tensor that the settings do not say to be there."""
    module, kind = _module(name), name.rpartition(".")[2]
    saved = any(module.endswith(wanted) for wanted in config.modules_to_save or ())
    biases = config.bias == "all" or (config.bias == "lora_only" and config.targets(module))
    resized = module.endswith(("embed_tokens", "lm_head"))  # PEFT saves them where they grew
    if not (saved or resized or (kind == "bias" and biases)):
        raise InputError(f"it holds {name}, which its settings do not say")


def _module(name: str) -> str:
    return name.rpartition(".")[0]
