"""Proof: what was written, loaded in PyTorch, against qrot's own network, token by token."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from qrot.errors import InputError
from qrot.evaluate.perplexity import Windows, cut_windows, token_nll
from qrot.text import Data, read_texts
from qrot.run.judge import judged_logits
from qrot.export.compressed_tensors import fold_signs, online_of
from qrot.export.fitted import Fitted, fuse_whole
from qrot.model.config import ModelConfig
from qrot.model.forward import rope_table
from qrot.model.io.load import Opened
from qrot.model.params import Params
from qrot.model.io.tokenizer import encode
from qrot.quantize.rtn import rtn
from qrot.rotation.forms import Learned, Rotations, Shifts
from qrot.scheme import Scheme

WINDOWS = Windows(length=512, count=16)
Logits = Callable[[Int[np.ndarray, "batch length"]], Float[np.ndarray, "batch length vocab"]]


@dataclass(frozen=True)
class Difference:
    """Two networks on the same text."""

    logits: float  # largest difference in the first window, over the largest logit there
    perplexity: float  # of qrot's
    in_torch: float  # of PyTorch's
    error: float  # standard error of their ratio, from the differences window by window
    windows: int
    dtype: str  # of the arithmetic

    @property
    def relative(self) -> float:
        """Of the perplexities."""
        return abs(self.in_torch / self.perplexity - 1)

    def __str__(self):
        return (
            f"in {self.dtype} logits differ by at most {self.logits:.1e} of the largest; "
            f"perplexity on {self.windows} windows of pydoc {self.perplexity:.4f} in qrot, "
            f"{self.in_torch:.4f} in PyTorch ({self.relative:.3%} apart, standard error "
            f"{self.error:.3%})"
        )


def windows_of(opened: Opened, windows: Windows = WINDOWS) -> Int[np.ndarray, "count length"]:
    """Windows of the text that ships with Python. Raises InputError without a tokenizer."""
    if opened.tokenizer is None:
        raise InputError("--verify: this model came without a tokenizer that qrot can read")
    tokens = encode(opened.tokenizer, read_texts(Data()).evaluation)
    length = min(windows.length, opened.config.max_position_embeddings)
    return cut_windows(tokens, replace(windows, length=length))


def compare(
    ours: Logits,
    theirs: Logits,
    rows: Int[np.ndarray, "count length"],
    *,
    dtype: str = "float32",
    advance: Callable = lambda windows: None,
) -> Difference:
    """Logits and perplexity of both, a window at a time. advance: told of each window."""
    nats, largest = [], 0.0
    for row in np.split(rows, len(rows)):
        pair = ours(row), theirs(row)
        if not nats:
            largest = float(np.abs(pair[0] - pair[1]).max() / np.abs(pair[0]).max())
        nats.append([np.asarray(token_nll(jnp.asarray(x), jnp.asarray(row)))[0] for x in pair])
        advance(1)
    # Not token by token: where the first token of a window falls decides for all after it.
    each = np.asarray(nats, np.float64).mean(axis=-1).T  # [2, windows]
    perplexity, in_torch = (math.exp(min(x, 700)) for x in each.mean(axis=1))
    error = float(np.std(each[1] - each[0], ddof=1) / math.sqrt(len(rows)))
    return Difference(largest, perplexity, in_torch, error, len(rows), dtype)


def fused(
    fitted: Fitted, learned: Learned, *, signs_folded: bool = False
) -> tuple[Params, Rotations, Shifts | None]:
    """The whole model with rotations in its weights; signs_folded as `fold_signs` does it."""
    params, online, shifts = fuse_whole(fitted, learned)
    if signs_folded:
        params = params.replace(layers=fold_signs(params.layers, online))
        online = online_of(learned.rotations)
    return params, online, shifts


def logits_in_qrot(
    fitted: Fitted,
    learned: Learned | None,
    scheme: Scheme,
    *,
    rounded: Params | None = None,
    signs_folded: bool = False,
    dtype: str = "float32",
) -> Logits:
    """The network as `qrot run` judges it; the model as it came where learned is None.

    rounded: its parameters, where they are not to be rounded to nearest. dtype: of the arithmetic;
    parameters are float32.
    """
    config = fitted.opened.config
    if learned is None:
        params, online, shifts, clips = fitted.opened.read(), None, None, None
    else:
        params, online, shifts = fused(fitted, learned, signs_folded=signs_folded)
        clips = learned.clips
    if rounded is not None:
        params = rounded
    elif scheme.rounds_weights:
        params = rtn(params, scheme)

    def run(row):
        with jax.enable_x64(dtype == "float64"):
            state, tokens = (params, online, shifts, clips), jnp.asarray(row)
            return np.asarray(
                judged_logits(*state, tokens, config=config, scheme=scheme, dtype=dtype)
            )

    return run


def logits_in_torch(model: Any, config: ModelConfig, *, dtype: str = "float32") -> Logits:
    """A model of transformers, as it was loaded or in float64.

    In float64 its norms and rotary tables are, too, which transformers computes in float32 always:
    1e-7 off, which at 4 bits is another network.
    """
    import torch

    if dtype == "float64":
        model = model.double()

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

    def logits(row):
        with torch.no_grad():
            out = model(input_ids=torch.from_numpy(row.astype(np.int64))).logits
        return out.to(getattr(torch, dtype)).numpy()

    return logits


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


def apply_spinquant(model: Any, path: Path) -> Any:
    """Turn a transformers model with tied or untied embeddings by an R.bin, as SpinQuant does.

    Norms are folded first; no embedding is centred, which RMSNorm would not bear.
    """
    import torch

    tensors = {name: x.double() for name, x in torch.load(path, weights_only=True).items()}
    first, decoder = tensors["R1"], model.model
    with torch.no_grad():
        head = model.lm_head.weight.double() * decoder.norm.weight.double()
        model.lm_head.weight = torch.nn.Parameter((head @ first).to(model.lm_head.weight.dtype))
        table = decoder.embed_tokens.weight
        table.data = (table.double() @ first).to(table.dtype)
        decoder.norm.weight.fill_(1)
        for i, layer in enumerate(decoder.layers):
            attention, mlp = layer.self_attn, layer.mlp
            second = tensors[f"model.layers.{i}.self_attn.R2"]
            for norm, linears in (
                (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
                (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
            ):
                for linear in linears:
                    weight = linear.weight.double() * norm.weight.double()
                    linear.weight.copy_(weight @ first)
                norm.weight.fill_(1)
            for linear in (attention.o_proj, mlp.down_proj):
                linear.weight.copy_(first.T @ linear.weight.double())
                if linear.bias is not None:
                    linear.bias.copy_(linear.bias.double() @ first)
            _turn_values(attention, second)
    return model


def _turn_values(attention: Any, second: Any) -> None:
    size = len(second)
    v, o = attention.v_proj, attention.o_proj
    heads = v.weight.double().T.unflatten(-1, (-1, size)) @ second
    v.weight.copy_(heads.flatten(-2).T)
    if v.bias is not None:
        v.bias.copy_((v.bias.double().unflatten(-1, (-1, size)) @ second).flatten(-2))
    o.weight.copy_((o.weight.double().unflatten(-1, (-1, size)) @ second).flatten(-2))
