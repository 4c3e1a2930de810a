"""Rotated and quantised models in plain PyTorch: one file that needs torch and transformers.

`load(folder)` opens what `qrot export` wrote; `apply_rotations(model, file)` rotates a model that
is loaded already. Weights hold what can be fused; what is left is hooked in: `Site` rotates and
rounds the inputs of the projections, and an attention function does it for keys and values.

Rows are vectors, x -> x R, and weights [out, in]: a reading one becomes W R, a writing one R^T W.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

FORMAT = "qrot rotations 4"
# In an exported folder: what its weights do not hold, and what their files are named for it.
FILE, VARIANT = "qrot/online.safetensors", "online"
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
_CACHE = ("keys", "values")
_SITES = ("qkv", "o", "gate_up", "down", *_CACHE)
_ROTATIONS, _KINDS = ("residual", "value", "key", "down"), ("scales", "shifts", "clips")
# Bits of the mantissa, the lowest exponent, the largest value.
_FLOATS = {"e2m1": (1, 0, 6.0), "e4m3": (3, -6, 448.0), "e5m2": (2, -14, 57344.0)}
# The settings of a grid, and the words that each of them may be.
_GRID = dict.fromkeys(("bits", "group", "threshold"), ()) | {
    "kind": ("symmetric", "symmetric_half", "asymmetric"),
    "granularity": ("tensor", "token", "head", "group"),
    "clip": ("four_over_six",),
    "codebook": ("int", *_FLOATS),
    "scale": ("float32", "e4m3", "e8m0"),
}
Parts = dict[str, Tensor]


def hadamard_transform(x: Tensor, factors: list[Tensor], *, inverse: bool = False) -> Tensor:
    """x H / sqrt(n) along the last axis, H being the Kronecker product of the +-1 factors; if it is
    smaller than the axis, of each run of its size. In float32 or wider, one product a factor."""
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
    by, last = grid["granularity"], (-1,)
    if by == "group":
        wide = wide.unflatten(-1, (-1, grid["group"]))
    token = (1, 3) if x.ndim == 4 else last
    axes = {"group": last, "head": last, "token": token, "tensor": tuple(range(x.ndim))}[by]
    book = grid.get("codebook", "int")
    if clip is None and grid["clip"] == "four_over_six":
        ways = [fake_quantise(x, grid, torch.tensor(ratio)) for ratio in (1.0, 1.5)]
        wrong = [(y - x).square().reshape(wide.shape).sum(axes, keepdim=True) for y in ways]
        first, second = (y.reshape(wide.shape) for y in ways)
        return torch.where(wrong[1] < wrong[0], second, first).reshape(x.shape)
    # In float32 as qrot has it: 0.9 is another number in float64.
    clip = torch.tensor(grid["clip"], dtype=torch.float32) if clip is None else clip
    clip = clip.to(wide.device, wide.dtype)
    half = 2 ** (bits - 1)
    zero: Tensor | int = half
    if kind == "asymmetric":
        low = wide.amin(axes, keepdim=True).clamp(max=0) * clip
        high = wide.amax(axes, keepdim=True).clamp(min=0) * clip
        scale = (high - low) / (2**bits - 1)
        scale = torch.where(scale == 0, 1, scale)
        zero = (-low / scale).round()
    else:
        steps = {"symmetric": half - 1.0, "symmetric_half": half - 0.5}[kind]
        steps = _FLOATS[book][2] if book in _FLOATS else steps
        scale = _stored(wide.abs().amax(axes, keepdim=True) * clip, steps, grid.get("scale"))
        scale = torch.where(scale == 0, 1, scale)
    if book in _FLOATS:
        largest = _FLOATS[book][2]
        values = _nearest(wide / scale, book).clamp(-largest, largest) * scale
        return values.reshape(x.shape).to(x.dtype)
    q = torch.clamp((wide / scale).round(), -zero, 2**bits - 1 - zero)
    return (q * scale).reshape(x.shape).to(x.dtype)


def _nearest(t: Tensor, book: str) -> Tensor:
    """The number of a codebook next to t, ties to even; past the largest as if it went on."""
    mantissa, lowest, _ = _FLOATS[book]
    step = torch.ldexp(torch.ones_like(t), (torch.frexp(t).exponent - 1).clamp(lowest) - mantissa)
    return (t / step).round() * step


def _stored(absmax: Tensor, largest: float, rule: str | None) -> Tensor:
    """absmax / largest as scales are stored: powers of two, or E4M3 times one of them a token."""
    if rule == "e8m0":
        fraction, exponent = torch.frexp(absmax)
        exponent = exponent - 1 + (fraction >= 0.875).int() - int(math.log2(largest))
        return torch.where(absmax > 0, torch.ldexp(torch.ones_like(absmax), exponent), 0)
    scale = absmax / largest
    if rule == "e4m3":
        fraction, exponent = torch.frexp(scale.amax((-2, -1), keepdim=True) / 448.0)
        token = torch.ldexp(torch.ones_like(fraction), exponent - (fraction == 0.5).int())
        scale = _nearest(scale / token, "e4m3").clamp(2.0**-9) * token
    return scale


def _dense(parts: Parts, x: Tensor, inverse: bool) -> Tensor:
    return x @ (parts["matrix"].mT if inverse else parts["matrix"])


def _blocks(parts: Parts, x: Tensor, inverse: bool) -> Tensor:
    blocks = parts["blocks"].mT if inverse else parts["blocks"]
    return torch.einsum("...bi,bij->...bj", x.unflatten(-1, blocks.shape[:2]), blocks).flatten(-2)


def _hadamard(parts: Parts, x: Tensor, inverse: bool) -> Tensor:
    factors, signs = [parts[name] for name in parts if name in _FACTORS], parts["signs"]
    y = hadamard_transform(x if inverse else x * signs, factors, inverse=inverse)
    return y * signs if inverse else y


def _kronecker(parts: Parts, x: Tensor, inverse: bool) -> Tensor:
    left, right, signs = parts["left"], parts["right"], parts["signs"]
    left, right = (left.mT, right.mT) if inverse else (left, right)
    split = (x if inverse else x * signs).unflatten(-1, (left.shape[-1], right.shape[-1]))
    y = (left.mT @ split @ right).flatten(-2)
    return y * signs if inverse else y


_FACTORS = tuple(f"factor{i}" for i in range(10))  # of Hadamard matrices; no stack has them
_ORTHOGONAL = ("matrix", "blocks", "left", "right")
# By the name of a form: what applies it, and its parts; the first one tells its stack, having so
# many axes of its own.
_FORMS = {
    "dense": (_dense, ("matrix",), 2),
    "blocks": (_blocks, ("blocks",), 3),
    "hadamard": (_hadamard, ("signs", *_FACTORS), 1),
    "kronecker": (_kronecker, ("signs", "left", "right"), 1),
}


class Rotation(nn.Module):
    """One rotation of one layer in any of qrot's forms, the same for all heads or one a kv head."""

    def __init__(self, form: str, parts: Parts):
        """form: as the file has it; parts: by name, with one axis in front for kv heads or none."""
        super().__init__()
        self.form, self.names = form, list(parts)
        self._apply_form, (part, *_), axes = _FORMS[form]
        self.per_head = parts[part].ndim > axes
        self.size = parts[part].shape[-1] * (parts[part].shape[-3] if form == "blocks" else 1)
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
        wide = torch.promote_types(x.dtype, self.parts[_FORMS[self.form][1][0]].dtype)
        parts = {n: part if n in _FACTORS else part.to(wide) for n, part in self.parts.items()}
        if not self.per_head:
            return self._apply_form(parts, x.to(wide), inverse).to(x.dtype)
        axes = {name: None if name in _FACTORS else 0 for name in parts}
        for name in set(parts) - set(_FACTORS):
            times = x.shape[heads] // len(parts[name])  # query heads that share a kv head
            parts[name] = parts[name].repeat_interleave(times, 0)
        apply = torch.vmap(self._apply_form, (axes, heads, None), heads)
        return apply(parts, x.to(wide), inverse).to(x.dtype)

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

    def __init__(self, path: str | Path, *, fused: bool):
        """Raises ValueError where it is not of this format, or not for weights as `fused` says."""
        with safe_open(path, "pt") as file:
            self.tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = {key: json.loads(value) for key, value in (file.metadata() or {}).items()}
        if metadata.get("format") != FORMAT or "grids" not in metadata:
            raise ValueError(f"{path}: no rotation file of this format ({FORMAT}); export it again")
        if bool(metadata.get("fused")) != fused:
            weights = "as they came" if fused else "that hold it already; use load(folder)"
            raise ValueError(f"{path}: belongs to weights {weights}")
        self.path, self.metadata, self.fused = path, metadata, fused
        self.layers = metadata["grids"][-1][1]
        for name in self._unknown():
            raise ValueError(f"{path}: {name} is damaged, or nothing that this module knows")

    def _unknown(self) -> Iterator[str]:
        """What this module would pass over in silence."""
        grids, known, forms = self.metadata["grids"], set(), self.metadata["forms"]
        for name, about in forms.items():
            if name in _ROTATIONS[2 * self.fused :] and about.get("form") in _FORMS:
                known |= {f"rotations.{name}.{part}" for part in _FORMS[about["form"]][1]}
        yield from forms.keys() - {name.split(".")[1] for name in known & self.tensors.keys()}
        stacked = {f"{kind}.{site}" for kind in _KINDS[self.fused :] for site in _SITES}
        for name, x in self.tensors.items():
            whole = name in known or (name in stacked and len(x) == self.layers)
            if not whole or not x.isfinite().all():
                yield name
        if [start for start, *_ in grids] != [0, *(stop for _, stop, _ in grids[:-1])]:
            yield "the order of its layers"
        for *_, sites in grids:
            yield from (f"the site {name}" for name in sites.keys() ^ set(_SITES))
            settings = [item for grid in sites.values() for item in grid.items()]
            known = {(key, word) for key, words in _GRID.items() for word in words}
            yield from (
                f"a grid's {key} {value}"
                for key, value in settings
                if key not in _GRID or (isinstance(value, str) and (key, value) not in known)
            )

    def beside(self, kind: str, site: str, layer: int) -> Tensor | None:
        """The shift, the clip or the scales (logarithms) of one site of one layer."""
        stacked = self.tensors.get(f"{kind}.{site}")
        return None if stacked is None else stacked[layer]

    def factor(self, site: str, layer: int) -> Tensor | float:
        """The scales themselves; 1 for none."""
        log = self.beside("scales", site, layer)
        return 1.0 if log is None else log.double().exp()

    def rotation(self, name: str, layer: int) -> Rotation | None:
        """The rotation R1 `residual`, R2 `value`, R3 `key` or R4 `down` of a layer; None if off."""
        if name not in self.metadata["forms"]:
            return None
        about, prefix = self.metadata["forms"][name], f"rotations.{name}."
        form = about["form"]
        parts = {n[len(prefix) :]: x for n, x in self.tensors.items() if n.startswith(prefix)}
        order = math.prod(len(x) for n, x in parts.items() if n in _FACTORS)
        if form == "hadamard" and order != (about["block"] or parts["signs"].shape[-1]):
            raise ValueError(f"{self.path}: {name} lacks a factor of its Hadamard matrix")
        _, (part, *_), axes = _FORMS[form]
        if parts[part].ndim > axes:  # layers have one each
            if len(parts[part]) != self.layers:
                raise ValueError(f"{self.path}: {name} is not one a layer")
            parts = {n: x if n in _FACTORS else x[layer] for n, x in parts.items()}
        return Rotation(form, parts)


