"""Zero-shot tasks: against a slow oracle in float64, and in a run."""

import json
import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from runs import CHEAP, WORDS, quiet
from tasks import characters, oracle, write_tasks

from qrot.cli import app
from qrot.errors import InputError
from qrot.evaluate.likelihood import Request, encode_pair, log_likelihoods, padded_length
from qrot.evaluate.zeroshot import Task, ZeroShot, read_rows, read_tasks, scores
from qrot.model.forward import forward
from qrot.model.io.load import load
from qrot.report.results import markdown
from qrot.report.scores import score_cells
from qrot.run import zeroshot as module
from qrot.run.config import to_yaml
from qrot.run.read import read_config
from qrot.run.run import run
from qrot.study.compare import grouped, read_runs

DRAW = np.random.default_rng(0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def model(tiny):
    return load(str(tiny / "model"))


@pytest.fixture(scope="module")
def logits_of(model):
    return partial(jax.jit(forward), model.network)


def by_hand(model, name, rows):
    """The scores of a task by the definitions, in float64, with a vocabulary of whole words."""
    number = {word: i for i, word in enumerate(WORDS)}

    def ask(context, continuation):
        after = [number[word] for word in continuation.split()]
        before = [number.get(word, 0) for word in context.replace(":", " : ").split()]
        return oracle(model, before + after, len(after))

    if name == "last":
        found = [ask(row["context"], row["continuation"]) for row in rows]
        acc = [hit for _, hit in found]
        return {"acc": np.mean(acc), "perplexity": math.exp(-np.mean([ll for ll, _ in found]))}
    right, normed = [], []
    for row in rows:
        if name == "choice":
            lls = [ask(row["query"] + " Answer:", choice)[0] for choice in row["choices"]]
            per = [ll / len(choice) for ll, choice in zip(lls, row["choices"], strict=True)]
            normed.append(max(range(len(per)), key=per.__getitem__) == row["gold"])
        else:
            lls = [ask(context, row["continuation"])[0] for context in row["context_options"]]
        right.append(max(range(len(lls)), key=lls.__getitem__) == row["gold"])
    both = {"acc": np.mean(right)}
    return both | ({"acc_norm": np.mean(normed)} if normed else {})


@pytest.mark.parametrize("name", ["last", "choice", "partial"])
def test_scores_are_those_of_a_slow_oracle(model, logits_of, folder, name):
    (task,) = read_tasks(ZeroShot((name,), str(folder)), model)
    window = model.network.config.max_position_embeddings
    log, greedy = log_likelihoods(logits_of, task.requests, window=window)
    for request, found, hit in zip(task.requests, log, greedy, strict=True):
        expected, greedily = oracle(model, request.tokens, request.scored)
        assert found == pytest.approx(expected, rel=1e-5)
        assert hit == greedily
    found = scores(task, log, greedy)
    for key, value in by_hand(model, name, task_rows_of(folder, name)).items():
        assert found[key] == pytest.approx(value, rel=1e-4)
    n = len(task.rows)
    assert found["count"] == n == 6
    p = found["acc"]
    assert found["acc_stderr"] == pytest.approx(math.sqrt(p * (1 - p) / (n - 1)))


def task_rows_of(folder, name):
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_padding_and_neighbours_do_not_change_a_score(logits_of, model):
    requests = [Request(DRAW.integers(0, 97, n).astype(np.int32), 1 + n % 4) for n in
                (5, 33, 34, 65, 129)]  # fmt: skip
    assert sorted({padded_length(r, 128) for r in requests}) == [32, 64, 128]
    together, greedy = log_likelihoods(logits_of, requests, window=128, tokens=200)
    for request, found, hit in zip(requests, together, greedy, strict=True):
        alone = logits_of(jnp.asarray(request.tokens[None, :-1]))[0]
        log = np.asarray(jax.nn.log_softmax(alone), np.float64)
        last = request.tokens[-request.scored :]
        places = range(len(log) - request.scored, len(log))
        assert found == pytest.approx(sum(log[p, t] for p, t in zip(places, last, strict=True)),
                                      rel=1e-5)  # fmt: skip
        assert hit == all(log[p].argmax() == t for p, t in zip(places, last, strict=True))


def test_what_greedy_decoding_writes_is_greedy(logits_of):
    tokens = [3, 1, 4]
    for _ in range(3):
        tokens.append(int(logits_of(jnp.asarray([tokens]))[0, -1].argmax()))
    other = [*tokens[:-1], (tokens[-1] + 1) % 97]
    requests = [Request(np.asarray(t, np.int32), 3) for t in (tokens, other)]
    assert log_likelihoods(logits_of, requests, window=128)[1].tolist() == [True, False]


@pytest.mark.parametrize(
    ("context", "continuation", "tokens", "scored"),
    [
        ("ab", " ab", [0, 1, 4, 1], 2),
        ("ab ", "ab", [0, 1, 4, 1], 2),  # the blank goes to the continuation
        ("ab\n", "a", [0, 1, 3, 0], 2),
        ("", "ab", [9, 0, 1], 2),
        ("", "", None, "adds no token"),
        ("  ", "a", [9, 2, 4], 2),
        ("b", "", None, "adds no token"),
    ],
)
def test_where_a_context_ends(context, continuation, tokens, scored):
    if tokens is None:
        with pytest.raises(InputError, match=scored):
            encode_pair(characters(), context, continuation, vocab_size=6, bos=None, prefix=9)
        return
    found = encode_pair(characters(), context, continuation, vocab_size=6, bos=None, prefix=9)
    assert (found.tokens.tolist(), found.scored) == (tokens, scored)
    found = encode_pair(characters(), context, continuation, vocab_size=6, bos=8, prefix=8)
    assert found.tokens.tolist() == [8, *(tokens if context.strip() else tokens[1:])]
    assert found.scored == scored


def test_a_context_that_cannot_be_asked():
    with pytest.raises(InputError, match="a context is empty"):
        encode_pair(characters(), "", "ab", vocab_size=6, bos=None, prefix=None)
    assert encode_pair(characters(), "", "ab", vocab_size=6, bos=None, prefix=0).scored == 1
    with pytest.raises(InputError, match="a continuation of 9 tokens does not fit into"):
        log_likelihoods(lambda rows: rows, [Request(np.arange(10), 9)], window=8)


def test_a_choice_is_normed_by_its_characters():
    rows = [{"query": "q", "choices": ["éé", "abcd"], "gold": 0}]
    task = Task("t", "choices", rows, "", [])
    found = scores(task, np.array([-3.0, -5.0]), np.zeros(2, bool))
    assert found["acc"] == 1
    assert found["acc_norm"] == 0  # -3 / 2 characters < -5 / 4; by byte it would be -3 / 4 > -5 / 4
    assert found["acc_stderr"] is None  # one row has no spread


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"context": "a", "continuation": "b"}\n{"context": "a"', "line 2: not valid JSON"),
        ('{"context": "a", "continuation": "b"}\n\n', "line 2: not valid JSON"),
        ("", "line 1: not valid JSON"),
        ("[1]", "line 1: not an object"),
        ('{"text": "a"}', "line 1: no field context, query or context_options"),
        ('{"context": "a"}', "line 1: continuation is missing"),
        ('{"context": "a", "continuation": ""}', "line 1: continuation is empty"),
        ('{"query": 3, "choices": ["a", "b"], "gold": 0}', "line 1: query is missing or no text"),
        ('{"query": "a", "choices": ["a"], "gold": 0}', "line 1: choices is missing or no list"),
        ('{"query": "a", "choices": ["a", ""], "gold": 0}', "line 1: choices holds something"),
        ('{"query": "a", "choices": ["a", "b"], "gold": 2}', "gold is missing or none of 0 to 1"),
        ('{"query": "a", "choices": ["a", "b"], "gold": true}', "gold is missing or none of 0"),
        (
            '{"context": "a", "continuation": "b"}\n'
            '{"context_options": ["a", "b"], "continuation": "c", "gold": 0}',
            "line 2: the fields of another task",
        ),
    ],
)
def test_a_damaged_file_is_named_with_the_line(tmp_path, text, sentence):
    file = tmp_path / "bad.jsonl"
    file.write_text(text)
    with pytest.raises(InputError) as error:
        read_rows(file)
    assert str(error.value).startswith(f"{file}, line ")
    assert sentence in str(error.value)


