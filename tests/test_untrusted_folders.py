"""Run folders and studies that others have had in their hands, or have in them now."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from runs import CHEAP, quiet, tiny_config

from qrot.errors import InputError
from qrot.run.config import to_yaml
from qrot.run.lock import LOCK, entered
from qrot.run.run import _check_streams, run
from qrot.study.launch import run_sweep
from qrot.study.sweep import read_sweep


@pytest.fixture(scope="module")
def ran(tiny, tmp_path_factory):
    """The config of a run of two cheap rows, and its results."""
    config = tiny_config(tiny, tmp_path_factory.mktemp("ran") / "run")
    config = replace(config, methods=CHEAP)
    inside = []
    results = run(config, quiet(), report=lambda folder: inside.append((folder / LOCK).exists()))
    assert inside == [True]  # no other run can be in it while the report is written
    return config, results


def spoilt(results):
    first, second = results["rows"]
    yield {**results, "rows": [first, {**second, "nll": "x"}]}, r"damaged \(rows\.1\.nll: expected"
    yield {**results, "rows": [{**first, "method": "evil"}]}, "evil: is no row of this run"
    yield {**results, "rows": [{**first, "seed": 7}]}, "full precision, seed 7: is no row of"
    yield {**results, "rows": [first, first]}, "full precision: is no row of this run, or is there"
    yield {**results, "protocol": {}}, r"damaged \(protocol.model: this key is needed\)"
    yield [], r"damaged \(expected a section with keys protocol, rows"


def test_a_run_does_not_go_on_from_what_is_not_its_own(ran, tmp_path):
    config, results = ran
    config = replace(config, out=str(tmp_path / "run"))
    folder = Path(config.out)
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(config))
    (tmp_path / "a.yaml").write_text(to_yaml(config))
    for found, sentence in spoilt(results):
        (folder / "results.json").write_text(json.dumps(found))
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        with pytest.raises(InputError, match=rf"results\.json: {sentence}"):
            run(config, quiet())
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
        with pytest.raises(InputError, match=rf"results\.json: {sentence}"):
            read_sweep(tmp_path / "a.yaml", [], [])
    bare = {key: value for key, value in results.items() if key != "environment"}
    (folder / "results.json").write_text(json.dumps({**bare, "rows": bare["rows"][:1]}))
    (again,) = run(config, quiet())["rows"][1:]  # no row of a seed: any version of qrot will do
    assert again["nll"] == results["rows"][1]["nll"]
    assert again["environment"]["qrot"]


def test_rows_of_seeds_join_none_of_a_version_that_is_not_known(ran, tmp_path):
    config, results = ran
    config = replace(config, out=str(tmp_path), methods=(*CHEAP, "random_hadamard"))
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    for version in ("0.2rc1", "0.2.0.dev3+local"):
        environment = {**results["environment"], "qrot": version}
        _check_streams(tmp_path, {**results, "environment": environment}, [("random_hadamard", 0)])
    for version in ("", "x", None, 3, "0"):
        environment = {**results["environment"], "qrot": version}
        with pytest.raises(InputError, match=r"environment\.qrot: .* is no version"):
            _check_streams(tmp_path, {"environment": environment}, [("random_hadamard", 0)])


def test_two_sweeps_of_a_study_do_not_mix(tiny, tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text(to_yaml(replace(tiny_config(tiny, tmp_path / "study"), methods=CHEAP)))
    todo = read_sweep(file, [], ["batch=1,2"])
    study = tmp_path / "study"
    with entered(study):
        todo[0].log.write_text("of the first")
        with pytest.raises(InputError, match=rf"^{study}: another run \(pid .*\) is in it; wait"):
            run_sweep(todo, quiet(), jobs=2)
        assert todo[0].log.read_text() == "of the first"
        assert {path.name for path in study.iterdir()} == {LOCK, todo[0].log.name}
