import errno
import io
import json
import math
import os
import re
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from runs import CALIBRATION, CHEAP, METHODS, WORDS, quiet

from qrot.cli.run import run_and_report
from qrot.errors import InputError
from qrot.evaluate.perplexity import Windows
from qrot.grid import GRIDS, Grid
from qrot.learn.settings import Learn
from qrot.quantize.gptq import Gptq
from qrot.quantize.mixed import Mixed
from qrot.report.results import bits
from qrot.rotation.random import RotationSites
from qrot.rotation.store import load_rotations
from qrot.run import results
from qrot.run import run as module
from qrot.run.config import to_yaml
from qrot.run.lock import LOCK, entered
from qrot.run.methods import learned as learned_module
from qrot.run.read import read_config
from qrot.run.run import run
from qrot.scheme import Scheme
from qrot.sites import INPUTS, SITES
from qrot.text import Data, read_texts

GROUPED = Grid(4, granularity="group", group=32)


def test_a_run_in_floating_point_says_so(config):
    """Bits alone would call it W8A8."""
    scheme = Scheme(weights=GRIDS["FP8"], activations=GRIDS["FP8"])
    few = replace(config, scheme=scheme, methods=("full_precision", "no_rotation"))
    found = run_and_report(few, Console(file=io.StringIO()))
    assert [row.get("scheme") for row in found["rows"]] == [None, "FP8KV16"]
    assert bits(found["rows"]) == "FP8KV16"
    assert 0 < abs(found["rows"][1]["nll"] - found["rows"][0]["nll"]) < 0.1


def test_a_whole_run(config):
    shown = io.StringIO()
    found = run_and_report(config, Console(file=shown))
    folder = Path(config.out)
    assert json.loads((folder / "results.json").read_text()) == found
    assert read_config(folder / "config.yaml") == config
    assert not list(folder.rglob("*.partial"))
    assert not (folder / LOCK).exists()

    protocol, environment = found["protocol"], found["environment"]
    assert (protocol["window"], protocol["count"], protocol["stride"]) == (16, 5, 16)
    assert protocol["scored_tokens"] == 75
    assert protocol["logits"] == "float32"
    assert "sha256" in protocol["text"]
    assert {"qrot", "jax", "numpy", "python", "device", "cores", "date"} <= environment.keys()

    rows = found["rows"]
    expected = [(m, s) for m in METHODS for s in {"l": (0,), "r": (0, 1)}.get(m[0], (None,))]
    expected = [(m, None if m == "no_rotation" else s) for m, s in expected]
    assert [(row["method"], row["seed"]) for row in rows] == list(dict.fromkeys(expected))
    for row in rows:
        bits = 16 if row["method"] == "full_precision" else 4
        assert [row[k] for k in ("weights", "activations", "keys", "values")] == [bits] * 4
        assert row["perplexity"] == pytest.approx(math.exp(row["nll"]))
        assert row["seconds"] > 0
    assert len({row["nll"] for row in rows if row["method"] != "learned"}) == len(rows) - (
        "learned" in METHODS
    )
    lines = shown.getvalue().splitlines()
    assert any("random hadamard, seed 1: fusing" in line for line in lines)
    assert len(lines) < 40  # no flood where there is no terminal

    if "learned" in METHODS:
        row = rows[-1]
        assert row["trained_weight_bits"] == 4
        assert row["learn_seconds"] <= row["seconds"]
        _, metadata = load_rotations(folder / row["rotations"])
        assert metadata["digest"] == protocol["digest"]
        assert metadata["scheme"]["weights"]["clip"] == "mse"
        assert (metadata["seed"], metadata["steps"]) == (0, 3)
        assert (metadata["row"], metadata["method"]) == ("learned, seed 0", "learned")
        assert metadata["weights"] == {"method": "rtn"}
        assert metadata["data"]["path"] == config.data.path
        assert metadata["calibration"] == {"windows": 64, "length": 512}
        assert "revision" not in metadata  # of no hub
        assert (folder / "learning.png").read_bytes().startswith(b"\x89PNG")
        assert (folder / "metrics.jsonl").exists()


def test_without_rounding_no_method_changes_the_model(config):
    methods = tuple(m for m in METHODS if m != "learned")
    rows = run(replace(config, scheme=Scheme(), methods=methods), quiet())["rows"]
    for row in rows:
        assert row["nll"] == pytest.approx(rows[0]["nll"], rel=1e-5)


