"""Trackers: what they are told, and where what they were told ends up."""

import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from runs import quiet

from qrot.cli import main
from qrot.errors import InputError
from qrot.learn.history import load_history
from qrot.run import track as module
from qrot.run.config import to_yaml
from qrot.run.run import run
from qrot.run.track import check_trackers, tracking


@pytest.fixture
def told(monkeypatch):
    """What a tracker in place of TensorBoard was told: (row, step, values), and what it closed."""
    lines = []

    @contextmanager
    def fake(folder, row, settings, step):
        lines.append(("open", row, step, settings["out"]))
        yield lambda step, values: lines.append((row, step, values))
        lines.append(("close", row))

    tracker = module.Tracker("tensorboard", "json", fake)
    monkeypatch.setitem(module.TRACKERS, "tensorboard", tracker)
    return lines


def test_trackers_are_told_what_the_files_say(config, told):
    config = replace(config, methods=("full_precision", "learned"), track=("tensorboard",))
    found = run(config, quiet())
    full, learned = found["rows"]
    steps = load_history(Path(config.out) / "metrics.jsonl")[1:]
    assert [line[:2] for line in told if line[0] in ("open", "close")] == [
        ("open", "full precision"),
        ("close", "full precision"),
        ("open", "learned, seed 0"),
        ("close", "learned, seed 0"),
    ]
    assert told[0][2:] == (None, config.out)
    assert told[3][2:] == (1, config.out)
    told_steps = [line for line in told if isinstance(line[1], int)]
    assert len(told_steps) == config.learn.steps
    for (row, step, values), line in zip(told_steps, steps, strict=True):
        assert row == "learned, seed 0"
        assert step == line["step"]
        assert values == {name: value for name, value in line.items() if name != "step"}
    assert "held_out" in told_steps[-1][2]
    results = [line for line in told if len(line) == 3 and line[1] is None]
    for (_, _, values), row in zip(results, (full, learned), strict=True):
        assert values == {name: x for name, x in row.items() if isinstance(x, float)}
        assert values["perplexity"] == row["perplexity"]
    told.clear()
    again = run(replace(config, track=()), quiet())  # the same run, looked at in another way
    assert again["rows"] == found["rows"]
    assert not told


def test_only_numbers_are_told_and_sections_by_their_path(told, tmp_path):
    with tracking(["tensorboard"], tmp_path, {"out": "x"}) as track:
        values = {"method": "m", "bits": 4, "shifts": True, "zeroshot": {"piqa": {"acc": 0.5}}}
        track("row", None, {**values, "nll": 1.5})
    assert told[1] == ("row", None, {"zeroshot/piqa/acc": 0.5, "nll": 1.5})
    assert told[2] == ("close", "row")


def test_a_missing_package_is_named_before_anything_is_done(config, monkeypatch, tmp_path, capsys):
    absent = module.TRACKERS["wandb"]._replace(package="a_package_that_is_not_there")
    monkeypatch.setitem(module.TRACKERS, "wandb", absent)
    with pytest.raises(InputError, match=r"run `pip install qrot\[wandb\]`"):
        check_trackers(["wandb"])
    (tmp_path / "four.yaml").write_text(to_yaml(config))
    monkeypatch.setattr(sys, "argv", ["qrot", "run", str(tmp_path / "four.yaml"), "track=[wandb]"])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    assert capsys.readouterr().err.startswith("qrot: track: wandb needs the package")
    assert not Path(config.out).exists()


def _scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Tag -> step -> value out of TensorBoard's event files, and purged steps under None."""
    from tensorboardX.proto.event_pb2 import Event

    found: dict = {}
    for file in sorted(folder.glob("events.*")):
        data, at = file.read_bytes(), 0
        while at < len(data):  # length (8), its checksum (4), the event, its checksum (4)
            size = int.from_bytes(data[at : at + 8], "little")
            event = Event.FromString(data[at + 12 : at + 12 + size])
            at += 16 + size
            if event.HasField("session_log"):
                found.setdefault(None, []).append(event.step)
            for value in event.summary.value:
                found.setdefault(value.tag, {})[event.step] = value.simple_value
    return found


def test_event_files_for_tensorboard(tmp_path):
    pytest.importorskip("tensorboardX")
    with tracking(["tensorboard"], tmp_path, {}) as track:
        for step in (1, 2):
            track("learned, seed 0", step, {"loss": 1.0 / step})
        track("learned, seed 0", None, {"perplexity": 40.5})
        track("no rotation", None, {"perplexity": 99.5})
    scalars = _scalars(tmp_path / "tensorboard" / "learned-seed-0")
    assert scalars["loss"] == {1: 1.0, 2: 0.5}
    assert scalars["result/perplexity"] == {0: 40.5}
    assert _scalars(tmp_path / "tensorboard" / "no-rotation")["result/perplexity"] == {0: 99.5}
    with tracking(["tensorboard"], tmp_path, {}) as track:
        track("learned, seed 0", 2, {"loss": 0.25})
    assert 2 in _scalars(tmp_path / "tensorboard" / "learned-seed-0")[None]


@pytest.mark.filterwarnings("ignore")  # its own
def test_wandb_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    for name, value in {"MODE": "offline", "SILENT": "true", "DIR": str(tmp_path)}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    with tracking(["wandb"], tmp_path, {"out": "runs/x"}) as track:
        track("learned, seed 0", 1, {"loss": 1.5})
        track("learned, seed 0", None, {"perplexity": 40.5})
    (kept,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert kept.stat().st_size > 0