def load(folder: str | Path, **options: Any) -> Any:
    """A causal language model out of a folder that `qrot export` wrote, its online part hooked in.

    options: for transformers' `from_pretrained`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    config = AutoConfig.for_model(**settings.get("rotated_model", settings))
    options = {"config": config, "variant": VARIANT, **options}
    state = State(Path(folder) / FILE, fused=True)
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    install(model, state)
    return model.eval()


def apply_rotations(model: Any, path: str | Path) -> Any:
    """Rotate a loaded model in place, and hook in what acts at run time, grids included.

    model: of transformers, of the weights that the rotations were fitted to, which are rotated in
      float64 and keep their dtype. Raises ValueError where the sizes do not fit.
    path: `rotations.safetensors` of a run or of `qrot export --format torch`.
    """
    state = State(path, fused=False)
    _check_fit(model, state)
    decoder, residual = model.model, state.rotation("residual", 0)
    with torch.no_grad():
        if model.lm_head.weight is decoder.embed_tokens.weight:
            model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        model.config.tie_word_embeddings = False
        head, table = model.lm_head.weight, decoder.embed_tokens.weight
        head.copy_(_rotated(head.double() * decoder.norm.weight.double(), residual))
        decoder.norm.weight.fill_(1)
        table.copy_(_rotated(table.double(), residual))
        for i, layer in enumerate(decoder.layers):
            _rotate_layer(layer, i, state, residual)
    install(model, state)
    return model


def _check_fit(model: Any, state: State) -> None:
    config, layers = model.config, model.model.layers
    head_dim = layers[0].self_attn.head_dim
    sizes = config.hidden_size, head_dim, head_dim, config.intermediate_size
    rotations = zip((state.rotation(name, 0) for name in _ROTATIONS), sizes, strict=True)
    known = config.model_type in ARCHITECTURES and state.layers == len(layers)
    if not known or any(rotation and rotation.size != n for rotation, n in rotations):
        raise ValueError(f"{state.path}: made for {state.layers} layers of another model")


def install(model: Any, state: State) -> None:
    """Hook rotations and grids into a model whose weights are rotated."""
    _check_fit(model, state)
    for i, layer in enumerate(model.model.layers):
        attention, runs = layer.self_attn, state.metadata["grids"]
        grids = next(sites for start, stop, sites in runs if start <= i < stop)
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
        norms = {"qkv": layer.input_layernorm, "gate_up": layer.post_attention_layernorm}
        for name, norm in norms.items():
            norm.register_forward_hook(lambda m, x, y, site=sites[name]: site(y))
        for linear, name in ((attention.o_proj, "o"), (layer.mlp.down_proj, "down")):
            linear.register_forward_pre_hook(lambda m, x, site=sites[name]: (site(x[0]), *x[1:]))
    cache = [grids[name]["bits"] for *_, grids in state.metadata["grids"] for name in _CACHE]
    if min(cache) < 16:
        _use_attention(model)


def _use_attention(model: Any) -> None:
    """Let keys and values pass their sites on the way from the cache into attention, which gives
    the same numbers as rounding them before it: a token's scale depends on no other token."""
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