def test_learned_with_shifts_and_clips_for_two_seeds(config):
    learn = replace(config.learn, shifts=True, clips=True, weight_bits=16)
    found = run(replace(config, learn=learn, learn_seeds=(0, 1), methods=("learned",)), quiet())
    folder = Path(config.out)
    for seed, row in enumerate(found["rows"]):
        assert row["shifts"]
        assert row["trained_weight_bits"] == 16
        assert row["rotations"] == f"seed{seed}/rotations.safetensors"
        learned, _ = load_rotations(folder / row["rotations"])
        assert set(learned.shifts) == set(INPUTS)
        assert set(learned.clips) == set(SITES)


def test_rotations_of_another_run_are_judged_alike(config):
    learn = replace(config.learn, weight_bits=16)
    config = replace(config, learn=learn, methods=("learned",), other=config.data, other_count=2)
    (row,) = run(config, quiet())["rows"]
    assert row["other_nll"] > 0
    saved = Path(config.out) / row["rotations"]
    again = replace(config, out=config.out + "-saved", methods=("saved",), saved=str(saved))
    with pytest.warns(UserWarning, match="learned with weights at 16 bits"):
        (same,) = run(again, quiet())["rows"]
    assert (same["nll"], same["other_nll"]) == (row["nll"], row["other_nll"])
    assert same["objective"] == "cross_entropy"


def test_a_rotation_file_that_is_not_there_is_named_before_anything_is_written(config, tmp_path):
    config = replace(config, methods=("no_rotation", "saved"), saved=str(tmp_path / "absent"))
    with pytest.raises(InputError, match="absent: no such rotation file"):
        run(config, quiet())
    assert not Path(config.out).exists()


def test_a_stopped_run_goes_on(config, monkeypatch):
    config = replace(config, methods=("full_precision", "no_rotation", "random_hadamard"))
    original, begun = module.judge, []

    def judge(inputs, name, *rest, **more):
        begun.append(name)
        if len(begun) == 3:
            raise KeyboardInterrupt
        return original(inputs, name, *rest, **more)

    monkeypatch.setattr(module, "judge", judge)
    with pytest.raises(KeyboardInterrupt):
        run(config, quiet())
    kept = json.loads((Path(config.out) / "results.json").read_text())["rows"]
    assert [row["method"] for row in kept] == ["full_precision", "no_rotation"]
    found = run(config, quiet())
    assert begun[3:] == ["random hadamard, seed 0", "random hadamard, seed 1"]
    assert found["rows"][:2] == kept
    run(config, quiet())
    assert len(begun) == 5  # nothing left to do


def test_a_row_that_is_measured_elsewhere_says_so(config, monkeypatch):
    config = replace(config, methods=CHEAP)
    here, original = module.environment(), module.judge

    def judge(inputs, name, network):
        if name == "no rotation":
            raise KeyboardInterrupt
        return original(inputs, name, network)

    with monkeypatch.context() as patch:
        patch.setattr(module, "judge", judge)
        with pytest.raises(KeyboardInterrupt):
            run(config, quiet())
    elsewhere = {**here, "device": "another (gpu, x86_64)"}
    monkeypatch.setattr(module, "environment", lambda: elsewhere)
    found = run(config, quiet())
    assert found["environment"]["device"] == here["device"]
    full, plain = found["rows"]
    assert "environment" not in full  # measured where the folder says
    assert plain["environment"] == elsewhere


def test_a_folder_with_a_run_in_it_is_refused(config):
    config, folder = replace(config, methods=CHEAP), Path(config.out)
    with entered(folder), pytest.raises(InputError) as error:
        run(config, quiet())
    sentence = rf"{folder}: another run \(pid {os.getpid()}, since 20.*\) is in it; wait for it, or"
    assert re.match(sentence, str(error.value))
    assert not list(folder.iterdir())
    assert len(run(config, quiet())["rows"]) == 2


def test_a_run_that_begins_while_another_is_prepared_keeps_its_folder(config, monkeypatch):
    config, folder = replace(config, methods=CHEAP), Path(config.out)
    original = module.prepare
    with ExitStack() as other:

        def prepare(*arguments):
            other.enter_context(entered(folder))
            return original(*arguments)

        monkeypatch.setattr(module, "prepare", prepare)
        with pytest.raises(InputError, match="is in it"):
            run(config, quiet())
        assert {path.name for path in folder.iterdir()} == {LOCK}


