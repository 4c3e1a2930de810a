"""Benchmarks: ratios measured in one run, after a warm-up, in turn, as medians."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

from qrot.calibrate.capture import mean_inputs
from qrot.calibrate.moments import Moments, change_layers
from qrot.evaluate.losses import token_nll
from qrot.grid import Grid
from qrot.hadamard.factors import hadamard_factors
from qrot.integers import quantise
from qrot.kernels.fwht import fwht
from qrot.kernels.kv4 import append, attend, empty_heads
from qrot.kernels.matmul import int4_matmul, int8_matmul
from qrot.kernels.rotate_quantize import rotate_quantize
from qrot.learn.objectives.cross_entropy import cross_entropy
from qrot.learn.settings import Learn
from qrot.learn.starting_point import starting_point
from qrot.learn.step import move, optimiser_state, update
from qrot.model.forward import forward
from qrot.model.params import Layers, Model, Network
from qrot.network import fold
from qrot.quantize.gptq import Gptq, round_layer
from qrot.rotation.random import RotationSites
from qrot.scheme import Scheme, layer_schemes


def in_turn(
    functions: dict[str, Callable[[], Any]], rounds: int, advance: Callable[[], None]
) -> dict[str, float]:
    """Median seconds of each function, run in turn after one run that is not counted.

    In turn, so that a machine that slows down for a while does so for all of them.

    Args:
        functions: by name; what each returns is waited for.
        rounds: that are counted.
        advance: called after each run.
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
    model: Model,
    *,
    weight_bits: int,
    batch: int,
    length: int,
    rounds: int,
    advance: Callable[[], None],
) -> dict[str, Any]:
    """Cost of one learning step (cross_entropy, W<weight_bits>A4KV4), part by part, in seconds.

    The parts add up to the step: forward is the fake-quantised pass without rotations, rotation
    what rotations add to it, backward the derivative, retraction the optimiser.

    Args:
        model: any.
        weight_bits: of the weights in training.
        batch: windows in a step.
        length: of a window, in tokens.
        rounds: that are counted, after one of warm-up.
        advance: called after each run of a function.
    """
    a4 = Grid(4, "asymmetric")
    scheme = Scheme(Grid(weight_bits), a4, a4, a4)
    network = fold(model.network).replace(scheme=scheme)
    seconds = in_turn(_learn_functions(network, batch, length), rounds, advance)
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


def _learn_functions(network: Network, batch: int, length: int) -> dict[str, Callable[[], Any]]:
    """A step, the plain forward pass, and what a step is made of, each with more than the last."""
    settings = Learn(objective="cross_entropy", start="hadamard", batch=batch, length=length)
    vocabulary, plain_network = network.config.vocab_size, network.replace(scheme=Scheme())
    tokens = jax.random.randint(jax.random.key(0), (batch, length), 0, vocabulary)
    shifts = mean_inputs(network, np.asarray(tokens))
    transform = starting_point(network, settings, RotationSites(), 0, shifts)
    state = optimiser_state(transform, settings)

    plain = jax.jit(lambda network, tokens: token_nll(forward(network, tokens), tokens).mean())
    loss, gradient = jax.jit(cross_entropy), jax.jit(jax.value_and_grad(cross_entropy))
    retract = jax.jit(partial(move, rate=1e-3, settings=settings))
    direction = jax.tree.map(jnp.ones_like, transform)
    unrotated = transform.replace(rotations={}, scales={})
    return {
        "plain": partial(plain, plain_network, tokens),
        "quantised": partial(loss, unrotated, network, tokens),
        "rotated": partial(loss, transform, network, tokens),
        "gradient": partial(gradient, transform, network, tokens),
        "retraction": partial(retract, transform, direction, state),
        # `update` donates the optimiser's state, so each call gets a copy.
        "step": lambda: update(
            transform, jax.tree.map(jnp.copy, state), network, tokens, 1e-3, settings
        ),
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

    Args:
        model: any.
        bits: of the weights.
        windows: of random tokens to calibrate on.
        length: of a window, in tokens.
        advance: called after each layer.
    """
    scheme, marks = Scheme(Grid(bits, clip="mse")), []
    network = fold(model.network).replace(scheme=scheme)
    config, shape = network.config, (windows, length)
    grids = layer_schemes(scheme, config.num_hidden_layers)
    rows = np.random.default_rng(0).integers(0, config.vocab_size, shape, np.int32)

    def change(i: int, layer: Layers, moments: dict[str, Moments]) -> Layers:
        jax.block_until_ready(moments)
        marks.append(time.perf_counter())
        layer = round_layer(layer, moments, grids[i], Gptq(), f"layer {i}")
        jax.block_until_ready(layer)
        marks.append(time.perf_counter())
        return layer

    began = time.perf_counter()
    change_layers(network, rows, change, advance=advance)
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


class _Case(NamedTuple):
    """A call of a kernel: the bytes that it moves, its operations; 0 where they do not matter."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    bytes: int
    operations: int


def bench_kernels(
    *, size: int, rows: int, rounds: int, advance: Callable[[], None]
) -> dict[str, Any]:
    """Every kernel as it is chosen for this machine, beside what the machine can do, in one run.

    The ceilings are a copy (negated, so that it is none in name only), and the product of
    [rows, size] with [size, size] in float32 and in 8-bit integers, all by XLA.

    Args:
        size: inputs and outputs of a product, and tokens in the cache.
        rows: that are transformed or multiplied.
        rounds: that are counted, after one of warm-up.
        advance: called after each run of a kernel.

    Returns:
        Seconds, bytes moved and operations (0 where they do not matter) by name.

    Raises:
        InputError: where size has no Hadamard matrix.
    """
    hadamard_factors(size)
    cases = _kernel_cases(size, rows)
    seconds = in_turn(
        {name: partial(jax.jit(case.function), *case.arguments) for name, case in cases.items()},
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
                "bytes": case.bytes,
                "operations": case.operations,
                "own": _has_kernel(case.function, case.arguments),
            }
            for name, case in cases.items()
        },
    }


