"""One decoder layer: hidden states in and out, with every site on its grid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from qrot.grid import fake_quantise
from qrot.integers import quantise
from qrot.kernels.attention import attention
from qrot.kernels.rotate_quantize import rotate_quantize
from qrot.model.config import ModelConfig, RopeScaling
from qrot.model.linear import in_integers, linear
from qrot.model.params import Layers, PackedLinear
from qrot.rotation.basis import IDENTITY, Basis, site_bases
from qrot.rotation.forms import Hadamard, Rotation, rotate
from qrot.rotation.transform import Online, Transform
from qrot.scheme import LayerScheme
from qrot.sites import SITES

# Told every site by name, with what its readers read before it is rounded (keys and values as
# attention reads them), and what each projection writes as `q_output` and so on; what it returns
# takes the place of that.
Hook = Callable[[str, Array], Array]
# Queries, keys, values and window to what attention makes of them.
Attend = Callable[[Array, Any, Any, Any], Array]
Rope = tuple[Float[Array, "length pairs"], Float[Array, "length pairs"]]


class Context(struct.PyTreeNode):
    """What a layer reads besides its weights and its input.

    Attributes:
        online: what acts in it (no `layers` axis).
        window: tokens that it may look back on, itself included; 0 or None for no limit.
        rope: cos and sin of the positions.
        grids: of its sites.
        config: sizes and switches of the network.
        scale_gradient: see `Scheme`.
        packed_cache: which of keys and values attention is given as integers.
    """

    online: Transform | Online
    window: Int[Array, ""] | None
    rope: Rope
    grids: LayerScheme = struct.field(pytree_node=False)
    config: ModelConfig = struct.field(pytree_node=False)
    scale_gradient: bool = struct.field(pytree_node=False, default=True)
    packed_cache: tuple[str, ...] = struct.field(pytree_node=False, default=())


def decoder_layer(
    h: Float[Array, "batch length hidden"],
    layer: Layers,
    context: Context,
    *,
    hook: Hook | None = None,
    attend: Attend = attention,
) -> Float[Array, "batch length hidden"]:
    """One layer (no `layers` axis anywhere).

    Inputs of packed weights are rounded to integers where their grid allows.

    Args:
        h: the residual stream.
        layer: the weights.
        context: what acts beside them.
        hook: looks in, or perturbs.
        attend: instead of `attention`, given the same: queries, keys and values as they enter a
            cache, and the window.

    Returns:
        The residual stream after the layer.

    Raises:
        ValueError: where packed weights meet rotations that are not fused.
    """
    config, eps = context.config, context.config.rms_norm_eps
    seen = hook or (lambda name, x: x)
    sites = _Sites(layer, context)

    def heads(x: Array) -> Array:
        return x.reshape(*x.shape[:-1], -1, config.head_dim)

    def project(name: str, x: Any) -> Array:
        return seen(f"{name}_output", linear(x, layer.linear(name), h.dtype))

    x = sites.round_trip("qkv", seen("qkv", rms_norm(h, layer.attention_norm, eps)))
    q, k, v = (heads(project(name, x)) for name in SITES["qkv"].readers)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = rms_norm(q, layer.q_norm, eps), rms_norm(k, layer.k_norm, eps)
    q, k = apply_rope(q, context.rope), apply_rope(k, context.rope)
    k, v = seen("keys", k), seen("values", v)
    if sites.grids["keys"].on:
        q, k = sites.bases["keys"].cotangent(q), sites.rounded("keys", sites.forward("keys", k))
    v = sites.rounded("values", sites.forward("values", v))
    x = attend(q, k, v, context.window)  # in the basis of the values
    if hook is not None:
        x = sites.forward("o", seen("o", sites.bases["o"].inverse(x)))
    h = h + project("o", sites.inverse("o", sites.rounded("o", x)))

    x = sites.round_trip("gate_up", seen("gate_up", rms_norm(h, layer.mlp_norm, eps)))
    x = jax.nn.silu(project("gate", x)) * project("up", x)
    if hook is None and sites.in_one_pass("down"):
        x = sites.rotated_and_rounded("down", x)
    else:
        x = sites.round_trip("down", seen("down", sites.enter("down", x)))
    return h + project("down", x)


class _Sites:
    """What happens to x at each site of one layer."""

    def __init__(self, layer: Layers, context: Context):
        online, self.grids = context.online, context.grids.sites
        self.fused = isinstance(online, Online)
        self.online, self.scale_gradient = online, context.scale_gradient
        self.integers = {*context.packed_cache, *_integer_sites(layer, context.grids)}
        if self.integers and not self.fused:
            raise ValueError("what is rotated back after rounding is no integer: fuse first")
        if isinstance(online, Transform):
            self.bases = site_bases(online, context.config.head_dim)
            self.shifts = {n: self.bases[n].forward(mu) for n, mu in online.shifts.items()}
        else:
            self.bases, self.shifts = online_bases(online, context.config.head_dim), online.shifts

    def enter(self, name: str, x: Array) -> Array:
        """What acts on the way to weights that hold its inverse, whether x is rounded or not."""
        return rotate(x, self._rotation(name)) if self.fused else x

    def _rotation(self, name: str) -> Rotation | None:
        return self.online.rotations.get(SITES[name].rotation or "")

    def forward(self, name: str, x: Array) -> Array:
        return self.bases[name].forward(x)

    def inverse(self, name: str, x: Any) -> Any:
        return x if name in self.integers else self.bases[name].inverse(x)

    def rounded(self, name: str, x: Array) -> Any:
        """What is in the site's basis already, on its grid."""
        grid, clip, shift = self.grids[name], self.online.clips.get(name), self.shifts.get(name)
        if shift is not None:
            shift = shift.astype(x.dtype)
            x = x - shift
        if name in self.integers:
            return quantise(x, grid, clip=clip).replace(shift=shift)
        x = fake_quantise(x, grid, clip=clip, scale_gradient=self.scale_gradient)
        return x if shift is None else x + shift

    def round_trip(self, name: str, x: Array) -> Any:
        if not self.grids[name].on:
            return x
        return self.inverse(name, self.rounded(name, self.forward(name, x)))

    def in_one_pass(self, name: str) -> bool:
        """Whether what acts online here and rounding to integers are one kernel."""
        return name in self.integers and isinstance(self._rotation(name), Hadamard)

    def rotated_and_rounded(self, name: str, x: Array) -> Any:
        rotation = self._rotation(name)
        assert isinstance(rotation, Hadamard)
        return rotate_quantize(
            x,
            self.grids[name],
            block=rotation.block,
            signs=rotation.signs,
            shift=self.shifts.get(name),
            clip=self.online.clips.get(name),
        )


