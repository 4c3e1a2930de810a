"""Run folders that are damaged, older, or not what they say: read right, or one sentence."""

import io
import json
import math

import pytest
import yaml
from hypothesis import given, settings
from mutated import mutated
from rich.console import Console

from qrot.cli import app
from qrot.cli.run import _show
from qrot.errors import InputError
from qrot.learn.history import forget_after, load_history, seconds
from qrot.report import differences
from qrot.report.comparison import comparison
from qrot.report.curves import learning
from qrot.report.plot import plot_learning
from qrot.report.results import markdown
from qrot.report.run import report, write_report
from qrot.run.results import read_anatomy, read_results, read_scores
from qrot.study.compare import chosen, grouped, read_runs

BITS = {"weights": 4, "activations": 4, "keys": 4, "values": 8}
SCORES = {
    "lambada": {"acc": 0.5, "acc_stderr": 0.1, "perplexity": 9.0, "perplexity_stderr": 1.0},
    "piqa": {"acc": 0.5, "acc_stderr": 0.1, "acc_norm": 0.6, "acc_norm_stderr": None},
    "winogrande": {"acc": 0.5, "acc_stderr": 0.1},
}
MIXED = {
    "bits_per_weight": 3.5,
    "with_scales": 3.6,
    "expected_nats": 0.1,
    "seconds": 2.0,
    "bits": {"q": "4 4 2", "down": "8 4 16"},
}
LEARNED = {
    "objective": "cross_entropy",
    "unit": "nats",
    "optimiser": "cayley_muon",
    "steps": 3,
    "trained_weight_bits": 4,
    "start": "fisher",
    "shifts": True,
    "learn_seconds": 3.0,
    "peak_gib": 1.5,
    "rotations": "seed0/rotations.safetensors",
}


def row(method, seed, nll, **more):
    judged = {"nll": nll, "perplexity": math.exp(nll), "seconds": 3.0}
    other = {"other_nll": nll + 1, "other_perplexity": math.exp(nll + 1)}
    return {"method": method, "seed": seed, **BITS, **judged, **other, "zeroshot": SCORES, **more}


PROTOCOL = {
    "text": "pydoc, sha256 a65efeb479c71d7c",
    "window": 512,
    "count": 4,
    "stride": 512,
    "bos": False,
    "scored_tokens": 2044,
    "logits": "float32",
    "model": "a/model",
    "digest": "b179c9523d0e6a0f",
    "note": "",
    "norms": "folded",
}
KINDS = {"lambada": "continuation", "piqa": "choices", "winogrande": "contexts"}
RESULTS = {
    "protocol": {**PROTOCOL, "other_text": "a manual", "other_count": 3},
    "environment": {"qrot": "0.2.0", "cores": 2},
    "zeroshot": {
        "tasks": {name: {"kind": kind, "rows": 3, "sha256": "0"} for name, kind in KINDS.items()},
        "bos": False,
        "separator": "\nAnswer: ",
        "window": 512,
    },
    "rows": [
        row("full_precision", None, 1.0, weights=16),
        row("random_hadamard", 0, 2.0, weight_method="gptq", weight_seconds=1.0),
        row("random_hadamard", 1, 2.5, environment={"qrot": "0.2.1", "device": "another"}),
        row("learned", 0, 1.5, **LEARNED),
        row("saved", None, 1.6, weights=3.5, mixed=MIXED, rotation_seed=3),
    ],
}
# As of version 0.1, in which a learned row did not say how it began.
OLDER = {
    "protocol": PROTOCOL,
    "environment": {"qrot": "0.1.0"},
    "rows": [
        {"method": "rtn", "seed": None, **BITS, "nll": 3.0, "perplexity": 20.0, "seconds": 1},
        {"method": "learned", "seed": 0, **BITS, "nll": 2.0, "perplexity": math.exp(2),
         "seconds": 1.0, **{key: LEARNED[key] for key in list(LEARNED)[:5] if key != "unit"}},
    ],
}  # fmt: skip
CELLS = [[0.1, 2.0, 0.0], [0.5, 1.0, 9.0]]
ANATOMY = {
    "after": "learned, seed 0",
    "tokens": 2,
    "sites": {
        "residual": {"crest": {"before": [3.0, 40.0], "after": [2.0, 2.5]}},
        "down": {
            "crest": {"before": [3.0, 50.0], "after": [2.0, 2.5]},
            "error": {"before": [0.1, 0.2], "after": [0.01, math.nan]},
        },
    },
    "activation": {
        "place": "input of layer 1",
        "channels": 30,
        "loud": [[7, 9.0], [29, 2.0]],
        "before": CELLS,
        "after": CELLS,
    },
}
METRICS = [
    {"step": 0, "held_out": 2.5},
    {"step": 1, "loss": 2.4, "gradient_norm": 1.0, "learning_rate": 0.05, "seconds": 1.0},
    {"step": 2, "loss": math.nan, "gradient_norm": math.inf, "message": "diverged", "seconds": 2.0},
    {"step": 3, "loss": 2.2, "held_out": 2.3, "seconds": 1.0},
]