def _to_basis(name: str, x: Tensor, state: State, layer: int, head_dim: int) -> Tensor:
    """A vector at a site in the basis in which it is rounded."""
    if name == "o":
        log = state.beside("scales", "values", layer)
        return _heads(x, state.rotation("value", layer), log, head_dim)
    if name == "down":
        return _rotated(x * state.factor(name, layer), state.rotation("down", layer))
    return _rotated(x, state.rotation("residual", layer)) * state.factor(name, layer)


def _rotate_layer(layer: Any, i: int, state: State, residual: Rotation | None) -> None:
    """All that `qrot.network` does to one layer, on PyTorch's [out, in]."""
    attention, mlp = layer.self_attn, layer.mlp
    q, k, v, o = attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj
    head_dim, value = attention.head_dim, state.rotation("value", i)
    keys, values = (state.beside("scales", name, i) for name in _CACHE)
    readers = ((layer.input_layernorm, (q, k, v), "qkv"),)
    readers += ((layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj), "gate_up"),)
    for norm, linears, name in readers:
        factor = state.factor(name, i)
        for linear in linears:
            weight = linear.weight.double() * norm.weight.double()
            linear.weight.copy_(_rotated(weight, residual) / factor)
        norm.weight.copy_(torch.ones_like(norm.weight).double() * factor)

    _outputs(v, lambda x: _heads(x, value, values, head_dim))
    inverse = None if values is None else -values
    o.weight.copy_(_heads(o.weight.double(), value, inverse, head_dim))
    if keys is not None:
        pairs = keys.double().exp().repeat(1, 2)  # [kv_heads or 1, head_dim]
        if hasattr(attention, "q_norm"):
            attention.q_norm.weight.copy_(attention.q_norm.weight.double() / pairs[0])
            attention.k_norm.weight.copy_(attention.k_norm.weight.double() * pairs[0])
        else:
            groups = q.weight.shape[0] // head_dim // len(pairs)
            _outputs(q, lambda x: x / pairs.repeat_interleave(groups, 0).flatten())
            _outputs(k, lambda x: x * pairs.flatten())
    down = state.factor("down", i)
    _outputs(mlp.up_proj, lambda x: x * down)
    weight = _rotated(mlp.down_proj.weight.double() / down, state.rotation("down", i))
    mlp.down_proj.weight.copy_(weight)
    for linear in (o, mlp.down_proj):
        _outputs(linear, lambda x: _rotated(x, residual))


def _outputs(linear: nn.Linear, change: Callable[[Tensor], Tensor]) -> None:
    """Change what a layer writes: rows of W^T and the bias."""
    linear.weight.copy_(change(linear.weight.double().T).T)
    if linear.bias is not None:
        linear.bias.copy_(change(linear.bias.double()))
