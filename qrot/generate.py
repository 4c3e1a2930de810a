"""A network that writes: its weights and cache in integers, token after token."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from qrot.errors import InputError
from qrot.progress import FUSE, ROUND, Stages, millions
from qrot.export.fitted import by_gptq, fuse_whole, read_fitted, uses_gptq
from qrot.grid import OFF, Grid
from qrot.model.decode import Cache, decode_step, empty_cache, next_token
from qrot.network import fold_norms, fuse
from qrot.model.io.load import Opened, open_model
from qrot.model.params import Params
from qrot.quantize.pack import linear_bytes, pack
from qrot.quantize.rtn import rtn
from qrot.rotation.random import random_rotations
from qrot.rotation.forms import Clips, Rotations, Shifts
from qrot.scheme import Scheme


@dataclass(frozen=True)
class Writer:
    """A network with its weights packed, and all that acts beside them."""

    opened: Opened
    params: Params
    scheme: Scheme
    rotations: Rotations
    shifts: Shifts | None = None
    clips: Clips | None = None


def scheme_named(name: str) -> Scheme:
    """The scheme of a name such as W4A4KV4 or W4A16: weights by channel with the best clip, all
    else asymmetric. Raises InputError for another name."""
    match = re.fullmatch(r"W(\d+)A(\d+)(?:KV(\d+))?", name)
    if match is None:
        raise InputError(f"--scheme: {name!r} is no name such as W4A4KV4, W8A8 or W4A16")
    weights, activations, cache = (int(bits) if bits else OFF for bits in match.groups())
    cache_grid = Grid(cache, "asymmetric")
    inputs = Grid(activations, "asymmetric")
    return Scheme(Grid(weights, clip="mse"), inputs, keys=cache_grid, values=cache_grid)


def writer(
    source: str, stages: Stages, *, scheme: Scheme | None = None, weights: str | None = None
) -> Writer:
    """The network of a run folder, a rotation file, or a model as a config names it.

    scheme: in place of the run's. A model of no run is left as it is without one, and gets a random
      Hadamard rotation with one. weights: rtn or gptq; as in the run if None (a model: rtn).
    Raises InputError where there is no such source, and where its weights cannot be packed.
    """
    if _is_run(source):
        fitted = read_fitted(Path(source))
        by, scheme = uses_gptq(fitted, weights), scheme or fitted.scheme
        opened, clips = fitted.opened, fitted.learned.clips
        with stages.stage("reading and fusing", seconds=15.0):
            params, rotations, shifts = jax.block_until_ready(fuse_whole(fitted, fitted.learned))
        rounded = by_gptq(fitted, params, rotations, scheme, stages) if by else None
    else:
        if weights == "gptq":
            raise InputError("--weights gptq: only a run has a text to calibrate on")
        opened, scheme = open_model(source), scheme or Scheme()
        rounded = shifts = clips = None
        with stages.stage(f"reading {source}", seconds=7.0):
            model = fold_norms(opened.model(opened.read()))
            params, rotations = model.params, Rotations(fused=True)
        if scheme != Scheme():
            with stages.stage("fusing", seconds=FUSE * millions(model)):
                params, rotations, _ = jax.block_until_ready(
                    fuse(params, random_rotations(opened.config, 0), opened.config)
                )
    if scheme.rounds_weights:
        seconds = 2 * ROUND * millions(opened.model(params))
        with stages.stage("packing", seconds=seconds):
            rounded = rtn(params, scheme) if rounded is None else rounded
            params = jax.block_until_ready(pack(rounded, params, scheme, shifts=shifts))
    return Writer(opened, params, scheme, rotations, shifts, clips)


def _is_run(source: str) -> bool:
    path = Path(source)
    folder = path.is_dir() and not (path / "config.json").is_file()
    return folder or path.suffix == ".safetensors"


def written(
    network: Writer,
    prompt: Int[np.ndarray, " tokens"],
    *,
    steps: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int = 0,
) -> Iterator[int]:
    """Token after token; ends after `steps` or at end-of-text.

    temperature: 0 takes the likeliest token. Raises InputError for an empty prompt and for more
    tokens than the model has positions for.
    """
    config = network.opened.config
    length = len(prompt) + steps
    if not len(prompt):
        raise InputError("the prompt is empty")
    if length > config.max_position_embeddings:
        raise InputError(
            f"{len(prompt)} tokens of prompt and {steps} more are over the model's "
            f"{config.max_position_embeddings} positions; take a smaller --tokens"
        )
    cache = empty_cache(config, 1, length, network.params.embed.dtype, packed=network.scheme)
    state = (network.params, network.rotations, network.shifts, network.clips)
    step = partial(_step, config=config, scheme=network.scheme, top_k=top_k)
    heat, key = jnp.full(1, temperature, jnp.float32), jax.random.key(seed)
    tokens = jnp.asarray(prompt, jnp.int32)[None]
    for i in range(steps):
        token, cache = step(state, tokens, cache, heat, jax.random.fold_in(key, i))
        tokens = token[:, None]
        yield int(token[0])
        if int(token[0]) == config.eos_token_id:
            return


@partial(jax.jit, static_argnames=("config", "scheme", "top_k"), donate_argnames="cache")
def _step(state, tokens, cache: Cache, heat, key, *, config, scheme, top_k):
    params, rotations, shifts, clips = state
    logits, cache = decode_step(
        params,
        tokens,
        cache,
        config,
        rotations=rotations,
        scheme=scheme,
        shifts=shifts,
        clips=clips,
    )
    return next_token(logits[:, -1], heat, key, top_k=top_k), cache


def memory(network: Writer) -> str:
    """What weights and cache take, in words."""
    config = network.opened.config
    cache = empty_cache(config, 1, 1, network.params.embed.dtype, packed=network.scheme)
    total, weights = linear_bytes(network.params.layers)
    rest = _bytes((network.params.embed, network.params.head))
    kept = _bytes((cache.keys, cache.values))
    half = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return (
        f"Linear layers {total / 1e6:,.1f} MB ({total / weights:.3f} bytes a weight with scales), "
        f"embedding and head {rest / 1e6:,.1f} MB; cache {kept:,.0f} bytes a token "
        f"({kept / half:.0%} of 16 bits)."
    )


def summary(network: Writer, told: int, marks: list[float]) -> str:
    """What it took, in words. marks: the time at the start and after each token."""
    spans = np.diff(marks)
    first = f"{network.scheme.name}: {told} tokens of prompt in {spans[0]:.1f} s with compilation"
    # The second step compiles once more, for one token at a time.
    speed = f", then {1 / np.median(spans[2:]):.1f} tokens/s" if len(spans) > 2 else ""
    return f"{first}{speed}. {memory(network)}"


def _bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