def written(folder, results=RESULTS, anatomy=ANATOMY, metrics=METRICS):
    (folder / "seed0").mkdir(exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results))
    (folder / "anatomy.json").write_text(json.dumps(anatomy))
    (folder / "config.yaml").write_text("out: x\nlearn: {steps: 3}\n")
    lines = "".join(json.dumps(line) + "\n" for line in metrics)
    (folder / "seed0" / "metrics.jsonl").write_text(lines)


def one_sentence(error, file):
    said = str(error)
    assert file in said
    assert "\n" not in said
    assert len(said) < 1_000


def compared(folder, other):
    """All that `qrot compare` does."""
    found = read_runs([folder], other)
    groups = grouped(found)
    base = chosen(groups, None)
    lines = differences.lines(groups, base)
    differences.markdown(lines)
    differences.as_csv(lines)
    shown = io.StringIO()
    Console(file=shown, markup=False).print(differences.terminal(lines))
    return comparison(found, groups, base)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


def test_what_is_whole_is_read(folder):
    for results in (RESULTS, OLDER):
        written(folder, results)
        assert read_results(folder / "results.json") == results
        compared(folder, other=False)
        write_report(folder)
        assert "</html>" in (folder / "report.html").read_text()
        markdown(results)
    assert (folder / "seed0" / "learning.png").exists()


@given(mutated(RESULTS, OLDER))
@settings(max_examples=80, deadline=None)
def test_results_are_read_or_one_sentence(folder, results):
    written(folder, results, metrics=[])
    for other in (False, True):
        try:
            compared(folder, other)
        except InputError as error:
            one_sentence(error, "")
    try:
        found = read_results(folder / "results.json")
    except InputError as error:
        one_sentence(error, "results.json: damaged (")
        return
    if not found["rows"]:
        return  # nothing is written of it
    report(found, [], None, "")
    _show(found, Console(file=io.StringIO(), markup=False))


SETTINGS = {"out": "x", "seeds": [0, 1], "scheme": {"keys": {"bits": 4}}, "saved": None}
OLDER_SETTINGS = {**SETTINGS, "weight_method": "gptq", "gptq": {"damping": 0.1}, "qat": {}}


@given(mutated(SETTINGS, OLDER_SETTINGS))
@settings(max_examples=60, deadline=None)
def test_settings_of_runs_are_read_or_one_sentence(folder, found):
    for name, config in (("a", SETTINGS), ("b", found)):
        (folder / "two" / name).mkdir(parents=True, exist_ok=True)
        rows = [{**one, "nll": 1.0 + (name == "a")} for one in RESULTS["rows"]]
        written(folder / "two" / name, {**RESULTS, "rows": rows})
        text = yaml.safe_dump(config)
        (folder / "two" / name / "config.yaml").write_bytes(text.encode(errors="surrogatepass"))
    try:
        compared(folder / "two", other=False)
    except InputError as error:
        one_sentence(error, "")


