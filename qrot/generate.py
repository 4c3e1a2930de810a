"""A network that writes: its weights and cache in integers, token after token."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from qrot.errors import InputError
from qrot.export.build import build, check_plan
from qrot.export.content import in_integers
from qrot.export.format import Plan, fitted
from qrot.export.source import Source, open_source
from qrot.grid import Grid
from qrot.model.config import ModelConfig
from qrot.model.decode import Cache, decode_step, empty_cache, next_token
from qrot.model.io.load import Opened, open_model
from qrot.model.params import Network
from qrot.network import fold, fuse
from qrot.progress import FUSE, ROUND, Stages, millions
from qrot.quantize.pack import linear_bytes, pack
from qrot.quantize.registry import WEIGHT_METHODS
from qrot.quantize.rtn import rtn
from qrot.records import check_name
from qrot.rotation.random import random_rotations
from qrot.rotation.transform import Transform
from qrot.scheme import Scheme
from qrot.scheme import scheme_named as on_grids

_GRIDS = Grid(4, clip="mse"), Grid(4, "asymmetric"), Grid(4, "asymmetric")


def scheme_named(name: str) -> Scheme:
    """The scheme of a name such as W4A4KV4 or W4A16: weights by channel with the best clip, all
    else asymmetric. Raises InputError for another name."""
    return on_grids(name, *_GRIDS)


def open_network(
    source: str,
    stages: Stages,
    *,
    scheme: Scheme | None = None,
    weights: str | None = None,
    row: str | None = None,
) -> tuple[Opened, Network]:
    """The network of a run folder, of a file of one, or of a model as a config names it.

    Args:
        source: its path, or the model's name.
        stages: that progress is told to.
        scheme: in place of the run's. A model of no run is left as it is without one, and gets a
            random Hadamard rotation with one.
        weights: the method that rounds them anew; as in the run if None (a model: to nearest).
        row: of a run's results, where it kept several networks.

    Returns:
        The model that it is of, and the network with its weights in integers, where they are on a
        symmetric grid. What the run kept is taken as it is, unless scheme or weights ask for
        something else.

    Raises:
        InputError: where there is no such source, and where its weights cannot be rounded.
    """
    if _is_run(source):
        found = open_source(Path(source), row=row)
        opened, network = found.opened, _of_run(found, stages, scheme, weights)
    else:
        _check_without_run(weights, row)
        opened = open_model(source)
        network = _of_model(source, opened, stages, scheme or Scheme())
    if network.scheme.rounds_weights and in_integers(network):
        with stages.stage("packing", seconds=ROUND * millions(network)):
            network = jax.block_until_ready(pack(network))
    return opened, network


def _check_without_run(weights: str | None, row: str | None) -> None:
    if row is not None:
        raise InputError("--row: only a run has rows of results")
    if weights is not None:
        check_name(weights, WEIGHT_METHODS, "--weights")
        if WEIGHT_METHODS[weights].text != "none":
            raise InputError(f"--weights {weights}: only a run has a text to calibrate on")


def _of_run(source: Source, stages: Stages, scheme: Scheme | None, weights: str | None) -> Network:
    if source.network is not None and scheme is None and weights is None:
        return source.network
    plan = Plan((), scheme or source.scheme, "float32", transform=fitted(source))
    check_plan(source, plan, weights, same_bits=scheme is None)
    content = build(source, plan, weights, stages)
    with stages.stage("reading, fusing and rounding", seconds=15.0):
        return jax.block_until_ready(content.network())


def _of_model(source: str, opened: Opened, stages: Stages, scheme: Scheme) -> Network:
    with stages.stage(f"reading {source}", seconds=7.0):
        network = fold(opened.model(opened.read()).network)
    if scheme == Scheme():
        return network
    with stages.stage("fusing and rounding", seconds=(FUSE + ROUND) * millions(network)):
        network = fuse(network, Transform(random_rotations(opened.config, 0)))
        return jax.block_until_ready(rtn(network.replace(scheme=scheme)))


def _is_run(source: str) -> bool:
    path = Path(source)
    folder = path.is_dir() and not (path / "config.json").is_file()
    return folder or path.suffix == ".safetensors"


def written(
    network: Network,
    prompt: Int[np.ndarray, " tokens"],
    *,
    steps: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int = 0,
) -> Iterator[int]:
    """Token after token; ends after `steps` or with any of the tokens that end a text.

    Args:
        network: that writes, its weights packed or not.
        prompt: that it goes on from.
        steps: tokens at most.
        temperature: what logits are divided by; 0 takes the likeliest token.
        top_k: draw among so many of the likeliest; None among all.
        seed: of what is drawn.

    Raises:
        InputError: for an empty prompt, for a token that the embedding has no row for, and for more
            tokens than the model has positions for.
    """
    check_prompt(network.config, prompt, steps)
    cache = empty_cache(network, 1, len(prompt) + steps, packed=True)
    step = partial(_step, top_k=top_k)
    each, key = jnp.full(1, temperature, jnp.float32), jax.random.key(seed)
    tokens = jnp.asarray(prompt, jnp.int32)[None]
    for i in range(steps):
        token, cache = step(network, tokens, cache, each, jax.random.fold_in(key, i))
        tokens = token[:, None]
        yield int(token[0])
        if int(token[0]) in network.config.eos_token_ids:
            return


def check_prompt(config: ModelConfig, prompt: Int[np.ndarray, " tokens"], steps: int) -> None:
    """Raise InputError where `written` would, for its reasons.

    Args:
        config: of the network.
        prompt: that it is to go on from.
        steps: tokens at most.
    """
    if not len(prompt):
        raise InputError("the prompt is empty")
    if (beyond := prompt[(prompt < 0) | (prompt >= config.vocab_size)]).size:
        rows = config.vocab_size
        raise InputError(f"the prompt holds token {beyond[0]}, but the embedding has {rows} rows")
    if len(prompt) + steps > config.max_position_embeddings:
        raise InputError(
            f"{len(prompt)} tokens of prompt and {steps} more are over the model's "
            f"{config.max_position_embeddings} positions; take a smaller --tokens"
        )


@partial(jax.jit, static_argnames="top_k", donate_argnames="cache")
def _step(
    network: Network,
    tokens: Int[Array, "batch new"],
    cache: Cache,
    temperature: Float[Array, " batch"],
    key: Key[Array, ""],
    *,
    top_k: int | None,
) -> tuple[Int[Array, " batch"], Cache]:
    logits, cache = decode_step(network, tokens, cache)
    return next_token(logits[:, -1], temperature, key, top_k=top_k), cache


def memory(network: Network) -> str:
    """What weights and cache take, in words."""
    config = network.config
    cache = empty_cache(network, 1, 1, packed=True)
    total, weights = linear_bytes(network.params.layers)
    rest = _bytes((network.params.embed, network.params.head))
    kept = _bytes((cache.keys, cache.values))
    half = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return (
        f"Linear layers {total / 1e6:,.1f} MB ({total / weights:.3f} bytes a weight with scales), "
        f"embedding and head {rest / 1e6:,.1f} MB; cache {kept:,.0f} bytes a token "
        f"({kept / half:.0%} of 16 bits)."
    )


def summary(network: Network, prompt: int, marks: list[float]) -> str:
    """What it took, in words.

    Args:
        network: that wrote.
        prompt: tokens that it went on from.
        marks: the time at the start and after each token, in seconds.
    """
    spans = np.diff(marks)
    first = f"{network.scheme.name}: {prompt} tokens of prompt in {spans[0]:.1f} s with compilation"
    # The second step compiles once more, for one token at a time.
    speed = f", then {1 / np.median(spans[2:]):.1f} tokens/s" if len(spans) > 2 else ""
    return f"{first}{speed}. {memory(network)}"


def _bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
