"""Rotated and quantised models in plain PyTorch: one file that needs torch and transformers.

`load(folder)` opens what `qrot export` wrote; `apply_rotations(model, file)` rotates a model that
is loaded already. Weights hold what can be fused; what is left is hooked in: `Site` rotates and
rounds the inputs of the projections, and an attention function does it for keys and values.

Rows are vectors, x -> x R, while PyTorch's weights are [out, in]: a reading weight becomes W R, a
writing one R^T W.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

FORMAT = "qrot rotations 4"
FILE = "online.safetensors"  # in an exported folder: what its weights do not hold
Parts = dict[str, Tensor]


def hadamard_transform(x: Tensor, factors: list[Tensor], *, inverse: bool = False) -> Tensor:
    """x H / sqrt(n) along the last axis, H being the Kronecker product of the +-1 factors.

    If H is smaller than the axis it acts on each run of its size. Computed in float32 or wider;
    one small product a factor, n times the sum of their orders.
    """
    order = math.prod(len(factor) for factor in factors)
    y = x.to(torch.promote_types(x.dtype, torch.float32)).reshape(-1, order)
    for factor in factors:
        split = y.reshape(y.shape[0], len(factor), -1)
        # The axis that is done goes to the end: after all factors they are in order again.
        y = torch.einsum("rsk,st->rkt", split, (factor.T if inverse else factor).to(y.dtype))
    return (y / math.sqrt(order)).reshape(x.shape).to(x.dtype)


def fake_quantise(x: Tensor, grid: dict[str, Any], clip: Tensor | None = None) -> Tensor:
    """Round x to a grid of qrot, as its file has it; 16 bits leave it alone.

    x: [batch, length, n], or keys and values [batch, heads, length, head_dim].
    """
    bits, kind = grid["bits"], grid["kind"]
    if bits >= 16:
        return x
    if grid.get("threshold"):
        large = (x.abs() > grid["threshold"]).reshape(-1, x.shape[-1]).any(0)
        rest = fake_quantise(torch.where(large, 0, x), {**grid, "threshold": 0}, clip)
        return torch.where(large, x, rest)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    axes: tuple[int, ...] = (-1,)
    if grid["granularity"] == "group":
        wide = wide.unflatten(-1, (-1, grid["group"]))
    elif grid["granularity"] == "tensor":
        axes = tuple(range(x.ndim))
    elif grid["granularity"] == "token" and x.ndim == 4:
        axes = (1, 3)
    # In float32 as qrot has it: 0.9 is another number in float64.
    clip = torch.tensor(grid["clip"], dtype=torch.float32) if clip is None else clip
    clip = clip.to(wide.device, wide.dtype)
    if kind == "asymmetric":
        low = wide.amin(axes, keepdim=True).clamp(max=0) * clip
        high = wide.amax(axes, keepdim=True).clamp(min=0) * clip
        scale = (high - low) / (2**bits - 1)
        scale = torch.where(scale == 0, 1, scale)
        zero = (-low / scale).round()
        ends = (-zero, 2**bits - 1 - zero)
    else:
        half = 2 ** (bits - 1)
        steps = half - 0.5 if kind == "symmetric_half" else half - 1
        scale = wide.abs().amax(axes, keepdim=True) * clip / steps
        scale = torch.where(scale == 0, 1, scale)
        ends = (torch.full_like(scale, -half), torch.full_like(scale, half - 1))
    q = torch.clamp((wide / scale).round(), *ends)
    return (q * scale).reshape(x.shape).to(x.dtype)


def _dense(parts: Parts, x: Tensor, inverse: bool) -> Tensor:
    matrix = parts["matrix"]
    wide = torch.promote_types(x.dtype, matrix.dtype)
    return (x.to(wide) @ (matrix.mT if inverse else matrix).to(wide)).to(x.dtype)


def _blocks(parts: Parts, x: Tensor, inverse: bool) -> Tensor:
    blocks = parts["blocks"]
    wide = torch.promote_types(x.dtype, blocks.dtype)
    blocks = (blocks.mT if inverse else blocks).to(wide)
    split = x.to(wide).unflatten(-1, blocks.shape[:2])
    return torch.einsum("...bi,bij->...bj", split, blocks).flatten(-2).to(x.dtype)


def _hadamard(parts: Parts, x: Tensor, inverse: bool) -> Tensor:
    factors, signs = [parts[name] for name in parts if name in _FACTORS], parts["signs"].to(x.dtype)
    y = hadamard_transform(x if inverse else x * signs, factors, inverse=inverse)
    return y * signs if inverse else y


def _kronecker(parts: Parts, x: Tensor, inverse: bool) -> Tensor:
    left, right, signs = parts["left"], parts["right"], parts["signs"].to(x.dtype)
    left, right = (left.mT, right.mT) if inverse else (left, right)
    wide = torch.promote_types(x.dtype, left.dtype)
    split = (x if inverse else x * signs).to(wide).unflatten(-1, (left.shape[-1], right.shape[-1]))
    y = (left.mT.to(wide) @ split @ right.to(wide)).flatten(-2).to(x.dtype)
    return y * signs if inverse else y


# By the name of a form: what applies it, and the part that tells its stack, with its own axes.
_FORMS = {
    "dense": (_dense, "matrix", 2),
    "blocks": (_blocks, "blocks", 3),
    "hadamard": (_hadamard, "signs", 1),
    "kronecker": (_kronecker, "signs", 1),
}
_ORTHOGONAL = ("matrix", "blocks", "left", "right")
_FACTORS = tuple(f"factor{i}" for i in range(10))  # of Hadamard matrices; no stack has them


class Rotation(nn.Module):
    """One rotation of one layer in any of qrot's forms, the same for all heads or one a kv head."""

    def __init__(self, form: str, parts: Parts):
        """form: as the file has it; parts: by name, with one axis in front for kv heads or none."""
        super().__init__()
        self.form, self.names = form, list(parts)
        self._apply_form, part, axes = _FORMS[form]
        self.per_head = parts[part].ndim > axes
        for name, tensor in parts.items():
            self.register_buffer(f"part_{name}", tensor, persistent=False)

    @property
    def parts(self) -> Parts:
        """The tensors by name."""
        return {name: getattr(self, f"part_{name}") for name in self.names}

    def forward(self, x: Tensor, inverse: bool = False, heads: int = 1) -> Tensor:
        """x R, or x R^T, in x's dtype and at least in the precision of R.

        heads: the axis of x that counts heads, for a rotation of each kv head.
        """
        parts = self.parts
        if not self.per_head:
            return self._apply_form(parts, x, inverse)
        axes = {name: None if name in _FACTORS else 0 for name in parts}
        for name in set(parts) - set(_FACTORS):
            times = x.shape[heads] // len(parts[name])  # query heads that share a kv head
            parts[name] = parts[name].repeat_interleave(times, 0)
        return torch.vmap(self._apply_form, (axes, heads, None), heads)(parts, x, inverse)

    def refined(self) -> Rotation:
        """In float64, brought to orthogonality within it by one Newton-Schulz step."""
        parts = {name: part.double() for name, part in self.parts.items()}
        for name in set(parts) & set(_ORTHOGONAL):
            parts[name] = 1.5 * parts[name] - 0.5 * parts[name] @ (parts[name].mT @ parts[name])
        return Rotation(self.form, parts)


