"""Many runs, each a process of its own: on this machine, or on a cluster through submitit."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from qrot.errors import InputError, located
from qrot.files.plain import parse_yaml
from qrot.progress import Stages
from qrot.run.lock import entered
from qrot.study.sweep import Combination, estimates

_LOOK = 0.2  # seconds between looks at what is running


class Started(NamedTuple):
    """A run under way.

    Attributes:
        poll: its exit code, or None while it runs.
        stop: ends it.
    """

    poll: Callable[[], int | None]
    stop: Callable[[], None]


Start = Callable[[Combination], Started]


def run_sweep(
    combinations: Sequence[Combination],
    console: Console,
    *,
    jobs: int | None = None,
    cluster: str | None = None,
    options: Sequence[str] = (),
) -> list[str]:
    """Run what is left of a sweep.

    Args:
        combinations: the runs of a study.
        console: told which are done.
        jobs: runs at a time; by default one here, and all of them on a cluster.
        cluster: the kind of one, see `on_cluster`; None for this machine.
        options: of the cluster.

    Returns:
        A sentence for each run that failed.

    Raises:
        InputError: before anything is run, where cluster or options make no sense.
    """
    if cluster not in (None, "slurm", "local"):
        raise InputError(f"--cluster: {cluster!r} is not one of slurm, local")
    if options and cluster is None:
        raise InputError("--cluster-option goes with --cluster")
    study = Path(combinations[0].config.out).parent
    start = here if cluster is None else on_cluster(cluster, options, study)
    todo = [combination for combination in combinations if combination.left]
    if len(todo) < len(combinations):
        console.print(f"done already: {len(combinations) - len(todo)} of {len(combinations)} runs")
    if not todo:
        return []
    at_once = min(len(todo), jobs or (1 if cluster is None else len(todo)))
    seconds = sum(left or 0 for left in estimates(todo)[0]) / at_once
    with entered(study):
        return launch(todo, start, at_once, seconds, console)


def launch(
    todo: Sequence[Combination], start: Start, jobs: int, seconds: float, console: Console
) -> list[str]:
    """Run all, some at a time, with a line for each that is finished.

    One that fails does not stop the others. An interrupt or SIGTERM stops what is running.

    Args:
        todo: the runs.
        start: starts one.
        jobs: runs at a time.
        seconds: that all of it may be expected to take.
        console: told which are done.

    Returns:
        A sentence for each run that failed.
    """
    waiting, running, failures = list(todo), {}, []
    began, done = _now(), 0
    stages = Stages(console)
    sweep = stages.stage("sweep", len(todo), seconds=seconds, lines=False)
    with stages, sweep as advance, _terminable():
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    combination = waiting.pop(0)
                    running[combination.name] = (combination, start(combination), _now())
                time.sleep(_LOOK)
                codes = {name: started.poll() for name, (_, started, _) in running.items()}
                for name in [name for name, code in codes.items() if code is not None]:
                    combination, _, at = running.pop(name)
                    if codes[name]:
                        failures.append(_failure(combination))
                    done += 1
                    advance()
                    left = (_now() - began) / done * (len(todo) - done)
                    state = (
                        f"failed (code {codes[name]})" if codes[name] else f"{_now() - at:.0f} s"
                    )
                    line = f"[{done}/{len(todo)}] {name}: {state}, about {left:.0f} s left"
                    console.print(line, highlight=False, soft_wrap=True)
        finally:
            for _, started, _ in running.values():
                started.stop()
    return failures


def _now() -> float:
    return time.monotonic()


def _failure(combination: Combination) -> str:
    said = combination.log.read_text(errors="replace") if combination.log.exists() else ""
    last = [line for line in said.splitlines() if line.strip()][-1:]
    return f"{combination.name} failed: {''.join(last) or 'it said nothing'} ({combination.log})"


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM as an interrupt, so that no run is left behind without the sweep."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def here(combination: Combination) -> Started:
    """Start a run on this machine, its output in its log."""
    with combination.log.open("wb") as log:
        process = subprocess.Popen(
            combination.command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )

    def stop() -> None:
        process.terminate()
        process.wait()

    return Started(process.poll, stop)


def on_cluster(kind: str, options: Sequence[str], study: Path) -> Start:
    """What starts runs as jobs of submitit.

    Args:
        kind: `slurm`, or `local`, which is its trial on this machine.
        options: its parameters, as key=value.
        study: the folder of the sweep; what submitit itself writes is in its folder `jobs`.

    Raises:
        InputError: where submitit is not installed or does not know an option.
    """
    try:
        import submitit  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise InputError("submitit is not installed: run `pip install qrot[cluster]`") from error
    parameters = _parameters(options)
    try:
        executor = submitit.AutoExecutor(folder=study / "jobs", cluster=kind)
        executor.update_parameters(**parameters)
    except (NameError, TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise InputError(f"--cluster {kind}: {str(error).splitlines()[0]}") from error

    def start(combination: Combination) -> Started:
        job = executor.submit(execute, combination.command, str(combination.log))

        def poll() -> int | None:
            if not job.done():
                return None
            try:
                return job.result()
            except Exception as error:  # the job itself was lost: no memory, no time, no node
                with combination.log.open("a") as log:
                    log.write(f"\nthe job was lost: {_first_line(error)}\n")
                return 1

        return Started(poll, job.cancel)

    return start


def execute(command: list[str], log: str) -> int:
    """What a job does: a run, its output in its log.

    Args:
        command: that runs it.
        log: the path of a file.

    Returns:
        The exit code.
    """
    with open(log, "wb") as file:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, check=False
        ).returncode


def _parameters(options: Sequence[str]) -> dict[str, Any]:
    found = {}
    for option in options:
        key, equals, text = option.partition("=")
        if not key or not equals:
            raise InputError(f"--cluster-option '{option}': an option has the form key=value")
        if key in found:
            raise InputError(f"--cluster-option {key}: is there twice")
        with located(f"--cluster-option {option}"):
            found[key] = parse_yaml(text)
    if "timeout_min" not in found:
        raise InputError(
            "--cluster-option timeout_min=MINUTES is needed: the time that a run may take"
        )
    return found


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