def test_lines_end_at_line_feeds_only(tmp_path):
    file = tmp_path / "a.jsonl"
    row = {"context": "a\u2028b", "continuation": "c"}
    file.write_text(json.dumps(row, ensure_ascii=False), encoding="utf-8")
    assert read_rows(file)[:2] == ("continuation", [row])
    with pytest.raises(InputError, match=r"absent\.jsonl: cannot be read \("):
        read_rows(tmp_path / "absent.jsonl")


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("zeroshot={tasks: [piqa]}", "zeroshot.path: give the folder that holds tasks which"),
        ("zeroshot={tasks: []}", r"zeroshot.tasks: \[\] is empty or names one twice"),
        ("zeroshot={tasks: [a/x.jsonl, b/x.jsonl]}", "names one twice"),
        ("zeroshot={tasks: [x.jsonl], count: 0}", "zeroshot.count: 0 rows are none"),
        ("zeroshot.path=x", "zeroshot.tasks: this key is needed"),
        ("zeroshot.task=[x.jsonl]", "did you mean 'zeroshot.tasks'"),
    ],
)
def test_settings_that_make_no_sense(tmp_path, override, sentence):
    (tmp_path / "x.yaml").write_text("model: smollm2\n")
    with pytest.raises(InputError, match=sentence):
        read_config(tmp_path / "x.yaml", [override])