def test_the_lock_of_a_killed_run_is_no_trap(config):
    config, folder = replace(config, methods=CHEAP), Path(config.out)
    code = (
        "import os, signal, sys; from pathlib import Path; from qrot.run.lock import entered\n"
        "with entered(Path(sys.argv[1])): os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=False)
    assert (folder / LOCK).exists()
    assert len(run(config, quiet())["rows"]) == 2
    assert not (folder / LOCK).exists()


def test_a_folder_of_another_config_is_refused(config):
    config = replace(config, methods=CHEAP)
    run(config, quiet())
    before = (Path(config.out) / "results.json").read_bytes()
    other = replace(config, scheme=replace(config.scheme, keys=Grid(3)))
    with pytest.raises(InputError, match=r"another config, which differs in scheme\.keys\.bits"):
        run(other, quiet())
    assert (Path(config.out) / "results.json").read_bytes() == before


def test_a_folder_from_before_there_was_a_key_goes_on(config):
    config = replace(config, methods=CHEAP)
    before = run(config, quiet())
    file = Path(config.out) / "config.yaml"
    settings = yaml.safe_load(file.read_text())
    del settings["weights"], settings["keep"], settings["calibration"]
    older = {"weight_method": "rtn", "gptq": {"damping": 0.01, "act_order": True}}
    for form in ({}, older):  # and one from before weights were one section
        file.write_text(yaml.safe_dump({**settings, **form}))
        assert run(config, quiet())["rows"] == before["rows"]
        with pytest.raises(InputError, match=r"differs in weights\.method"):
            run(replace(config, weights=Gptq(), calibration=CALIBRATION), quiet())


def test_rows_of_a_seed_join_no_older_ones(config):
    config = replace(config, methods=("no_rotation", "random_hadamard"))
    run(replace(config, methods=CHEAP[1:]), quiet())
    folder = Path(config.out)
    (folder / "config.yaml").write_text(to_yaml(config))
    file = folder / "results.json"
    found = json.loads(file.read_text())
    found["environment"]["qrot"] = "0.1.0"
    file.write_text(json.dumps(found))
    with pytest.raises(InputError, match=r"begun by qrot 0\.1\.0, in which a seed"):
        run(config, quiet())
    assert json.loads(file.read_text()) == found
    found["environment"]["qrot"] = "0.2.0"
    file.write_text(json.dumps(found))
    assert len(run(config, quiet())["rows"]) == 3


def test_a_folder_measured_on_another_text_is_refused(config, tmp_path):
    for name in ("calibration.txt", "evaluation.txt"):
        (tmp_path / name).write_text((Path(config.data.path) / name).read_text())
    config = replace(config, methods=CHEAP, data=Data("files", str(tmp_path)))
    run(config, quiet())
    (tmp_path / "evaluation.txt").write_text(" ".join(WORDS))
    with pytest.raises(InputError, match="measured with another text"):
        run(config, quiet())


def test_a_folder_of_something_else_is_refused(config):
    Path(config.out).mkdir()
    (Path(config.out) / "results.json").write_text("mine")
    with pytest.raises(InputError, match="not a run folder"):
        run(config, quiet())
    assert (Path(config.out) / "results.json").read_text() == "mine"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model": "/absent"}, "there is no model '/absent'"),
        ({"evaluate": Windows(512)}, "the text has 400 tokens"),
        ({"evaluate": Windows(16, 50)}, "25 windows of 16, not 50"),
        (
            {"scheme": Scheme(Grid(4, granularity="group", group=32))},
            "group: 32 does not divide 48",
        ),
        (
            {"scheme": Scheme(activations=Grid(4, granularity="group", group=32))},
            "group: 32 does not divide 48",
        ),
        ({"rotations": RotationSites(residual=7)}, "a block of 7 does not divide 48"),
        ({"data": Data("files", "/absent")}, "/absent/calibration.txt: cannot be read"),
        ({"data": Data("wikitext2", "/absent")}, "/absent/wiki.train.raw: cannot be read"),
        ({"learn": Learn(length=128, held_out=3)}, "the text has 400 tokens: 3 windows of 128"),
        (
            {"methods": ("smoothquant",)},
            "calibration.windows: the text has 400 tokens: 0 windows of 512, not 64",
        ),
        (
            {"weights": Gptq()},
            "calibration.windows: the text has 400 tokens: 0 windows of 512, not 64",
        ),
        ({"mixed": Mixed()}, "mixed.windows: the text has 400 tokens: 0 windows of 512, not 8"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(config, change, sentence):
    with pytest.raises(InputError, match=sentence):
        run(
            replace(config, **{"methods": (*CHEAP, "random_hadamard", "learned"), **change}),
            quiet(),
        )
    assert not Path(config.out).exists()


@pytest.mark.parametrize("full", ["config.yaml", "results.json"])
def test_a_full_disk_leaves_nothing_half_written(config, monkeypatch, full):
    original = Path.write_text

    def write_text(path, text, **options):
        if path.name.startswith(f"{full}."):
            original(path, text[: len(text) // 2], **options)
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return original(path, text, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", write_text)
        with pytest.raises(InputError, match=r"cannot be written \(No space left on device\)"):
            run(replace(config, methods=CHEAP), quiet())
    left = {path.name for path in Path(config.out).iterdir()}
    assert left == {"config.yaml": set(), "results.json": {"config.yaml"}}[full]
    assert len(run(replace(config, methods=CHEAP), quiet())["rows"]) == 2


def test_a_full_disk_in_the_midst_of_learning(config, monkeypatch):
    def learn(*_, folder, **__):
        (folder / "rotations.safetensors.partial").write_bytes(b"half")
        raise ValueError("RESOURCE_EXHAUSTED: write failed: No space left on device [code 28]")

    config = replace(config, methods=("no_rotation", "learned"))
    with monkeypatch.context() as patch:
        patch.setattr(learned_module, "learn", learn)
        with pytest.raises(InputError, match=r"run: cannot be written \(No space left on device\)"):
            run(config, quiet())
    left = {path.name for path in Path(config.out).iterdir()}
    assert left == {"config.yaml", "results.json", "network.safetensors"}


def test_halves_that_a_killed_run_left_are_removed(config):
    config, folder = replace(config, methods=CHEAP), Path(config.out)
    run(config, quiet())
    halves = [folder / f"{place}a.0123abcd.partial" for place in ("", "networks/", "seed1/")]
    others = [folder / f"{place}/a.partial" for place in (".export.01234567.partial", "other")]
    for file in (*halves, *others):
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"half")
    with pytest.raises(InputError, match="another config"):
        run(replace(config, batch=1), quiet())
    with entered(folder), pytest.raises(InputError, match="another run"):
        run(config, quiet())
    assert all(file.exists() for file in (*halves, *others))
    run(config, quiet())
    assert not any(file.exists() for file in halves)
    assert all(file.exists() for file in others)


def test_a_full_disk_beside_an_export_leaves_that_alone(config, monkeypatch):
    (export := Path(config.out) / ".export.0123abcd.partial").mkdir(parents=True)

    def write_results(path, results):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(module, "write_results", write_results)
    with pytest.raises(InputError, match="No space left on device"):
        run(replace(config, methods=CHEAP), quiet())
    assert export.is_dir()


def test_faults_of_qrot_keep_their_traceback(config, monkeypatch):
    monkeypatch.setattr(module, "judge", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(config, quiet())


def test_pydoc_calibrates_on_no_paragraph_that_judges():
    texts = read_texts(Data())
    calibration, evaluation = (
        {part.strip() for part in text.split("\n\n")} - {""}
        for text in (texts.calibration, texts.evaluation)
    )
    assert not calibration & evaluation
    assert min(len(calibration), len(evaluation)) > 500


def test_one_text_for_both_is_refused(tmp_path):
    (tmp_path / "a").write_text("a b c")
    with pytest.raises(InputError, match="is the one that judges"):
        read_texts(Data("files", str(tmp_path), "a", "a"))


def test_damaged_results_are_named(tmp_path):
    (tmp_path / "results.json").write_text("{")
    with pytest.raises(InputError, match="damaged"):
        results.read_results(tmp_path / "results.json")


def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path):
    (tmp_path / "x.yaml").write_text("modell: smollm2\n")
    done = subprocess.run(
        [sys.executable, "-m", "qrot.cli", "run", str(tmp_path / "x.yaml")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "qrot: unknown key 'modell', did you mean 'model'?\n"
    assert done.stdout == ""


def test_a_wrong_command_exits_with_2():
    done = subprocess.run(
        [sys.executable, "-m", "qrot.cli", "runn"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