@given(mutated(ANATOMY))
@settings(max_examples=60, deadline=None)
def test_an_anatomy_is_read_or_one_sentence(folder, anatomy):
    (folder / "anatomy.json").write_text(json.dumps(anatomy))
    try:
        found = read_anatomy(folder / "anatomy.json")
    except InputError as error:
        one_sentence(error, "anatomy.json: damaged (")
        return
    page = report(RESULTS, [], found, "")
    assert "\x1b" not in page
    assert "<b>" not in page


@given(mutated(METRICS))
@settings(max_examples=60, deadline=None)
def test_metrics_are_read_or_one_sentence(folder, metrics):
    file = folder / "metrics.jsonl"
    lines = metrics if isinstance(metrics, list) else [metrics]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    try:
        found = load_history(file)
    except InputError as error:
        one_sentence(error, "metrics.jsonl: damaged (line ")
        return
    assert seconds(file) >= 0
    learning([("seed 0", found)], "nats", 800)
    if len(found) > 2:
        plot_learning(found, "nats", "title", folder / "learning.png")
    forget_after(file, 2)
    assert all(line["step"] <= 2 for line in load_history(file))


@given(mutated({"row": "x", "model": "y", "protocol": RESULTS["zeroshot"], "tasks": SCORES}))
@settings(max_examples=60, deadline=None)
def test_kept_scores_are_read_or_one_sentence(folder, kept):
    (folder / "zeroshot.json").write_text(json.dumps(kept))
    try:
        found = read_scores(folder / "zeroshot.json")
    except InputError as error:
        one_sentence(error, "zeroshot.json: damaged (")
        return
    assert all(isinstance(scores, dict) for scores in found["tasks"].values())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"rows": {}}, "rows: expected a list, not {}"),
        ({"rows": [1]}, r"rows.0: expected a section with keys method, seed, nll"),
        ({"rows": None}, "rows: expected a list, not None"),
        ({"protocol": None}, "protocol: expected a section, not None"),
        ({"protocol": {**PROTOCOL, "note": []}}, "protocol.note: expected a text or an integer"),
        ({"protocol": {"model": "x"}}, "protocol.note: this key is needed"),
        ({"zeroshot": None}, "zeroshot: expected a section with keys tasks, bos, separator"),
        ({"zeroshot": {**RESULTS["zeroshot"], "tasks": {"x": {"kind": "choices", "rows": 3}}}},
         "rows.0.zeroshot.x.acc: this key is needed"),
    ],
)  # fmt: skip
def test_results_that_are_refused(folder, change, sentence):
    written(folder, {**RESULTS, **change})
    with pytest.raises(InputError, match=rf"results\.json: damaged \({sentence}.*; delete it to"):
        read_results(folder / "results.json")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"nll": None}, "rows.3.nll: expected a number, not None"),
        ({"nll": "1.5"}, "rows.3.nll: expected a number, not '1.5'"),
        ({"nll": math.nan}, "rows.3.nll: nan is not finite"),
        ({"nll": 1e200}, "rows.3.nll: 1e.200 is too large"),
        ({"perplexity": math.inf}, "rows.3.perplexity: inf is not finite, or too large"),
        ({"perplexity": True}, "rows.3.perplexity: expected a number, not True"),
        ({"seed": "0"}, "rows.3.seed: expected an integer or null, not '0'"),
        ({"seed": 0.0}, "rows.3.seed: expected an integer or null, not 0.0"),
        ({"method": ["x"]}, r"rows.3.method: expected a text, not \['x'\]"),
        ({"method": "\x1b[31mx"}, "rows.3.method: a text with characters that cannot be printed"),
        ({"seconds": None}, "rows.3.seconds: expected a number, not None"),
        ({"mixed": {}}, "rows.3.mixed.bits_per_weight: this key is needed"),
        ({"mixed": {**MIXED, "bits": {}}}, "rows.3.mixed.bits: is empty"),
        ({"mixed": {**MIXED, "bits": {"q": "4 x"}}}, "rows.3.mixed.bits.q: not the bits of each"),
        ({"zeroshot": {}}, "rows.3.zeroshot.lambada.acc: this key is needed"),
        ({"weight_seconds": 1.0}, "rows.3.weight_method: this key is needed"),
        *(({key: ...}, f"rows.3.{key}: this key is needed") for key in
          ("method", "seed", "nll", "perplexity", "weights", "keys", "objective", "steps",
           "other_nll", "other_perplexity")),
    ],
)  # fmt: skip
def test_rows_that_are_refused(folder, change, sentence):
    rows = [{**one, **change} if i == 3 else one for i, one in enumerate(RESULTS["rows"])]
    rows = [{key: value for key, value in one.items() if value is not ...} for one in rows]
    written(folder, {**RESULTS, "rows": rows})
    with pytest.raises(InputError, match=rf"results\.json: damaged \({sentence}"):
        read_runs([folder])


