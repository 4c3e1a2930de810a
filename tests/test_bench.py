import io

import pytest
from models import write_variant
from rich.console import Console

from qrot.bench import (
    LEARN_FUNCTIONS,
    bench_gptq,
    bench_learn,
    gptq_table,
    in_turn,
    learn_table,
)
from qrot.model.load import load


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
