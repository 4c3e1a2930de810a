"""Benchmarks: ratios measured in one run, after a warm-up, in turn, as medians."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

from qrot.evaluate.perplexity import token_nll
from qrot.grid import Grid
from qrot.learn.capture import mean_shifts
from qrot.learn.end_to_end import cross_entropy
from qrot.learn.loop import make_optimiser, update
from qrot.learn.settings import Learn
from qrot.learn.start import starting_point
from qrot.model.forward import forward
from qrot.model.fuse import fold_norms
from qrot.model.params import Layers, Model
from qrot.quantize.gptq import Gptq, round_layer
from qrot.quantize.layer_by_layer import Seen, layer_by_layer, weight_grids
from qrot.rotation.random import RotationSites
from qrot.rotation.rotations import Rotations
from qrot.scheme import Scheme


def in_turn(
    functions: dict[str, Callable[[], Any]], rounds: int, advance: Callable[[], None]
) -> dict[str, float]:
    """Median seconds of each function, run in turn after one run that is not counted.

    In turn, so that a machine that slows down for a while does so for all of them.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(rounds + 1):
        for name, function in functions.items():
            began = time.perf_counter()
            jax.block_until_ready(function())
            if number:
                seconds[name].append(time.perf_counter() - began)
            advance()
    return {name: statistics.median(times) for name, times in seconds.items()}


def peak_memory() -> int:
    """Peak bytes of the device, or of the process where the device is the CPU."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def bench_learn(
    model: Model, *, weight_bits: int, batch: int, length: int, rounds: int, advance
) -> dict[str, Any]:
    """Cost of one learning step (cross_entropy, W<weight_bits>A4KV4), part by part, in seconds.

    The parts add up to the step: forward is the fake-quantised pass without rotations, rotation
    what rotations add to it, backward the derivative, retraction the optimiser.
    """
    model = fold_norms(model)
    params, config = model.params, model.config
    cache = Grid(4, "asymmetric")
    scheme = Scheme(Grid(weight_bits), Grid(4, "asymmetric"), cache, cache)
    settings = Learn(objective="cross_entropy", start="hadamard", batch=batch, length=length)
    tokens = jax.random.randint(jax.random.key(0), (batch, length), 0, config.vocab_size)
    shifts = mean_shifts(model, np.asarray(tokens))
    learned = starting_point(model, settings, scheme, RotationSites(), 0, shifts, None)
    state = make_optimiser(settings, 1e-3).init(cast(Any, learned))

    plain = jax.jit(lambda p, t: token_nll(forward(p, t, config), t).mean())
    loss = jax.jit(cross_entropy, static_argnums=(3, 4))
    gradient = jax.jit(jax.value_and_grad(cross_entropy), static_argnums=(3, 4))
    direction = jax.tree.map(jnp.ones_like, learned)

    @jax.jit
    def retract(gradient, state, learned):
        return make_optimiser(settings, 1e-3).update(gradient, state, learned)

    unrotated = learned.replace(rotations=Rotations(), scales=None)
    seconds = in_turn(
        {
            "plain": partial(plain, params, tokens),
            "quantised": partial(loss, unrotated, params, tokens, config, scheme),
            "rotated": partial(loss, learned, params, tokens, config, scheme),
            "gradient": partial(gradient, learned, params, tokens, config, scheme),
            "retraction": partial(retract, direction, state, learned),
            # `update` donates the optimiser's state, so each call gets a copy.
            "step": lambda: update(
                learned,
                jax.tree.map(jnp.copy, state),
                params,
                tokens,
                1e-3,
                config,
                settings,
                scheme,
            ),
        },
        rounds,
        advance,
    )
    return {
        "scheme": scheme.name,
        "tokens": batch * length,
        "plain": seconds["plain"],
        "step": seconds["step"],
        "parts": {
            "forward": seconds["quantised"],
            "rotation": seconds["rotated"] - seconds["quantised"],
            "backward": seconds["gradient"] - seconds["rotated"],
            "retraction": seconds["retraction"],
        },
        "peak_memory": peak_memory(),
    }


LEARN_FUNCTIONS = 6


def learn_table(result: dict[str, Any]) -> Table:
    """The benchmark as a table."""
    step, tokens = result["step"], result["tokens"]
    table = Table(title=f"one learning step, {result['scheme']}, {tokens} tokens")
    table.add_column("part")
    table.add_column("seconds", justify="right")
    table.add_column("of the step", justify="right")
    for name, seconds in result["parts"].items():
        table.add_row(name, f"{seconds:.3f}", f"{seconds / step:.0%}")
    table.add_section()
    table.add_row("step, measured whole", f"{step:.3f}", f"{tokens / step:,.0f} tokens/s")
    ratio = f"step = {step / result['plain']:.2f} x"
    table.add_row("plain forward pass", f"{result['plain']:.3f}", ratio)
    table.add_row("peak memory", f"{result['peak_memory'] / 2**30:.2f} GiB", "")
    return table


def bench_gptq(
    model: Model, *, bits: int, windows: int, length: int, advance: Callable[[], None]
) -> dict[str, Any]:
    """Cost of rounding the weights by GPTQ, in seconds: how much is capture, how much solving.

    capture: the windows' way through a layer, twice, and the Hessians on the way. The first layer
    is apart, since it compiles; the others are medians.
    """
    model, marks = fold_norms(model), []
    config, scheme = model.config, Scheme(Grid(bits, clip="mse"))
    grids = weight_grids(scheme, config.num_hidden_layers)
    shape = (windows, length)
    rows = np.random.default_rng(0).integers(0, config.vocab_size, shape, np.int32)

    def change(i: int, layer: Layers, seen: dict[str, Seen]) -> Layers:
        jax.block_until_ready(seen)
        marks.append(time.perf_counter())
        layer = round_layer(layer, seen, grids[i], Gptq(), f"layer {i}")
        jax.block_until_ready(layer)
        marks.append(time.perf_counter())
        return layer

    began = time.perf_counter()
    layer_by_layer(model.params, config, rows, change, advance=advance)
    spans = np.diff([began, *marks]).reshape(-1, 2)  # capture and solving of each layer
    capture, solve = np.median(spans[1:], axis=0)
    return {
        "scheme": scheme.name,
        "windows": windows,
        "length": length,
        "layers": config.num_hidden_layers,
        "first": float(spans[0].sum()),
        "parts": {"capture": float(capture), "solve": float(solve)},
        "whole": marks[-1] - began,
        "peak_memory": peak_memory(),
    }


def gptq_table(result: dict[str, Any]) -> Table:
    """The benchmark as a table."""
    windows, length = result["windows"], result["length"]
    layer = sum(result["parts"].values())
    table = Table(title=f"GPTQ, {result['scheme']}, {windows} windows of {length} tokens")
    table.add_column("part")
    table.add_column("seconds", justify="right")
    table.add_column("of a layer", justify="right")
    for name, seconds in result["parts"].items():
        table.add_row(f"{name}, a layer", f"{seconds:.2f}", f"{seconds / layer:.0%}")
    table.add_section()
    table.add_row("first layer, with compilation", f"{result['first']:.1f}", "")
    table.add_row(f"all {result['layers']} layers", f"{result['whole']:.0f}", "")
    table.add_row("peak memory", f"{result['peak_memory'] / 2**30:.2f} GiB", "")
    return table