def _kernel_cases(size: int, rows: int) -> dict[str, _Case]:
    keys = iter(jax.random.split(jax.random.key(0), 9))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape)

    x, dense = normal(rows, size), normal(size, size)
    half, token = x.astype(jnp.bfloat16), Grid(8, "asymmetric")
    codes = quantise(x, token)
    weight = jax.random.randint(next(keys), (1, size, size), -128, 128, jnp.int8)
    packed = weight[:, : size // 2]
    scale, sums = jnp.ones((1, size)), weight.sum(1, dtype=jnp.int32)

    def few(count: int) -> _Case:
        part = jax.tree.map(lambda leaf: leaf[:count], codes)
        return _Case(int4_matmul, (part, packed, scale, sums), packed.nbytes, 0)

    product = 2 * rows * size**2
    exact = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    integers = partial(jnp.matmul, preferred_element_type=jnp.int32)
    rounded = partial(rotate_quantize, grid=Grid(4, "asymmetric"))
    return {
        "copy": _Case(jnp.negative, (x,), 2 * x.nbytes, 0),
        "product, f32": _Case(exact, (x, dense), 0, product),
        "product, int8": _Case(integers, (codes.codes, weight[0]), 0, product),
        "fwht, f32": _Case(fwht, (x,), 2 * x.nbytes, 0),
        "fwht, bf16": _Case(fwht, (half,), 2 * half.nbytes, 0),
        "rotate_quantize, f32": _Case(rounded, (x,), x.nbytes + x.size, 0),
        "rotate_quantize, bf16": _Case(rounded, (half,), half.nbytes + half.size, 0),
        "int8_matmul": _Case(int8_matmul, (codes, weight, scale, sums), 0, product),
        "int4_matmul": _Case(int4_matmul, (codes, packed, scale, sums), 0, product),
        "int4_matmul, 16 rows": few(16),
        "int4_matmul, 1 row": few(1),
        "kv4, one token": _attention(size, normal),
    }


def _attention(size: int, normal: Callable[..., jax.Array]) -> _Case:
    """One token that looks back on a cache of so many."""
    heads, grid = (1, size, _KV_HEADS, _HEAD_DIM), Grid(4, "asymmetric")
    cache = [
        append(empty_heads(heads, grid), quantise(normal(*heads), grid), (0, 0)) for _ in range(2)
    ]
    query, last = normal(1, 1, _HEADS, _HEAD_DIM), jnp.asarray(size - 1)
    cached = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    return _Case(
        lambda q, k, v, first: attend(q, k, v, first=first), (query, *cache, last), cached, 0
    )


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