def online_bases(online: Online, head_dim: int) -> dict[str, Basis]:
    """The bases of a fused network's sites: only that of the keys is undone outside the weights."""
    keys = site_bases(Transform(rotations=online.rotations), head_dim)["keys"]
    return {**dict.fromkeys(SITES, IDENTITY), "keys": keys}


def _integer_sites(layer: Layers, grids: LayerScheme) -> list[str]:
    """The sites that packed weights read and whose grid makes integers."""
    return [
        name
        for name, site in SITES.items()
        if site.readers
        and in_integers(grids.sites[name])
        and any(isinstance(layer.linear(reader), PackedLinear) for reader in site.readers)
    ]


def rms_norm(
    x: Float[Array, "*batch n"], scale: Float[Array, " n"], eps: float
) -> Float[Array, "*batch n"]:
    """x / sqrt(mean(x^2) + eps) * scale, at least in float32 (Zhang and Sennrich, 2019)."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * scale.astype(x.dtype)


def rope_table(config: ModelConfig, length: int, dtype: Any) -> Rope:
    """cos and sin of the rotary embedding, each [length, head_dim / 2] (Su et al., 2021)."""
    exponent = np.arange(0, config.head_dim, 2) / config.head_dim
    frequency = _scaled(config.rope_theta**-exponent, config.rope_scaling)
    angle = jnp.arange(length, dtype=dtype)[:, None] * jnp.asarray(frequency, dtype)
    return jnp.cos(angle), jnp.sin(angle)


def _scaled(frequency: np.ndarray, scaling: RopeScaling | None) -> np.ndarray:
    if scaling is None:
        return frequency
    if scaling.kind == "linear":
        return frequency / scaling.factor
    # llama3: the turns that the original context holds tell slow frequencies from fast ones.
    count = scaling.original_max_position_embeddings * frequency / (2 * np.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    unscaled = np.clip((count - scaling.low_freq_factor) / span, 0, 1)
    return frequency * (unscaled + (1 - unscaled) / scaling.factor)


def apply_rope(
    x: Float[Array, "batch length heads head_dim"], rope: Rope
) -> Float[Array, "batch length heads head_dim"]:
    """Turn the pairs (x_i, x_{i + head_dim / 2}) by their position's angles."""
    cos, sin = (table[:, None, :].astype(x.dtype) for table in rope)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
