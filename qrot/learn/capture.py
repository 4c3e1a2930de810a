"""Site inputs of the full-precision network, captured once."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from qrot.model.config import ModelConfig
from qrot.model.forward import forward_with_taps
from qrot.model.params import Model
from qrot.rotation.rotations import Shifts


def capture(
    model: Model, rows: Int[np.ndarray, "count length"], vectors: int, seed: int
) -> dict[str, Float[np.ndarray, "layers vectors ..."]]:
    """Inputs of every site at `vectors` random positions (or all there are), on the host.

    A window yields half its positions, so that few windows have to be run.

    The first token of a window is left out: as an attention sink it is a hundred times larger than
    any other, and alone it would decide a mean or a squared error.
    """
    draw = np.random.default_rng(seed)
    rows = draw.permutation(rows)
    each = max(rows.shape[1] // 2, -(-vectors // len(rows)))
    each = min(each, rows.shape[1] - 1)
    needed = min(len(rows), -(-vectors // each))
    parts = []
    for row in rows[:needed]:
        taps = 1 + draw.permutation(rows.shape[1] - 1)[:each]
        seen = _tapped(model.params, jnp.asarray(row[None]), jnp.asarray(taps), model.config)
        parts.append(jax.tree.map(np.asarray, seen))
    return jax.tree.map(lambda *xs: np.concatenate(xs, axis=1)[:, :vectors], *parts)


@partial(jax.jit, static_argnums=3)
def _tapped(params, tokens, taps, config: ModelConfig):
    return forward_with_taps(params, tokens, config, taps=taps)[1]


def mean_shifts(model: Model, rows: Int[np.ndarray, "count length"], *, windows: int = 8) -> Shifts:
    """The mean input of each site over some windows, their first tokens left out."""
    taps = jnp.arange(1, rows.shape[1])
    seen = [
        _mean(model.params, jnp.asarray(row[None]), taps, model.config) for row in rows[:windows]
    ]
    means = jax.tree.map(lambda *xs: sum(xs) / len(xs), *seen)
    return Shifts(**{name: means[name] for name in ("qkv", "o", "gate_up", "down")})


@partial(jax.jit, static_argnums=3)
def _mean(params, tokens, taps, config: ModelConfig):
    return jax.tree.map(lambda x: x.mean(axis=1), _tapped(params, tokens, taps, config))
