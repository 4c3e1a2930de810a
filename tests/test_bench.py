import io

import jax
import pytest
from models import write_variant
from rich.console import Console
from typer.testing import CliRunner

from qrot.bench import (
    KERNEL_FUNCTIONS,
    LEARN_FUNCTIONS,
    bench_gptq,
    bench_kernels,
    bench_learn,
    gptq_table,
    in_turn,
    kernels_table,
    learn_table,
)
from qrot.cli import app
from qrot.kernels.dispatch import emulated
from qrot.model.io.load import load


def test_functions_take_turns_and_the_warm_up_does_not_count():
    calls, ticks = [], []
    functions = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    seconds = in_turn(functions, 2, lambda: ticks.append(1))
    assert "".join(calls) == "ababab"
    assert len(ticks) == 6
    assert set(seconds) == {"a", "b"}


@pytest.mark.parametrize("weight_bits", [16, 4])
def test_a_learning_step_is_measured_part_by_part(tmp_path, weight_bits):
    write_variant(tmp_path, "llama-tied")
    ticks = []
    result = bench_learn(
        load(str(tmp_path)),
        weight_bits=weight_bits,
        batch=2,
        length=16,
        rounds=1,
        advance=lambda: ticks.append(1),
    )
    assert len(ticks) == 2 * LEARN_FUNCTIONS
    assert result["scheme"] == f"W{weight_bits}A4KV4"
    assert result["tokens"] == 32
    assert list(result["parts"]) == ["forward", "rotation", "backward", "retraction"]
    assert min(result["plain"], result["step"], result["peak_memory"]) > 0
    printed = io.StringIO()
    Console(file=printed, width=80).print(learn_table(result))
    assert "plain forward pass" in printed.getvalue()


def test_gptq_is_measured_in_capture_and_solving(tmp_path):
    write_variant(tmp_path, "llama-tied")
    ticks = []
    result = bench_gptq(
        load(str(tmp_path)), bits=4, windows=3, length=16, advance=lambda: ticks.append(1)
    )
    assert len(ticks) == result["layers"] == 3
    assert min(*result["parts"].values(), result["first"]) > 0
    assert sum(result["parts"].values()) + result["first"] < result["whole"]
    printed = io.StringIO()
    Console(file=printed, width=80).print(gptq_table(result))
    assert "capture, a layer" in printed.getvalue()


def test_kernels_are_measured_against_the_ceilings_of_the_machine():
    ticks = []
    result = bench_kernels(size=64, rows=20, rounds=1, advance=lambda: ticks.append(1))
    assert len(ticks) == 2 * KERNEL_FUNCTIONS == 2 * len(result["kernels"])
    for one in result["kernels"].values():
        assert one["seconds"] > 0
        assert (one["bytes"] == 0) != (one["operations"] == 0)
        assert not one["own"]
    copy, fwht = result["kernels"]["copy"], result["kernels"]["fwht, f32"]
    assert copy["bytes"] == fwht["bytes"] == 2 * 4 * 64 * 20
    assert result["kernels"]["int4_matmul, 1 row"]["bytes"] == 64 * 64 // 2
    result["kernels"]["copy"]["seconds"], result["kernels"]["fwht, f32"]["seconds"] = 1.0, 2.5
    printed = io.StringIO()
    Console(file=printed, width=80).print(kernels_table(result))
    assert "2.50 times a copy" in printed.getvalue()
    assert "40%" in printed.getvalue()


def test_the_table_says_whose_kernels_ran():
    jax.clear_caches()  # they know nothing of what is emulated
    with emulated("pallas_tpu"):
        result = bench_kernels(size=64, rows=8, rounds=1, advance=lambda: None)
    jax.clear_caches()
    own = [name for name, one in result["kernels"].items() if one["own"]]
    assert own == list(result["kernels"])[3:]


def test_kernels_on_the_command_line():
    found = CliRunner().invoke(
        app, ["bench", "kernels", "--size", "32", "--rows", "4", "--rounds", "1"]
    )
    assert found.exit_code == 0, found.output
    assert "rotate_quantize, bf16" in found.output
    for arguments, words in [
        (("--size", "31"), "even"),
        (("--size", "22"), "no Hadamard transform of"),
    ]:
        found = CliRunner().invoke(app, ["bench", "kernels", *arguments])
        assert words in str(found.exception)
