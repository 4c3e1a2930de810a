"""Runs side by side: the statistics against scipy and by hand, and what is refused."""

import csv
import io
import json
import math
import subprocess
import sys

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from qrot.cli import app
from qrot.errors import InputError
from qrot.study.compare import Group, chosen, difference, differing, grouped, read_runs

PROTOCOL = dict.fromkeys(
    ("model", "note", "text", "count", "window", "stride", "bos", "logits", "norms"), "x"
)


def row(method, seed, nll):
    bits = {"weights": 4, "activations": 4, "keys": 4, "values": 4}
    return {"method": method, "seed": seed, "nll": nll, "perplexity": math.exp(nll), **bits}


def group(name, *nlls, seeds=None):
    return Group(name, [row(name, s, n) for s, n in zip(seeds or range(9), nlls, strict=False)])


@pytest.fixture
def folder(tmp_path):
    def write(name, rows, protocol=PROTOCOL, **config):
        path = tmp_path / name
        path.mkdir(parents=True)
        (path / "results.json").write_text(json.dumps({"protocol": protocol, "rows": rows}))
        (path / "config.yaml").write_text(yaml.safe_dump({"out": name, **config}))
        return path

    return write


@given(st.lists(st.floats(-3, 3), min_size=2, max_size=6), st.floats(0.001, 2))
@settings(max_examples=30, deadline=None)
def test_equal_seeds_are_paired(nlls, step):
    noise = np.linspace(0, 0.01, len(nlls))
    found = difference(group("a", *(np.array(nlls) + step + noise)), group("b", *nlls))
    expected = stats.ttest_rel(np.array(nlls) + step + noise, nlls).confidence_interval(0.95)
    assert found.paired
    np.testing.assert_allclose(found.mean, step + noise.mean(), atol=1e-12)
    np.testing.assert_allclose(found.interval, (expected.low, expected.high), atol=1e-9)


def test_pairing_tells_what_the_means_do_not():
    """Seeds move both by the same, far more than they differ."""
    ours, theirs = (1.0, 2.0, 3.0), (1.11, 2.10, 3.12)
    paired = difference(group("a", *ours), group("b", *theirs))
    assert paired.verdict == "better"
    other = difference(group("a", *ours), group("b", *theirs, seeds=(5, 6, 7)))
    assert not other.paired
    assert other.verdict == "not to be told from seed noise"
    expected = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.95)
    np.testing.assert_allclose(other.interval, (expected.low, expected.high))
    assert difference(group("b", *theirs), group("a", *ours)).verdict == "worse"


def test_what_has_no_seed_does_not_vary():
    still = group("full_precision", 3.0, seeds=(None,))
    found = difference(group("a", 4.0, 4.1, 4.2), still)
    expected = stats.ttest_1samp([4.0, 4.1, 4.2], 3.0).confidence_interval(0.95)
    np.testing.assert_allclose(found.interval, np.array([expected.low, expected.high]) - 3.0)
    assert found.verdict == "worse"
    both = difference(still, group("no_rotation", 3.5, seeds=(None,)))
    assert (both.interval, both.verdict) == (None, "better (no seeds in it)")


def test_one_seed_says_nothing():
    found = difference(group("a", 4.0), group("b", 5.0, 5.1))
    assert found.interval is None
    assert found.verdict == "one seed: cannot be told from noise"


def test_rows_are_named_by_what_sets_the_runs_apart(folder):
    def rows(nll):
        return [row("full_precision", None, 1.0), row("random_hadamard", 0, nll)]

    first, second = folder("a", rows(2.0), x={"y": 4}, z=1), folder("b", rows(3.0), x={"y": 3}, z=1)
    runs = read_runs([first, second])
    names = [g.name for g in grouped(runs)]
    assert names == ["random hadamard, x.y=3", "random hadamard, x.y=4", "full precision"]
    assert [g.name for g in grouped(runs, ["x.y"])] == names
    assert [g.name for g in grouped(read_runs([first.parent]))] == names
    with pytest.raises(InputError, match=r"--by x: no run has this key"):
        grouped(runs, ["x"])
    with pytest.raises(InputError, match=r"z=1' with seed 0: say with --by .* \(x\.y\)"):
        grouped(runs, ["z"])


def test_many_settings_are_named_by_the_folder(folder):
    for name in "ab":
        for seed in range(2):
            settings = {key: name for key in "pqrst"}
            folder(f"s/{name}/seed{seed}", [row("learned", seed, 2.0)], **settings)
    found = grouped(read_runs([folder("t", [row("learned", 0, 1.0)]).parent / "s"]))
    assert [g.name for g in found] == ["learned, a", "learned, b"]
    assert [len(g.rows) for g in found] == [2, 2]