class Site(nn.Module):
    """What happens to activations at one place: rotate, take the shift off, round, put it back."""

    shift: Tensor | None
    clip: Tensor | None

    def __init__(self, grid: dict[str, Any], rotation: Rotation | None, shift, clip):
        """shift: in the rotated basis; shift and clip may be None."""
        super().__init__()
        self.grid, self.rotation = grid, rotation
        self.register_buffer("shift", shift, persistent=False)
        self.register_buffer("clip", clip, persistent=False)

    def rotate(self, x: Tensor) -> Tensor:
        """Only the rotation: for queries."""
        return x if self.rotation is None else self.rotation(x)

    def forward(self, x: Tensor) -> Tensor:
        """Rotate and round."""
        x = self.rotate(x)
        if self.shift is None:
            return fake_quantise(x, self.grid, self.clip)
        shift = self.shift.to(x.dtype)
        return fake_quantise(x - shift, self.grid, self.clip) + shift


class State:
    """A rotation file: tensors by dotted name, and what its metadata say."""

    def __init__(self, path: str | Path):
        """Raises ValueError where the file is not of the format that this module reads."""
        with safe_open(path, "pt") as file:
            self.tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = {key: json.loads(value) for key, value in (file.metadata() or {}).items()}
        if metadata.get("format") != FORMAT or "grids" not in metadata:
            raise ValueError(f"{path}: no rotation file of this format ({FORMAT}); export it again")
        self.metadata, self.fused = metadata, bool(metadata.get("fused"))

    def grids(self, layer: int) -> dict[str, dict[str, Any]]:
        """The grids of one layer by site."""
        return next(g for start, stop, g in self.metadata["grids"] if start <= layer < stop)

    def beside(self, kind: str, site: str, layer: int) -> Tensor | None:
        """The shift, the clip or the scales (logarithms) of one site of one layer."""
        stacked = self.tensors.get(f"{kind}.{site}")
        return None if stacked is None else stacked[layer]

    def rotation(self, name: str, layer: int) -> Rotation | None:
        """The rotation R1 `residual`, R2 `value`, R3 `key` or R4 `down` of a layer; None if off."""
        if name not in self.metadata["forms"]:
            return None
        form, prefix = self.metadata["forms"][name]["form"], f"rotations.{name}."
        parts = {n[len(prefix) :]: x for n, x in self.tensors.items() if n.startswith(prefix)}
        _, part, axes = _FORMS[form]
        if parts[part].ndim > axes:  # layers have one each
            parts = {n: x if n in _FACTORS else x[layer] for n, x in parts.items()}
        return Rotation(form, parts)