@pytest.mark.parametrize("elsewhere", ["../other/rotations.safetensors", "/other/x"])
def test_a_row_names_no_files_of_others(tmp_path, elsewhere):
    rows = [row("learned", 0, 1.5, **{**LEARNED, "rotations": elsewhere})]
    (tmp_path / "run").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "metrics.jsonl").write_text(json.dumps(METRICS[0]) + "\n")
    written(tmp_path / "run", {**RESULTS, "rows": rows})
    with pytest.raises(InputError, match=r"rotations: '.*' is not in the folder"):
        write_report(tmp_path / "run")
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"step": 0, "lo', "line 2: not valid JSON"),
        ("[1]", "line 2: not of a step"),
        ('{"loss": 1.0}', "line 2: not of a step"),
        ('{"step": true}', "line 2: not of a step"),
        ('{"step": -1}', "line 2: there is no step -1"),
        ('{"step": 10000000000}', "line 2: there is no step 10000000000"),
        ('{"step": 1, "loss": "2"}', "line 2: loss: expected a number, not '2'"),
        ('{"step": 1, "loss": null}', "line 2: loss: expected a number, not None"),
        ('{"step": 1, "loss": 1e300}', "line 2: loss: 1e.300 is too large"),
        ('{"step": 1, "seconds": NaN}', "line 2: seconds: nan are none"),
        ('{"step": 1, "seconds": -1}', "line 2: seconds: -1 are none"),
        ('{"step": 1, "message": 3}', "line 2: message: expected a text, not 3"),
        ('{"step": 1, "step": 2}', "line 2: the key 'step' is there twice"),
        ("[" * 100_000, "line 2: not valid JSON: nested too deeply"),
        ('{"step": 1, "\\ud800": 1}', "line 2: not valid JSON: half a character"),
        ("\udcff", r"line 2: not valid JSON \('utf-8' codec"),
    ],
)
def test_metrics_that_are_refused(folder, line, sentence):
    file, first = folder / "metrics.jsonl", json.dumps(METRICS[0])
    file.write_text(f"{first}\n{line}\n", encoding="utf-8", errors="surrogateescape")
    for read in (load_history, seconds, lambda file: forget_after(file, 9)):
        with pytest.raises(InputError, match=rf"metrics\.jsonl: damaged \({sentence}"):
            read(file)
    forget_after(file, 0)  # nothing of it stays
    assert file.read_text() == ""


def test_names_are_shown_as_they_are(tmp_path, monkeypatch, capsys):
    """What the terminal's markup would take for a tag."""
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("[bold]", "[", "x]"):
        (tmp_path / "[/b]" / name).mkdir(parents=True)
        written(tmp_path / "[/b]" / name, {**RESULTS, "rows": RESULTS["rows"][1:2]})
        text = f"out: x\na: '{name}'\nb: {name!r}\nc: {name!r}\nd: {name!r}\n"
        (tmp_path / "[/b]" / name / "config.yaml").write_text(text)
    app(["compare", str(tmp_path / "[/b]")], standalone_mode=False)
    out = capsys.readouterr().out
    assert all(f"random hadamard, {name}" in out for name in ("[bold]", "[", "x]"))
