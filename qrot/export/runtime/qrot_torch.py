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

FORMAT = "qrot rotations 3"
FILE = "online.safetensors"  # in an exported folder: what its weights do not hold
Turn = Callable[..., Tensor]  # turn(x) is x R, turn(x, inverse=True) is x R^T


def hadamard_transform(x: Tensor, factors: list[Tensor], *, inverse: bool = False) -> Tensor:
    """x H / sqrt(n) along the last axis, H being the Kronecker product of the +-1 factors.

    If H is smaller than the axis it acts on each run of its size. Computed in float32 or wider;
    one small product a factor, n times the sum of their orders.
    """
    order = math.prod(len(factor) for factor in factors)
    y = x.to(torch.promote_types(x.dtype, torch.float32)).reshape(-1, order)
    for factor in factors:
        factor = factor.to(y.dtype)
        split = y.reshape(y.shape[0], len(factor), -1)
        # The axis that is done goes to the end: after all factors they are in order again.
        y = torch.einsum("rsk,st->rkt", split, factor.T if inverse else factor)
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


class Rotation(nn.Module):
    """One rotation of one layer in any of qrot's forms: matrix, blocks, Hadamard, Kronecker."""

    def __init__(self, parts: dict[str, Tensor]):
        """parts: by name, "" for a matrix; see `_rotation`."""
        super().__init__()
        self.names = list(parts)
        for name, part in parts.items():
            self.register_buffer(f"part_{name}", part, persistent=False)

    def forward(self, x: Tensor, inverse: bool = False) -> Tensor:
        """x R, or x R^T, in x's dtype and at least in the precision of R."""
        parts = {name: getattr(self, f"part_{name}") for name in self.names}
        if "" in parts:
            return _product(x, parts[""], inverse)
        signs = parts["signs"].to(x.dtype)
        if "left" in parts:
            matrices = parts["left"], parts["right"]
            return _signed(lambda y: _kronecker(y, *matrices, inverse), x, signs, inverse)
        factors = [parts[name] for name in self.names if name.startswith("factor")]
        return _signed(lambda y: hadamard_transform(y, factors, inverse=inverse), x, signs, inverse)


def _signed(turn: Callable[[Tensor], Tensor], x: Tensor, signs: Tensor, inverse: bool) -> Tensor:
    return turn(x) * signs if inverse else turn(x * signs)