def load(folder: str | Path, **options: Any) -> Any:
    """A causal language model out of a folder that `qrot export` wrote, its online part hooked in.

    options: for transformers' `from_pretrained`.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    install(model, State(Path(folder) / FILE))
    return model.eval()


def apply_rotations(model: Any, path: str | Path) -> Any:
    """Rotate a loaded model in place, and hook in what acts at run time, grids included.

    model: of transformers, of the weights that the rotations were fitted to: Llama, Mistral, Qwen2
      or Qwen3. Weights are rotated in float64 and keep their dtype; they are not rounded.
    path: `rotations.safetensors` of a run or of `qrot export --format torch`.
    Raises ValueError where the sizes do not fit.
    """
    state = State(path)
    if state.fused:
        raise ValueError(f"{path}: belongs to weights that hold it already; use load(folder)")
    decoder = model.model
    layers, residual = decoder.layers, state.rotation("residual", 0)
    covered, size = state.metadata["grids"][-1][1], None
    if residual is not None:  # R1 is a matrix or blocks: one part
        size = next(iter(residual.parts.values()))[..., 0].numel()
    if covered != len(layers) or size not in (None, model.config.hidden_size):
        raise ValueError(f"{path}: made for {covered} layers of {size}, which this model has not")
    with torch.no_grad():
        _untie(model)
        head = model.lm_head.weight
        _write(head, _rotated(_wide(head) * _wide(decoder.norm.weight), residual))
        decoder.norm.weight.fill_(1)
        table = decoder.embed_tokens.weight
        _write(table, _rotated(_wide(table), residual))
        for i, layer in enumerate(layers):
            _rotate_layer(layer, i, state, residual)
    install(model, state)
    return model


def install(model: Any, state: State) -> None:
    """Hook rotations and grids into a model whose weights are rotated."""
    for i, layer in enumerate(model.model.layers):
        grids, attention = state.grids(i), layer.self_attn
        rotations, sites = {"down": state.rotation("down", i)}, {}
        if grids["keys"]["bits"] < 16:  # otherwise to rotate queries and keys changes nothing
            rotations["keys"] = state.rotation("key", i)
        for name, grid in grids.items():
            shift = state.beside("shifts", name, i)
            if shift is not None and not state.fused:
                shift = _to_basis(name, shift.double(), state, i, attention.head_dim).float()
            sites[name] = Site(grid, rotations.get(name), shift, state.beside("clips", name, i))
        layer.qrot = nn.ModuleList(sites.values()).to(next(attention.parameters()).device)
        attention.qrot_sites = [sites["keys"], sites["values"]]  # a list: no second owner
        layer.input_layernorm.register_forward_hook(_after(sites["qkv"]))
        layer.post_attention_layernorm.register_forward_hook(_after(sites["gate_up"]))
        attention.o_proj.register_forward_pre_hook(_before(sites["o"]))
        layer.mlp.down_proj.register_forward_pre_hook(_before(sites["down"]))
    if any(grids[name]["bits"] < 16 for *_, grids in state.metadata["grids"] for name in _CACHE):
        _use_attention(model)


_CACHE = ("keys", "values")


def _after(site: Site):
    return lambda module, arguments, output: site(output)


def _before(site: Site):
    return lambda module, arguments: (site(arguments[0]), *arguments[1:])


def _use_attention(model: Any) -> None:
    """Let keys and values pass their sites on the way into attention.

    transformers' cache keeps them as they are; they are rounded when they are read, which gives the
    same numbers, as a token's scale depends on no other token.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attention(module, query, key, value, attention_mask, **rest):
        keys, values = module.qrot_sites
        query, key, value = keys.rotate(query), keys(key), values(value)
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **rest)

    AttentionInterface.register("qrot", attention)
    AttentionMaskInterface.register("qrot", sdpa_mask)
    model.set_attn_implementation("qrot")


