"""Progress where nobody looks at a terminal: a line now and then, and one at the end."""

import io

import numpy as np
import pytest
from rich.console import Console

from qrot.progress import EVERY, FORWARD, Stages, forward_seconds, millions


class Clock:
    """Seconds that pass when a test says so."""

    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def told():
    """(stages on a console that is no terminal, their clock, what was printed)."""
    clock, shown = Clock(), io.StringIO()
    with Stages(Console(file=shown, width=80), clock) as stages:
        yield stages, clock, shown


def test_a_long_stage_has_a_line_every_half_minute(told):
    stages, clock, shown = told
    with stages.stage("learning", 100, seconds=1000.0) as advance:
        for step in range(1, 11):  # 10 steps of 10 s
            clock.now += 10
            advance(done=step, note=f"loss {1 / step:.2f}")
    assert shown.getvalue().splitlines() == [
        "learning: 3 of 100, loss 0.33, about 970 s left",
        "learning: 6 of 100, loss 0.17, about 940 s left",
        "learning: 9 of 100, loss 0.11, about 910 s left",
        "learning: 100.0 s, loss 0.10",
    ]


def test_a_step_longer_than_half_a_minute_has_one_line(told):
    stages, clock, shown = told
    with stages.stage("solving", 2, seconds=10.0) as advance:
        clock.now += 10 * EVERY
        advance()
        advance()
    assert shown.getvalue().splitlines() == [
        "solving: 1 of 2, about 300 s left",
        "solving: 300.0 s",
    ]


def test_a_stage_that_goes_on_counts_what_it_did_itself(told):
    stages, clock, shown = told
    with stages.stage("learning", 100, seconds=1000.0) as advance:
        clock.now += 40
        advance(done=51)
        clock.now += 40
        advance(done=52)
    assert "learning: 51 of 100, about 1960 s left" in shown.getvalue()
    assert "learning: 52 of 100, about 1920 s left" in shown.getvalue()


def test_short_stages_and_those_with_lines_of_their_own_have_only_their_last(told):
    stages, clock, shown = told
    with stages.stage("evaluating", 40, seconds=20.0) as advance:
        for _ in range(40):
            clock.now += 0.5
            advance()
    with stages.stage("sweep", 4, seconds=400.0, lines=False) as advance:
        for _ in range(4):
            clock.now += 100
            advance()
    assert shown.getvalue().splitlines() == ["evaluating: 20.0 s", "sweep: 400.0 s"]


def test_a_stage_that_cannot_say_how_far_it_is(told):
    stages, clock, shown = told
    with stages.stage("reading", seconds=5.0) as advance:
        clock.now += EVERY
        advance(note="halfway")
    assert shown.getvalue().splitlines() == ["reading: 1, halfway", "reading: 30.0 s, halfway"]


def test_a_terminal_has_bars_in_place_of_lines():
    clock, shown = Clock(), io.StringIO()
    console = Console(file=shown, width=80, force_terminal=True)
    with (
        Stages(console, clock) as stages,
        stages.stage("learning", 10, seconds=1000.0) as advance,
    ):
        clock.now += 100
        advance(note="loss 1")
    assert "learning: 1 of 10" not in shown.getvalue()
    assert "learning: 100.0 s, loss 1" in shown.getvalue()


def test_rates_are_of_plain_numbers():
    assert millions({"a": np.zeros((1000, 500)), "b": np.zeros(250_000)}) == 0.75
    assert forward_seconds(2.0, 3000) == pytest.approx(FORWARD * 6)
