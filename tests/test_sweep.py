"""Sweeps: what is combined, what is refused, what is run, and what a failure does."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from runs import CHEAP, quiet, tiny_config
from typer.testing import CliRunner

from qrot.cli import app
from qrot.errors import InputError
from qrot.evaluate.perplexity import Windows
from qrot.grid import Grid
from qrot.model.io.load import load, local_config
from qrot.network import fold
from qrot.progress import FORWARD, FUSE, ROUND, millions
from qrot.quantize.registry import WEIGHT_METHODS
from qrot.run.config import RunConfig, to_yaml
from qrot.run.run import planned, run
from qrot.scheme import Scheme
from qrot.study import launch as launching
from qrot.study.estimate import measured_ratio, millions_of, run_seconds
from qrot.study.launch import Started, launch
from qrot.study.sweep import estimates, read_axis, read_sweep


@pytest.fixture
def file(tiny, tmp_path):
    """A config of two cheap rows, whose `out` is the study."""
    config = tiny_config(tiny, tmp_path / "study")
    path = tmp_path / "base.yaml"
    path.write_text(to_yaml(replace(config, methods=CHEAP)))
    return path


@pytest.mark.parametrize(
    ("sweep", "values"),
    [
        ("a.b=1,2, 3", ["1", "2", "3"]),
        ("a={bits: 4, clip: mse},{bits: 8}", ["{bits: 4, clip: mse}", "{bits: 8}"]),
        ("a=[x,y],[z]", ["[x,y]", "[z]"]),
        ("a=[{b: [1, 2]}, 3],null", ["[{b: [1, 2]}, 3]", "null"]),
        ("a='x,y',\"[\"", ["'x,y'", '"["']),
        ("a=['],', b],it's,e=f", ["['],', b]", "it's", "e=f"]),
        ("a=7", ["7"]),
    ],
)
def test_values_are_cut_at_the_outer_commas(sweep, values):
    assert read_axis(sweep) == ("a.b" if sweep.startswith("a.b") else "a", values)


@pytest.mark.parametrize(
    ("sweeps", "sentence"),
    [
        (["steps"], "'steps': a sweep has the form"),
        (["learn.steps="], "a sweep has the form"),
        (["=1,2"], "a sweep has the form"),
        (["learn.steps=1,,2"], "a sweep has the form"),
        (["learn.steps=1,1"], "a value is there twice"),
        (["methods=[a,b"], "a ] is missing"),
        (["methods=[a,{b]"], "a } is missing"),
        (["out=a,b"], "out, which cannot be swept"),
        (["seeds=[0],[1]", "seeds=[2]"], "names a key twice"),
        (["scheme.keys.bits=4,1"], "^scheme.keys.bits=1: scheme.keys.bits: 1 is outside 2 to 16"),
        (["lern.steps=4"], "unknown key 'lern', did you mean 'learn'"),
        (["data.calibration=a b,a_b"], "two combinations are called data.calibration=a_b"),
    ],
)
def test_all_is_validated_before_anything_is_run(file, sweeps, sentence):
    with pytest.raises(InputError, match=sentence.replace("[", r"\[")):
        read_sweep(file, [], sweeps)
    assert not (file.parent / "study").exists()


def test_combinations_multiply_and_have_readable_names(file):
    found = read_sweep(
        file, ["batch=4"], ["scheme.keys={bits: 4},{bits: 8}", "methods=[no_rotation],[learned]"]
    )
    assert [c.name for c in found] == [
        "scheme.keys=bits_4,methods=no_rotation",
        "scheme.keys=bits_4,methods=learned",
        "scheme.keys=bits_8,methods=no_rotation",
        "scheme.keys=bits_8,methods=learned",
    ]
    assert [(c.config.scheme.keys.bits, c.config.methods[0]) for c in found] == [
        (4, "no_rotation"), (4, "learned"), (8, "no_rotation"), (8, "learned"),
    ]  # fmt: skip
    assert all(c.config.batch == 4 for c in found)
    assert found[0].config.out == str(file.parent / "study" / found[0].name)
    assert found[0].left == ("no_rotation",)


def test_a_long_name_is_cut_but_stays_apart(file):
    values = ["".join(x * 30 for x in "abcdefghi") + end for end in "yz"]
    found = read_sweep(file, [], [f"data.calibration={','.join(values)}"])
    assert len({c.name for c in found}) == 2
    assert all(len(c.name.encode()) <= 200 for c in found)


def test_without_a_sweep_it_is_the_run_itself(file):
    (found,) = read_sweep(file, ["learn.steps=5"], [])
    assert (found.name, found.swept, found.left) == ("study", {}, CHEAP)
    assert found.config.out == str(file.parent / "study")


def invoke(*arguments):
    found = CliRunner().invoke(app, ["run", *map(str, arguments)])
    if found.exception and not isinstance(found.exception, SystemExit):
        raise found.exception
    return found


def test_a_dry_run_prints_and_writes_nothing(file, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    before = sorted(file.parent.iterdir())
    found = invoke(file, "--dry-run", "--sweep", "scheme.keys.bits=4,8", "--sweep", "batch=1,2")
    assert found.exit_code == 0
    head, _, *lines = [line for line in found.stdout.splitlines() if line.strip()]
    assert head.split()[:2] == ["scheme.keys.bits", "batch"]
    assert [line.split()[:2] for line in lines[:4]] == [["4", "1"], ["4", "2"], ["8", "1"],
                                                         ["8", "2"]]  # fmt: skip
    assert "W4A4K8V4" in lines[2]
    assert "at the rates of two CPU cores" in found.stdout
    assert sorted(file.parent.iterdir()) == before
    found = invoke(file, "--dry-run", "gate.kl=0.5")  # one run has a plan as well
    assert found.exit_code == 0
    assert "gate, on the kept network and the run's own text: kl at most 0.5" in found.stdout
    assert sorted(file.parent.iterdir()) == before


def test_a_sweep_is_run_and_skips_what_is_done(file, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    (first, _) = read_sweep(file, [], ["scheme.keys.bits=4,8"])
    run(replace(first.config, methods=CHEAP), quiet())
    kept = (Path(first.config.out) / "results.json").read_bytes()
    found = invoke(file, "--sweep", "scheme.keys.bits=4,8")
    assert found.exit_code == 0
    assert "done already: 1 of 2 runs" in found.stdout
    assert "[1/1] scheme.keys.bits=8: " in found.stdout
    assert "no rotation, scheme.keys.bits=8" in found.stdout  # the table of the study
    assert (Path(first.config.out) / "results.json").read_bytes() == kept
    study = file.parent / "study"
    config = yaml.safe_load((study / "scheme.keys.bits=8" / "config.yaml").read_text())
    assert config["scheme"]["keys"]["bits"] == 8
    assert "no rotation: evaluating" in (study / "scheme.keys.bits=8.log").read_text()
    again = invoke(file, "--sweep", "scheme.keys.bits=4,8")
    assert "done already: 2 of 2 runs" in again.stdout
    assert "no rotation, scheme.keys.bits=4" in again.stdout
    with pytest.raises(InputError, match="is a run folder, no study"):
        read_sweep(file, [f"out={study / 'scheme.keys.bits=8'}"], ["batch=1,2"])
    with pytest.raises(InputError, match=r"another config, which differs in seeds"):
        read_sweep(file, ["seeds=[5]"], ["scheme.keys.bits=4,8"])


def test_a_failure_stops_nothing_else_and_is_named(file, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    sweep = f"model={tmp_path / 'absent' / 'a.gguf'},{load_name(file)}"
    with pytest.raises(InputError, match="there is no model"):
        invoke(file, "--dry-run", "--sweep", sweep)
    found = invoke(file, "--sweep", "evaluate.length=400,16", "--sweep", "evaluate.count=2")
    name = "evaluate.length=400,evaluate.count=2"
    assert found.exit_code == 1
    assert f"[1/2] {name}: failed (code 2)" in found.stdout
    log = file.parent / "study" / f"{name}.log"
    assert f"qrot: {name} failed: qrot: the text has 400 tokens" in found.stderr
    assert str(log) in found.stderr
    assert "no rotation" in found.stdout
    assert not (log.parent / name).exists()


def load_name(file):
    return yaml.safe_load(file.read_text())["model"]


def test_options_that_do_not_go_together(file):
    with pytest.raises(InputError, match="go with --sweep"):
        invoke(file, "--jobs", "2")
    with pytest.raises(InputError, match="--cluster-option goes with --cluster"):
        invoke(file, "--sweep", "batch=1,2", "--cluster-option", "timeout_min=1")
    with pytest.raises(InputError, match="'moon' is not one of slurm, local"):
        invoke(file, "--sweep", "batch=1,2", "--cluster", "moon")
    assert not (file.parent / "study").exists()


def fake(seconds, codes=None, log=None):
    """Runs that take so long and do nothing."""
    under_way, most = set(), []

    def start(combination):
        under_way.add(combination.name)
        most.append(len(under_way))
        until = time.monotonic() + seconds

        def poll():
            if time.monotonic() < until:
                return None
            under_way.discard(combination.name)
            return (codes or {}).get(combination.name, 0)

        return Started(poll, lambda: log is not None and log.append(combination.name))

    return start, most


@pytest.mark.parametrize(("jobs", "expected"), [(1, 1), (2, 2), (9, 4)])
def test_so_many_are_run_at_a_time(file, monkeypatch, jobs, expected):
    monkeypatch.setattr(launching, "_LOOK", 0.01)
    todo = read_sweep(file, [], ["batch=1,2,3,4"])
    start, most = fake(0.03, {"batch=2": 3})
    failures = launch(todo, start, jobs, 1.0, quiet())
    assert max(most) == expected
    assert len(most) == 4
    assert failures == [f"batch=2 failed: it said nothing ({todo[1].log})"]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_stops_what_is_running(file, monkeypatch, signum):
    monkeypatch.setattr(launching, "_LOOK", 0.01)
    todo, stopped = read_sweep(file, [], ["batch=1,2,3"]), []
    start, most = fake(60, log=stopped)
    before = signal.getsignal(signal.SIGTERM)
    # A shell starts what it runs in the background with SIGINT ignored.
    own = signal.signal(signal.SIGINT, signal.default_int_handler)
    original = time.sleep

    def sleep(seconds):
        original(seconds)
        os.kill(os.getpid(), signum)

    monkeypatch.setattr(launching.time, "sleep", sleep)
    try:
        with pytest.raises(KeyboardInterrupt):
            launch(todo, start, 2, 1.0, quiet())
    finally:
        signal.signal(signal.SIGINT, own)
    assert stopped == ["batch=1", "batch=2"]
    assert len(most) == 2
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_run_that_was_started_is_stopped(file, monkeypatch):
    (todo,) = read_sweep(file, [], ["batch=2"])
    todo.log.parent.mkdir()
    code = "import time; print('begun', flush=True); time.sleep(60)"
    started = launching.here(replace(todo, command=[sys.executable, "-c", code]))
    while "begun" not in todo.log.read_text():
        time.sleep(0.01)
    assert started.poll() is None
    started.stop()
    assert started.poll() == -signal.SIGTERM


def test_the_rates_count_all_parameters(tiny):
    name = str(tiny / "model")
    config, network = local_config(name), fold(load(name).network)
    assert config == load(name).network.config
    norms = config.hidden_size * (2 * config.num_hidden_layers + 1)
    assert millions_of(config) == pytest.approx(millions(network.params) - norms / 1e6)
    assert local_config("org/name") is None
    with pytest.raises(InputError, match="there is no model"):
        local_config("/absent")


def test_what_was_measured_corrects_the_rates(file, tiny):
    todo = read_sweep(file, [], ["scheme.keys.bits=4,8"])
    model = local_config(str(tiny / "model"))
    plain, source = estimates(todo)
    assert "finished rows" not in source
    assert plain[0] == pytest.approx(run_seconds(todo[0].config, model, CHEAP))
    results = run(todo[0].config, quiet())
    results["rows"][1]["seconds"] = 50.0
    results["rows"][0]["seconds"] = 10.0
    (Path(todo[0].config.out) / "results.json").write_text(json.dumps(results))
    half = {**results, "rows": results["rows"][:1]}  # as a kill leaves it
    (Path(todo[0].config.out) / "results.json").write_text(json.dumps(half))
    assert read_sweep(file, [], ["scheme.keys.bits=4,8"])[0].left == ("no_rotation",)
    (Path(todo[0].config.out) / "results.json").write_text(json.dumps(results))
    ratio, rows = measured_ratio([(todo[0].config, results)], model)
    assert rows == 2
    todo = read_sweep(file, [], ["scheme.keys.bits=4,8"])
    corrected, source = estimates(todo)
    assert corrected == [0.0, pytest.approx(plain[1] * ratio)]
    assert "which is what 2 finished rows took" in source
    (far,) = read_sweep(file, ["model=org/name"], ["batch=2"])
    assert estimates([far])[0] == [None]


def test_an_estimate_by_hand():
    """One billion parameters: one forward pass of 8,192 tokens is 0.03 * 1000 * 8.192 s."""
    config = RunConfig(evaluate=Windows(512, 16))
    model = replace(local_config_of_a_billion())
    judged = FORWARD * 1000 * 8.192
    one = run_seconds(config, model, ["full_precision"])
    two = run_seconds(config, model, ["full_precision"] * 2)
    assert two - one == pytest.approx(judged + 3.0)
    rotated = run_seconds(config, model, ["random_hadamard"])
    assert rotated - one == pytest.approx(FUSE * 1000)
    assert run_seconds(config, model, ["no_rotation"]) == pytest.approx(one)
    windows = FORWARD * 1000 * 64 * 0.512
    assert run_seconds(config, model, ["smoothquant"]) - rotated == pytest.approx(2 * windows)
    text = FORWARD * 1000 * 30 * 2 * 0.512
    for method, rounding in (("rtn", ROUND * 1000), ("awq", 3 * windows), ("qat", 2 * text)):
        settings = WEIGHT_METHODS[method].settings()
        rounded = replace(config, scheme=Scheme(weights=Grid(4)), weights=settings)
        assert run_seconds(rounded, model, ["no_rotation"]) - one == pytest.approx(rounding)
        assert run_seconds(rounded, model, ["full_precision"]) == pytest.approx(one)


def local_config_of_a_billion():
    from qrot.model.config import ModelConfig

    # 2 * 1000 * 500,000 of embedding and head, and no layer
    return ModelConfig("llama", 1000, 1, 0, 10, 10, 100, 500_000)


def test_rows_of_a_run():
    config = RunConfig(methods=("full_precision", "random_hadamard", "learned"), seeds=(3, 4))
    assert planned(config) == [
        ("full_precision", None), ("random_hadamard", 3), ("random_hadamard", 4), ("learned", 0),
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # submitit's own
def test_a_cluster_in_submitits_local_mode(file, monkeypatch):
    pytest.importorskip("submitit")
    monkeypatch.setenv("COLUMNS", "120")
    sweep = ("--sweep", "evaluate.length=16,400", "--cluster", "local")
    with pytest.raises(InputError, match="timeout_min=MINUTES is needed"):
        invoke(file, *sweep)
    option = ("--cluster-option", "timeout_min=5")
    with pytest.raises(InputError, match="--cluster local: "):
        invoke(file, *sweep, *option, "--cluster-option", "wings=2")
    with pytest.raises(InputError, match="an option has the form key=value"):
        invoke(file, *sweep, "--cluster-option", "timeout_min")
    found = invoke(file, *sweep, *option, "--cluster-option", "slurm_partition=gpu")
    assert found.exit_code == 1
    assert "[2/2]" in found.stdout
    assert "evaluate.length=400 failed: qrot: the text has 400 tokens" in found.stderr
    study = file.parent / "study"
    rows = json.loads((study / "evaluate.length=16" / "results.json").read_text())["rows"]
    assert [row["method"] for row in rows] == list(CHEAP)
    assert list((study / "jobs").iterdir())  # submitit's own files


def test_without_submitit_the_extra_is_named(file):
    try:
        import submitit  # noqa: F401
    except ImportError:
        with pytest.raises(InputError, match=r"pip install qrot\[cluster\]"):
            invoke(file, "--sweep", "batch=1,2", "--cluster", "local")


def test_the_shell_completes_commands():
    ask = {"_QROT_COMPLETE": "complete_bash", "COMP_WORDS": "qrot ru", "COMP_CWORD": "1"}
    found = subprocess.run(
        [sys.executable, "-c", "import sys; sys.argv = ['qrot']; import qrot.cli as c; c.main()"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **ask},
    )
    assert found.stdout.split() == ["run"]
