"""Proof: what was written, loaded again, against qrot's own network, token by token."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from qrot.errors import InputError
from qrot.evaluate.losses import token_nll
from qrot.evaluate.perplexity import Windows, cut_windows
from qrot.model.config import ModelConfig
from qrot.model.forward import forward
from qrot.model.io.load import Opened
from qrot.model.io.tokenizer import encode
from qrot.model.layer import rope_table
from qrot.model.params import Network
from qrot.text import Data, read_texts

WINDOWS = Windows(length=512, count=16)
Logits = Callable[[Int[np.ndarray, "batch length"]], Float[np.ndarray, "batch length vocab"]]


@dataclass(frozen=True)
class Difference:
    """Two networks on the same text.

    Attributes:
        logits: largest difference in the first window, over the largest logit there.
        perplexity: of qrot's.
        again: of what was loaded.
        error: standard error of their ratio, from the differences window by window.
        windows: of the text.
        dtype: of the arithmetic.
        program: that loaded it.
    """

    logits: float
    perplexity: float
    again: float
    error: float
    windows: int
    dtype: str
    program: str = "PyTorch"

    @property
    def relative(self) -> float:
        """Of the perplexities."""
        return abs(self.again / self.perplexity - 1)

    def __str__(self):
        return (
            f"in {self.dtype} logits differ by at most {self.logits:.1e} of the largest; "
            f"perplexity on {self.windows} windows of pydoc {self.perplexity:.4f} in qrot, "
            f"{self.again:.4f} in {self.program} ({self.relative:.3%} apart, standard error "
            f"{self.error:.3%})"
        )


def windows_of(opened: Opened, windows: Windows = WINDOWS) -> Int[np.ndarray, "count length"]:
    """Windows of the text that ships with Python. Raises InputError without a tokenizer."""
    if opened.tokenizer is None:
        raise InputError("--verify: this model came without a tokenizer that qrot can read")
    tokens = encode(opened.tokenizer, read_texts(Data()).evaluation, opened.config.vocab_size)
    length = min(windows.length, opened.config.max_position_embeddings)
    return cut_windows(tokens, replace(windows, length=length))


def compare(
    ours: Logits,
    theirs: Logits,
    rows: Int[np.ndarray, "count length"],
    *,
    dtype: str = "float32",
    program: str = "PyTorch",
    advance: Callable[[int], None] = lambda windows: None,
) -> Difference:
    """Logits and perplexity of both, a window at a time.

    Args:
        ours: of qrot.
        theirs: of what was loaded.
        rows: tokens of the windows.
        dtype: of the arithmetic, which the result names.
        program: that loaded it, which the result names.
        advance: told of each window.
    """
    nats, largest = [], 0.0
    for row in np.split(rows, len(rows)):
        pair = ours(row), theirs(row)
        if not nats:
            largest = float(np.abs(pair[0] - pair[1]).max() / np.abs(pair[0]).max())
        nats.append([np.asarray(token_nll(jnp.asarray(x), jnp.asarray(row)))[0] for x in pair])
        advance(1)
    # Not token by token: where the first token of a window falls decides for all after it.
    each = np.asarray(nats, np.float64).mean(axis=-1).T  # [2, windows]
    perplexity, again = (math.exp(min(x, 700)) for x in each.mean(axis=1))
    error = float(np.std(each[1] - each[0], ddof=1) / math.sqrt(len(rows)))
    return Difference(largest, perplexity, again, error, len(rows), dtype, program)


def logits_in_qrot(network: Network, *, dtype: str = "float32") -> Logits:
    """A network of qrot's, its weights rounded or not.

    Args:
        network: in float32.
        dtype: of the arithmetic.
    """
    logits = jax.jit(partial(forward, dtype=jnp.dtype(dtype)))

    def run(row: Int[np.ndarray, "batch length"]) -> Float[np.ndarray, "batch length vocab"]:
        with jax.enable_x64(dtype == "float64"):
            return np.asarray(logits(network, jnp.asarray(row)))

    return run


def logits_in_torch(model: Any, config: ModelConfig, *, dtype: str = "float32") -> Logits:
    """A model of transformers, as it was loaded or in float64.

    In float64 its norms and rotary tables are, too, which transformers computes in float32 always:
    1e-7 off, which at 4 bits is another network.
    """
    import torch

    if dtype == "float64":
        _widen(model.double(), config)

    def logits(row: Int[np.ndarray, "batch length"]) -> Float[np.ndarray, "batch length vocab"]:
        with torch.no_grad():
            out = model(input_ids=torch.from_numpy(row.astype(np.int64))).logits
        return out.to(getattr(torch, dtype)).numpy()

    return logits


class Program(NamedTuple):
    """What opens an export.

    Attributes:
        name: of it, behind "in".
        logits: from what it loads, the model's configuration and the dtype of the arithmetic.
    """

    name: str
    logits: Callable[[Any, ModelConfig, str], Logits]


PYTORCH = Program(
    "PyTorch", lambda model, config, dtype: logits_in_torch(model, config, dtype=dtype)
)
READ_AGAIN = Program(
    "the file, read again", lambda network, config, dtype: logits_in_qrot(network, dtype=dtype)
)


def _widen(model: Any, config: ModelConfig) -> None:
    """Put norms and rotary tables in float64 in the place of transformers' own."""
    import torch

    def tables(x, position_ids, **_):
        with jax.enable_x64(True):
            halves = rope_table(config, int(position_ids.max()) + 1, jnp.float64)
        pair = (torch.from_numpy(np.array(half)) for half in halves)
        return tuple(torch.cat([half, half], -1)[position_ids] for half in pair)

    def norm(x, module):
        mean = x.square().mean(-1, keepdim=True)
        return x * torch.rsqrt(mean + module.variance_epsilon) * module.weight

    model.model.rotary_emb.forward = tables
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = partial(norm, module=module)


def load_plain(folder: Path) -> Any:
    """What transformers alone makes of a folder."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()


def load_with_module(folder: Path, module: str) -> Any:
    """What the module that lies in the folder makes of it."""
    spec = importlib.util.spec_from_file_location("exported", folder / module)
    if spec is None or spec.loader is None:
        raise InputError(f"{folder}: has no {module}")
    exported = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(exported)
    return exported.load(folder)