def _untie(model: Any) -> None:
    if model.lm_head.weight is model.model.embed_tokens.weight:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    model.config.tie_word_embeddings = False


def _wide(x: Tensor) -> Tensor:
    return x.detach().double()


def _write(parameter: Tensor, value: Tensor) -> None:
    parameter.data.copy_(value.to(parameter.dtype))


def _rotated(x: Tensor, rotation: Rotation | None, heads: int = 1) -> Tensor:
    """x R in float64."""
    return x if rotation is None else rotation.refined()(x, heads=heads)


def _heads(x: Tensor, rotation: Rotation | None, log: Tensor | None, head_dim: int) -> Tensor:
    """Rows of heads through R2, and multiplied by e^log by kv head."""
    heads = _rotated(x.unflatten(-1, (-1, head_dim)), rotation, x.ndim - 1)
    if log is not None:
        each = log.double().exp().repeat_interleave(heads.shape[-2] // len(log), 0)
        heads = heads * each.to(heads)
    return heads.flatten(-2)


def _exp(log: Tensor | None) -> Tensor | float:
    return 1.0 if log is None else log.double().exp()


def _to_basis(name: str, x: Tensor, state: State, layer: int, head_dim: int) -> Tensor:
    """A vector at a site in the basis in which it is rounded."""
    log = state.beside("scales", "values" if name == "o" else name, layer)
    if name == "o":
        return _heads(x, state.rotation("value", layer), log, head_dim)
    if name == "down":
        return _rotated(x * _exp(log), state.rotation("down", layer))
    return _rotated(x, state.rotation("residual", layer)) * _exp(log)


def _rotate_layer(layer: Any, i: int, state: State, residual: Rotation | None) -> None:
    """All that `qrot.network` does to one layer, on PyTorch's [out, in]."""
    attention, mlp = layer.self_attn, layer.mlp
    q, k, v, o = attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj
    head_dim, value = attention.head_dim, state.rotation("value", i)
    logs = {n: state.beside("scales", n, i) for n in ("qkv", "gate_up", "down", "keys", "values")}

    readers = ((layer.input_layernorm, (q, k, v), "qkv"),)
    readers += ((layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj), "gate_up"),)
    for norm, linears, name in readers:
        factor = _exp(logs[name])
        for linear in linears:
            weight = _wide(linear.weight) * _wide(norm.weight)
            _write(linear.weight, _rotated(weight, residual) / factor)
        _write(norm.weight, torch.ones_like(norm.weight).double() * factor)

    _outputs(v, lambda x: _heads(x, value, logs["values"], head_dim))
    inverse = None if logs["values"] is None else -logs["values"]
    _write(o.weight, _heads(_wide(o.weight), value, inverse, head_dim))
    if (keys := logs["keys"]) is not None:
        pairs = keys.double().exp().repeat(1, 2)  # [kv_heads or 1, head_dim]
        if hasattr(attention, "q_norm"):
            _write(attention.q_norm.weight, _wide(attention.q_norm.weight) / pairs[0])
            _write(attention.k_norm.weight, _wide(attention.k_norm.weight) * pairs[0])
        else:
            groups = q.weight.shape[0] // head_dim // len(pairs)
            _outputs(q, lambda x: x / pairs.repeat_interleave(groups, 0).flatten())
            _outputs(k, lambda x: x * pairs.flatten())
    down = _exp(logs["down"])
    _outputs(mlp.up_proj, lambda x: x * down)
    weight = _rotated(_wide(mlp.down_proj.weight) / down, state.rotation("down", i))
    _write(mlp.down_proj.weight, weight)
    for linear in (o, mlp.down_proj):
        _outputs(linear, lambda x: _rotated(x, residual))


def _outputs(linear: nn.Linear, change: Callable[[Tensor], Tensor]) -> None:
    """Change what a layer writes: rows of W^T and the bias."""
    _write(linear.weight, change(_wide(linear.weight).T).T)
    if linear.bias is not None:
        _write(linear.bias, change(_wide(linear.bias)))