def _product(x: Tensor, matrix: Tensor, inverse: bool) -> Tensor:
    wide = torch.promote_types(x.dtype, matrix.dtype)
    matrix = (matrix.mT if inverse else matrix).to(wide)
    if matrix.ndim == 2:
        return (x.to(wide) @ matrix).to(x.dtype)
    if matrix.ndim == 4:  # one for each kv head, and x is [batch, heads, length, head_dim]
        matrix = matrix.repeat_interleave(x.shape[1] // len(matrix), 0)
        split = x.to(wide).unflatten(-1, matrix.shape[1:3])
        return torch.einsum("nhlbi,hbij->nhlbj", split, matrix).flatten(-2).to(x.dtype)
    split = x.to(wide).unflatten(-1, matrix.shape[:2])
    return torch.einsum("...bi,bij->...bj", split, matrix).flatten(-2).to(x.dtype)


def _kronecker(x: Tensor, left: Tensor, right: Tensor, inverse: bool) -> Tensor:
    left, right = (left.mT, right.mT) if inverse else (left, right)
    wide = torch.promote_types(x.dtype, left.dtype)
    split = x.to(wide).unflatten(-1, (left.shape[-1], right.shape[-1]))
    return (left.mT.to(wide) @ split @ right.to(wide)).flatten(-2).to(x.dtype)


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
        """Only turn: for queries."""
        return x if self.rotation is None else self.rotation(x)

    def forward(self, x: Tensor) -> Tensor:
        """Turn and round."""
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

    def rotation(self, site: str, layer: int) -> Rotation | None:
        """The rotation of a site: R1 `residual`, R2 `value`, R3 `key`, R4 `down`; None if off."""
        prefix = f"rotations.{site}"
        parts = {
            name[len(prefix) + 1 :]: tensor
            for name, tensor in self.tensors.items()
            if name == prefix or name.startswith(prefix + ".")
        }
        if not parts:
            return None
        # Layers share one, but for R2 and what is learned of R3 and R4, which have an axis more.
        more = {"residual": 9, "value": 0, "key": 5, "down": 4}[site]
        layered = parts[""].ndim >= more if "" in parts else parts["signs"].ndim == 2
        return Rotation(
            {name: tensor[layer] if layered else tensor for name, tensor in parts.items()}
        )


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
      or Qwen3. Weights are turned in float64 and keep their dtype; they are not rounded.
    path: `rotations.safetensors` of a run or of `qrot export --format torch`.
    Raises ValueError where the sizes do not fit.
    """
    state = State(path)
    if state.fused:
        raise ValueError(f"{path}: belongs to weights that hold it already; use load(folder)")
    decoder = model.model
    layers, residual = decoder.layers, state.rotation("residual", 0)
    covered, matrix = state.metadata["grids"][-1][1], state.tensors.get("rotations.residual")
    size = None if matrix is None else matrix[..., 0].numel()
    if covered != len(layers) or size not in (None, model.config.hidden_size):
        raise ValueError(f"{path}: made for {covered} layers of {size}, which this model has not")
    with torch.no_grad():
        _untie(model)
        head = model.lm_head.weight
        _write(head, _turned(_wide(head) * _wide(decoder.norm.weight), residual))
        decoder.norm.weight.fill_(1)
        table = decoder.embed_tokens.weight
        _write(table, _turned(_wide(table), residual))
        for i, layer in enumerate(layers):
            _rotate_layer(layer, i, state, residual)
    install(model, state)
    return model


def install(model: Any, state: State) -> None:
    """Hook rotations and grids into a model whose weights are turned."""
    for i, layer in enumerate(model.model.layers):
        grids, attention = state.grids(i), layer.self_attn
        head_dim = attention.head_dim

        def site(name: str, turn: str | None = None, i=i, grids=grids, head_dim=head_dim) -> Site:
            shift = state.beside("shifts", name, i)
            if shift is not None and not state.fused:
                shift = _to_basis(name, shift.double(), state, i, head_dim).float()
            rotation = None if turn is None else state.rotation(turn, i)
            return Site(grids[name], rotation, shift, state.beside("clips", name, i))

        sites = {
            "qkv": site("qkv"),
            "o": site("o"),
            "gate_up": site("gate_up"),
            "down": site("down", "down"),
            # Without a grid, turning both queries and keys would change nothing.
            "keys": site("keys", "key" if grids["keys"]["bits"] < 16 else None),
            "values": site("values"),
        }
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
        plain = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return plain(module, query, key, value, attention_mask, **rest)

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


def _turned(x: Tensor, rotation: Rotation | None, inverse: bool = False) -> Tensor:
    """x R in float64, R brought to orthogonality within float64 by one Newton-Schulz step."""
    if rotation is None:
        return x
    refined = {}
    for name in rotation.names:
        part = getattr(rotation, f"part_{name}").to(x)
        if name in ("", "left", "right"):
            part = 1.5 * part - 0.5 * part @ (part.mT @ part)
        refined[name] = part
    return Rotation(refined)(x, inverse)


def _heads(x: Tensor, rotation: Rotation | None, log: Tensor | None, head_dim: int) -> Tensor:
    """Rows of heads through R2, and multiplied by e^log by kv head."""
    heads = x.unflatten(-1, (-1, head_dim))
    if rotation is not None:
        part = getattr(rotation, "part_", None)
        if part is not None and part.ndim == 4:  # one for each kv head
            times = heads.shape[-2] // part.shape[0]
            each = [
                _turned(heads[..., h, :], Rotation({"": part[h // times]}))
                for h in range(heads.shape[-2])
            ]
            heads = torch.stack(each, -2)
        else:
            heads = _turned(heads, rotation)
    if log is not None:
        heads = heads * _exp(log).repeat_interleave(heads.shape[-2] // len(log), 0).to(heads)
    return heads.flatten(-2)


def _exp(log: Tensor | None) -> Tensor | float:
    return 1.0 if log is None else log.double().exp()


def _to_basis(name: str, x: Tensor, state: State, layer: int, head_dim: int) -> Tensor:
    """A vector at a site in the basis in which it is rounded."""
    log = state.beside("scales", "values" if name == "o" else name, layer)
    if name == "o":
        return _heads(x, state.rotation("value", layer), log, head_dim)
    if name == "down":
        return _turned(x * _exp(log), state.rotation("down", layer))
    return _turned(x, state.rotation("residual", layer)) * _exp(log)


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
            _write(linear.weight, _turned(weight, residual) / factor)
        _write(norm.weight, torch.ones_like(norm.weight).double() * factor)

    _outputs(v, lambda x: _heads(x, value, logs["values"], head_dim))
    inverse = None if logs["values"] is None else -logs["values"]
    _write(o.weight, _heads(_wide(o.weight), value, inverse, head_dim))
    if logs["keys"] is not None:
        pairs = _exp(logs["keys"]).repeat(1, 2)  # [kv_heads or 1, head_dim]
        if hasattr(attention, "q_norm"):
            _write(attention.q_norm.weight, _wide(attention.q_norm.weight) / pairs[0])
            _write(attention.k_norm.weight, _wide(attention.k_norm.weight) * pairs[0])
        else:
            groups = q.weight.shape[0] // head_dim // len(pairs)
            _outputs(q, lambda x: x / pairs.repeat_interleave(groups, 0).flatten())
            _outputs(k, lambda x: x * pairs.flatten())
    down = _exp(logs["down"])
    _outputs(mlp.up_proj, lambda x: x * down)
    turned = _turned(_wide(mlp.down_proj.weight) / down, state.rotation("down", i))
    _write(mlp.down_proj.weight, turned)
    for linear in (o, mlp.down_proj):
        _outputs(linear, lambda x: _turned(x, residual))


def _outputs(linear: nn.Linear, change: Callable[[Tensor], Tensor]) -> None:
    """Change what a layer writes: rows of W^T and the bias."""
    _write(linear.weight, change(_wide(linear.weight).T).T)
    if linear.bias is not None:
        _write(linear.bias, change(_wide(linear.bias)))
