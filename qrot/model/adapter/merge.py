"""Stored tensors with adapters merged into them, row by row as they are read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
from jaxtyping import Float64

from qrot.errors import InputError
from qrot.files.tensors import Tensor
from qrot.model.adapter.combine import Combining, combined, is_embedding
from qrot.model.adapter.read import Adapter, Update
from qrot.model.config import ModelConfig
from qrot.model.io.assemble import BLOCK, EMBED, HEAD


def merged(
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    adapters: Sequence[Adapter],
    combining: Combining,
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Merge adapters into the tensors of a model.

    Nothing is read before it is asked for: a row of a merged tensor is the base model's row, plus
    that of the low-rank product, in float64, cast once to the base model's dtype.

    Args:
        config: of the base model.
        tensors: of it, by Hugging Face name.
        adapters: to merge.
        combining: their weights, and how several become one.

    Returns:
        The configuration and the tensors of the merged model. Where an adapter changes the
        embedding or the head of a model that ties them, they are tied no longer: the head that
        training saw is the base model's.

    Raises:
        InputError: in one sentence, where the adapters are those of another base model.
    """
    updates, whole = combined(adapters, combining)
    for adapter in adapters:
        _check_complete(adapter, config, tensors)
    found = dict(tensors)
    tied = config.tie_word_embeddings and HEAD not in whole
    ends = {name.rpartition(".")[0] for name in (EMBED, HEAD)}
    if config.tie_word_embeddings and (ends & updates.keys() or {EMBED, HEAD} & whole.keys()):
        tied = tied and all(a.config.ensure_weight_tying for a in adapters)
        if not tied:
            found[HEAD] = found[EMBED]
    for name, tensor in whole.items():
        _check_whole(name, tensor, found, config)
        found[name] = tensor
    for module, update in updates.items():
        _merge(module, update, found)
    vocab = found[EMBED].shape[0] if EMBED in found else config.vocab_size
    return replace(config, tie_word_embeddings=tied, vocab_size=vocab), found


def _check_complete(adapter: Adapter, config: ModelConfig, tensors: Mapping[str, Tensor]) -> None:
    """Raise InputError where the modules of an adapter are not those that it names of this base."""
    modules = {name.rpartition(".")[0] for name, tensor in tensors.items() if len(tensor.shape) > 1}
    modules |= {HEAD.rpartition(".")[0]} if config.tie_word_embeddings else set()
    extra = sorted(adapter.updates.keys() - modules)
    if extra:
        raise InputError(f"{adapter.path}: the base model has no {extra[0]}; it is of another base")
    absent = sorted(m for m in modules - adapter.updates.keys() if adapter.config.targets(m))
    if absent:
        raise InputError(
            f"{adapter.path}: has no update of {absent[0]}, which target_modules asks for; it is of"
            " another base"
        )


def _check_whole(
    name: str, tensor: Tensor, tensors: Mapping[str, Tensor], config: ModelConfig
) -> None:
    """Raise InputError where a tensor cannot take the place of the base model's."""
    if name not in tensors and not (name == HEAD and config.tie_word_embeddings):
        raise InputError(f"the base model has no {name}, which the adapter replaces")
    theirs = tensors[name].shape if name in tensors else tensors[EMBED].shape
    grown = name in (EMBED, HEAD) and tensor.shape[1:] == theirs[1:]
    if tensor.shape != theirs and not grown:
        raise InputError(
            f"{name} of the adapter has shape {list(tensor.shape)}, of the base model"
            f" {list(theirs)}"
        )


def _merge(module: str, update: Update, tensors: dict[str, Tensor]) -> None:
    name, bias = f"{module}.weight", f"{module}.bias"
    base = tensors[name]
    shape = (len(update.b), update.a.shape[1])
    if is_embedding(module):
        shape = shape[::-1]
    if base.shape != shape:
        raise InputError(
            f"the update of {module} is of shape {list(shape)}, and the base model has"
            f" {list(base.shape)}"
        )
    tensors[name] = _embedding(base, update) if is_embedding(module) else _linear(base, update)
    if update.bias is not None:
        if bias not in tensors:
            raise InputError(f"the base model has no {bias}, which the adapter changes")
        tensors[bias] = _added(tensors[bias], update.bias)


def _linear(base: Tensor, update: Update) -> Tensor:
    def rows(start: int, stop: int) -> np.ndarray:
        x = base.rows(start, stop).astype(np.float64)
        x += update.scaling * (update.b[start:stop] @ update.a)
        if update.magnitude is not None:
            lengths = np.linalg.norm(x, axis=1, keepdims=True)
            x *= update.magnitude[start:stop, None] / lengths
        return x.astype(base.dtype)

    return Tensor(base.shape, base.dtype, rows)


def _embedding(base: Tensor, update: Update) -> Tensor:
    def changed(start: int, stop: int) -> Float64[np.ndarray, "rows hidden"]:
        x = base.rows(start, stop).astype(np.float64)
        return x + update.scaling * (update.b @ update.a[:, start:stop]).T

    @cache
    def lengths() -> Float64[np.ndarray, " hidden"]:
        step = max(1, BLOCK // math.prod(base.shape[1:]))
        squares = [
            (changed(start, min(start + step, base.shape[0])) ** 2).sum(0)
            for start in range(0, base.shape[0], step)
        ]
        return np.sqrt(np.sum(squares, axis=0))

    def rows(start: int, stop: int) -> np.ndarray:
        x = changed(start, stop)
        if update.magnitude is not None:
            x *= update.magnitude / lengths()
        return x.astype(base.dtype)

    return Tensor(base.shape, base.dtype, rows)


def _added(base: Tensor, more: Float64[np.ndarray, " out"]) -> Tensor:
    def rows(start: int, stop: int) -> np.ndarray:
        return (base.rows(start, stop).astype(np.float64) + more[start:stop]).astype(base.dtype)

    return Tensor(base.shape, base.dtype, rows)