@pytest.fixture
def judged(config, folder):
    tasks = ("last", "choice", str(folder / "partial.jsonl"))
    settings = ZeroShot(tasks, str(folder), count=5)
    return replace(config, methods=(*CHEAP, "random_hadamard"), zeroshot=settings)


def test_a_run_with_tasks(judged, model, folder, tmp_path, capsys):
    file = tmp_path / "tasks.yaml"
    file.write_text(to_yaml(judged))
    app(["run", str(file)], standalone_mode=False)
    shown = capsys.readouterr().out
    assert "Zero-shot: last (5 rows), choice (5 rows), partial (5 rows), no BOS." in shown
    found = json.loads((Path(judged.out) / "results.json").read_text())
    assert not (Path(judged.out) / module.FILE).exists()
    assert list(found["zeroshot"]["tasks"]) == ["last", "choice", "partial"]
    assert found["zeroshot"]["separator"] == "\nAnswer: "
    first = found["rows"][0]["zeroshot"]
    for name in ("last", "choice", "partial"):
        for key, value in by_hand(model, name, task_rows_of(folder, name)[:5]).items():
            assert first[name][key] == pytest.approx(value, rel=1e-3)
        for row in found["rows"]:
            assert {"acc", "acc_stderr", "count"} <= row["zeroshot"][name].keys()
    quantised = [row["zeroshot"]["last"]["perplexity"] for row in found["rows"]]
    assert len(set(quantised)) == len(quantised)  # each by its own weights
    lines = score_cells(found)
    assert [line[:3] for line in lines[:3]] == [
        ("last", "full precision", ""),
        ("last", "no rotation", ""),
        ("last", "random hadamard", "2"),
    ]
    assert all(re.fullmatch(r"\d+\.\d ± \d+\.\d", line[3]) for line in lines)
    assert "…" not in shown  # 80 columns are enough
    assert "| partial | random hadamard | 2 | " in markdown(found)
    assert len(grouped(read_runs([Path(judged.out)]))) == 3  # compare reads it as any other
    assert yaml.safe_load((Path(judged.out) / "config.yaml").read_text())["zeroshot"]["count"] == 5


def test_a_stopped_row_goes_on_at_the_next_task(judged, folder, monkeypatch):
    judged = replace(judged, methods=("no_rotation",))
    original, asked = module._judge, []

    def stopping(inputs, name, logits, task):
        asked.append(task.name)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return original(inputs, name, logits, task)

    monkeypatch.setattr(module, "_judge", stopping)
    with pytest.raises(KeyboardInterrupt):
        run(judged, quiet())
    found = run(judged, quiet())
    assert asked == ["last", "choice", "choice", "partial"]
    assert list(found["rows"][0]["zeroshot"]) == ["last", "choice", "partial"]
    run(judged, quiet())
    assert len(asked) == 4
    with pytest.raises(InputError, match=r"another config, which differs in zeroshot\.count"):
        run(replace(judged, zeroshot=replace(judged.zeroshot, count=4)), quiet())


def test_a_task_that_changed_is_refused(judged, folder, tmp_path):
    for file in folder.glob("*.jsonl"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = ZeroShot(("last",), str(tmp_path))
    judged = replace(judged, methods=("full_precision",), zeroshot=settings)
    run(judged, quiet())
    (tmp_path / "last.jsonl").write_bytes((folder / "choice.jsonl").read_bytes())
    with pytest.raises(InputError, match=r"measured with another zeroshot\.tasks\.last"):
        run(judged, quiet())


def test_a_damaged_task_stops_a_run_before_anything_is_written(judged, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"context": "a", "continuation": " "}\n')
    judged = replace(judged, zeroshot=ZeroShot((str(tmp_path / "bad.jsonl"),)))
    with pytest.raises(InputError, match=r"bad\.jsonl, line 1: ' ' adds no token"):
        run(judged, quiet())
    assert not Path(judged.out).exists()
