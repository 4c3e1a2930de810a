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
from qrot.grid import Grid, quantise
from qrot.kernels.fwht import fwht
from qrot.hadamard.factors import hadamard_factors
from qrot.kernels.kv4 import append, attend, empty_heads
from qrot.kernels.matmul import int4_matmul, int8_matmul
from qrot.kernels.rotate_quantize import rotate_quantize
from qrot.calibrate.capture import mean_shifts
from qrot.learn.end_to_end import cross_entropy
from qrot.learn.loop import make_optimiser, update
from qrot.learn.settings import Learn
from qrot.learn.start import starting_point
from qrot.model.forward import forward
from qrot.network import fold_norms
from qrot.model.params import Layers, Model
from qrot.quantize.gptq import Gptq, round_layer
from qrot.calibrate.moments import Seen, layer_by_layer, weight_grids
from qrot.rotation.random import RotationSites
from qrot.rotation.forms import Rotations
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


KERNEL_FUNCTIONS = 12
_HEADS, _KV_HEADS, _HEAD_DIM = 32, 8, 128


def bench_kernels(
    *, size: int, rows: int, rounds: int, advance: Callable[[], None]
) -> dict[str, Any]:
    """Every kernel as it is chosen for this machine, beside what the machine can do, in one run.

    The ceilings are a copy (negated, so that it is none in name only), and the product of
    [rows, size] with [size, size] in float32 and in 8-bit integers, all by XLA.
    Returns seconds, bytes moved and operations (0 where they do not matter) by name. Raises
    InputError where size has no Hadamard matrix.
    """
    hadamard_factors(size)
    keys = iter(jax.random.split(jax.random.key(0), 9))

    def normal(*shape):
        return jax.random.normal(next(keys), shape)

    x, dense = normal(rows, size), normal(size, size)
    half, token = x.astype(jnp.bfloat16), Grid(8, "asymmetric")
    codes = quantise(x, token)
    weight = jax.random.randint(next(keys), (1, size, size), -128, 128, jnp.int8)
    packed = weight[:, : size // 2]
    scale, sums = jnp.ones((1, size)), weight.sum(1, dtype=jnp.int32)
    heads = (1, size, _KV_HEADS, _HEAD_DIM)
    cache = [
        append(empty_heads(heads, grid), quantise(normal(*heads), grid), (0, 0))
        for grid in [Grid(4, "asymmetric")] * 2
    ]
    query, last = normal(1, 1, _HEADS, _HEAD_DIM), jnp.asarray(size - 1)
    cached = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    weights = packed.nbytes

    def few(count: int):
        part = jax.tree.map(lambda leaf: leaf[:count], codes)
        return int4_matmul, (part, packed, scale, sums), weights, 0

    product = 2 * rows * size**2
    exact = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    integers = partial(jnp.matmul, preferred_element_type=jnp.int32)
    cases: dict[str, tuple[Callable, tuple, int, int]] = {
        "copy": (jnp.negative, (x,), 2 * x.nbytes, 0),
        "product, f32": (exact, (x, dense), 0, product),
        "product, int8": (integers, (codes.codes, weight[0]), 0, product),
        "fwht, f32": (fwht, (x,), 2 * x.nbytes, 0),
        "fwht, bf16": (fwht, (half,), 2 * half.nbytes, 0),
        "rotate_quantize, f32": (
            partial(rotate_quantize, grid=Grid(4, "asymmetric")),
            (x,),
            x.nbytes + x.size,
            0,
        ),
        "rotate_quantize, bf16": (
            partial(rotate_quantize, grid=Grid(4, "asymmetric")),
            (half,),
            half.nbytes + half.size,
            0,
        ),
        "int8_matmul": (int8_matmul, (codes, weight, scale, sums), 0, product),
        "int4_matmul": (int4_matmul, (codes, packed, scale, sums), 0, product),
        "int4_matmul, 16 rows": few(16),
        "int4_matmul, 1 row": few(1),
        "kv4, one token": (
            lambda q, k, v, first: attend(q, k, v, first=first),
            (query, *cache, last),
            cached,
            0,
        ),
    }
    seconds = in_turn(
        {
            name: partial(jax.jit(function), *arguments)
            for name, (function, arguments, *_) in cases.items()
        },
        rounds,
        advance,
    )
    device = jax.local_devices()[0]
    return {
        "size": size,
        "rows": rows,
        "device": device.device_kind if device.platform != "cpu" else "CPU",
        "jax": jax.__version__,
        "kernels": {
            name: {
                "seconds": seconds[name],
                "bytes": moved,
                "operations": operations,
                "own": _has_kernel(function, arguments),
            }
            for name, (function, arguments, moved, operations) in cases.items()
        },
    }


def _has_kernel(function: Callable, arguments: tuple) -> bool:
    """Whether a kernel of our own is in it, or XLA has it all."""
    program = str(jax.make_jaxpr(function)(*arguments))
    return "pallas_call[" in program or "mpmd_map[" in program


def kernels_table(result: dict[str, Any]) -> Table:
    """The benchmark as a table; ratios are to the ceilings of the same run."""
    kernels = result["kernels"]

    def rate(name: str, what: str) -> float:
        return kernels[name][what] / kernels[name]["seconds"] / 1e9

    table = Table(
        title=f"{result['rows']} rows of {result['size']}, {result['device']}, jax {result['jax']}"
    )
    for column in ("kernel", "by"):
        table.add_column(column)
    for column in ("ms", "rate", "copy", "f32", "int8"):  # the last three: the rate over theirs
        table.add_column(column, justify="right")
    for name, one in kernels.items():
        row = [name, "own" if one["own"] else "XLA", f"{1000 * one['seconds']:.2f}"]
        if one["bytes"]:
            moved = rate(name, "bytes")
            row += [f"{moved:.1f} GB/s", f"{moved / rate('copy', 'bytes'):.0%}", "", ""]
        else:
            done = rate(name, "operations")
            ratios = (done / rate(f"product, {of}", "operations") for of in ("f32", "int8"))
            row += [f"{done:.0f} GOP/s", "", *(f"{ratio:.0%}" for ratio in ratios)]
        table.add_row(*row)
    ratio = kernels["fwht, f32"]["seconds"] / kernels["copy"]["seconds"]
    gain = kernels["product, f32"]["seconds"] / kernels["fwht, f32"]["seconds"]
    table.caption = (
        f"fwht in float32: {ratio:.2f} times a copy, {gain:.1f} times as fast as the dense product"
    )
    return table