def test_seeds_of_several_runs_are_taken_together(folder):
    for seed in range(3):
        folder(f"s/{seed}", [row("random_hadamard", seed, 2.0 + seed)], seeds=[seed], a=1)
    (found,) = grouped(read_runs([folder("s/3", [row("random_hadamard", 3, 5.0)], a=1).parent]))
    assert found.nll == {0: 2.0, 1: 3.0, 2: 4.0, 3: 5.0}
    again = folder("t", [row("random_hadamard", 3, 5.0)], a=1)
    with pytest.raises(InputError, match="two rows are 'random hadamard' with seed 3"):
        grouped(read_runs([again, again.parent / "s"]))


def test_different_protocols_do_not_compare(folder):
    first = folder("a", [row("random_hadamard", 0, 2.0)])
    other = folder("b", [row("random_hadamard", 0, 2.0)], {**PROTOCOL, "window": 9})
    with pytest.raises(InputError, match=r"protocols differ in window \(x, 9\)"):
        read_runs([first, other])
    with pytest.raises(InputError, match="no run folder"):
        read_runs([first.parent / "absent"])


def test_runs_of_older_versions_compare_with_those_of_today(folder):
    sections = {"gptq": {"damping": 0.01}, "awq": {"steps": 20}, "quip": {}, "qat": {}}
    older = folder("a", [row("learned", 0, 2.0)], weight_method="gptq", **sections)
    today = {"weights": {"method": "gptq", "damping": 0.01}}
    same = folder("b", [row("learned", 1, 2.5)], **today, keep="none")
    runs = read_runs([older, same])
    assert differing(runs) == []
    (found,) = grouped(runs)
    assert found.nll == {0: 2.0, 1: 2.5}
    plain = folder("c", [row("learned", 2, 3.0)], weight_method="rtn", **sections)
    names = [g.name for g in grouped(read_runs([older, plain]), ["weights.method"])]
    assert names == ["learned, weights.method=rtn", "learned, weights.method=gptq"]
    both = folder("d", [row("learned", 3, 3.0)], weight_method="rtn", **today)
    with pytest.raises(InputError, match=r"d/config\.yaml: .*write weights\.method=rtn"):
        read_runs([both])


def test_a_comparison_needs_no_jax(folder):
    path = folder("a", [row("random_hadamard", s, 4 + s / 10) for s in range(3)])
    code = (
        "import sys; from qrot.cli import app; app(sys.argv[1:], standalone_mode=False); "
        "assert 'jax' not in sys.modules"
    )
    command = [sys.executable, "-c", code, "compare", str(path), "--report", str(path / "a.html")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "random hadamard" in done.stdout
    assert (path / "a.html").exists()


def test_the_other_text_has_a_comparison_of_its_own(folder, capsys):
    measured = {**PROTOCOL, "scored_tokens": 8, "other_text": "a manual", "other_count": 3}
    rows = [
        {**row(name, seed, 1.0), "other_nll": nll + seed / 10, "other_perplexity": math.exp(nll)}
        for name, nll in (("random_hadamard", 3.0), ("learned", 2.0))
        for seed in range(2)
    ]
    both = folder("a", rows, measured)
    (run,) = read_runs([both], other=True)
    assert [g.nll for g in grouped([run])] == [{0: 3.0, 1: 3.1}, {0: 2.0, 1: 2.1}]
    assert {**run.results["protocol"]} == {**PROTOCOL, "text": "a manual", "count": 3}
    assert {g.nll[0] for g in grouped(read_runs([both]))} == {1.0}
    app(["compare", str(both), "--other", "--format", "markdown"], standalone_mode=False)
    assert "| learned | 2 | 7.39 ± 0.00 | -1.000 |" in capsys.readouterr().out
    with pytest.raises(InputError, match=r"b/results.json: no other text was measured"):
        read_runs([folder("b", [row("learned", 0, 1.0)])], other=True)


def test_the_row_to_compare_with():
    groups = [group("learned, a", 1.0), group("learned, b", 2.0), group("saved", 3.0)]
    assert chosen(groups, None) is groups[0]
    assert chosen(groups, "saved") is groups[2]
    with pytest.raises(InputError, match="--against learned: several of learned, a; learned, b"):
        chosen(groups, "learned")
    with pytest.raises(InputError, match="--against x: none of learned, a; "):
        chosen(groups, "x")


def test_the_command(folder, capsys):
    runs = [row("random_hadamard", s, 4 + s / 10) for s in range(3)]
    runs += [row("learned", s, 3.5 + s / 10 + s / 1000) for s in range(3)]
    path = str(folder("a", runs))
    app(["compare", path], standalone_mode=False)
    assert "learned" in capsys.readouterr().out
    app(["compare", path, "--format", "csv", "--against", "random"], standalone_mode=False)
    lines = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [line["row"] for line in lines] == ["random hadamard", "learned"]
    assert lines[1]["nats above"] == "-0.499"
    assert lines[1]["95% interval"] == "-0.501 to -0.497"
    assert lines[1]["verdict"] == "better"
    app(["compare", path, "--format", "markdown"], standalone_mode=False)
    assert "| random hadamard | 3 | 60.54 ± 6.05 |" in capsys.readouterr().out
    with pytest.raises(InputError, match="'x' is not one of terminal"):
        app(["compare", path, "--format", "x"], standalone_mode=False)
