"""Zero-shot tasks against lm-eval: its scores, its cut of a context, and the adapter to it."""

from functools import partial

import jax
import pytest
from tasks import characters, drawing, oracle, write_tasks

from qrot.errors import InputError
from qrot.evaluate.likelihood import encode_pair, log_likelihoods
from qrot.evaluate.zeroshot import ZeroShot, read_tasks, scores
from qrot.model.forward import forward
from qrot.model.io.load import load

words = drawing(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def model(tiny):
    return load(str(tiny / "model"))


@pytest.fixture(scope="module")
def logits_of(model):
    return partial(jax.jit(forward), model.network)


YAML = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: {output}
doc_to_text: {text}
doc_to_target: {target}
{choice}
metric_list: [{metrics}]
"""
LM_EVAL = {
    "last": ("loglikelihood", '"{{context}}"', '"{{\' \' + continuation}}"', "",
             ("perplexity", "acc")),
    "choice": ("multiple_choice", '"{{query.rstrip() + \'\\nAnswer:\'}}"', "gold",
               'doc_to_choice: "{{choices}}"', ("acc", "acc_norm")),
    "partial": ("multiple_choice", "gold", "continuation",
                'doc_to_choice: "{{context_options}}"', ("acc",)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # lm-eval's own
@pytest.mark.parametrize("bos", [False, True])
def test_lm_eval_agrees(model, logits_of, folder, tmp_path, monkeypatch, bos):
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager

    from qrot.evaluate.lm_eval import LikelihoodModel

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for name, (output, text, target, choice, metrics) in LM_EVAL.items():
        both = ", ".join(f"{{metric: {metric}}}" for metric in metrics)
        file = folder / f"{name}.jsonl"
        (tmp_path / f"{name}.yaml").write_text(
            YAML.format(name=f"qrot_{name}", file=file, output=output, text=text, target=target,
                        choice=choice, metrics=both)
        )  # fmt: skip
    theirs = lm_eval.simple_evaluate(
        LikelihoodModel(logits_of, model, bos=bos),
        tasks=[f"qrot_{name}" for name in LM_EVAL],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
        verbosity="ERROR",
    )["results"]
    window = model.network.config.max_position_embeddings
    for task in read_tasks(ZeroShot(tuple(LM_EVAL), str(folder), bos=bos), model):
        ours = scores(task, *log_likelihoods(logits_of, task.requests, window=window))
        for metric in LM_EVAL[task.name][-1]:
            assert theirs[f"qrot_{task.name}"][f"{metric},none"] == pytest.approx(ours[metric])


class Ask:
    """As lm-eval's requests are, as far as the adapter reads them."""

    def __init__(self, *args):
        self.args = args


def test_the_adapter_answers_one_by_one(model, logits_of):
    pytest.importorskip("lm_eval")
    from qrot.evaluate.lm_eval import LikelihoodModel

    adapter = LikelihoodModel(logits_of, model)
    text = words(150)
    (found,) = adapter.loglikelihood_rolling([Ask(text)])
    tokens = model.tokenizer.encode(text).ids
    # 128 tokens after BOS; the other 22 with as much before them as the window holds.
    expected = oracle(model, [1, *tokens[:128]], 128)[0] + oracle(model, tokens[-129:], 22)[0]
    assert found == pytest.approx(expected, rel=1e-5)
    (empty,) = adapter.loglikelihood([Ask("", text.split()[0])])
    assert empty[0] == pytest.approx(oracle(model, [1, tokens[0]], 1)[0], rel=1e-5)
    with pytest.raises(NotImplementedError, match="answers tasks by likelihood"):
        adapter.generate_until([Ask(text, {})])


def test_without_lm_eval_the_extra_is_named():
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        with pytest.raises(InputError, match=r"pip install qrot\[lm-eval\]"):
            import qrot.evaluate.lm_eval  # noqa: F401


@pytest.mark.parametrize("continuation", ["a", "ab", "ba", "aa"])
@pytest.mark.parametrize("prefix", [0, 1, 9])
def test_an_empty_context_is_that_of_lm_eval(continuation, prefix):
    """But for a text that is the prefix itself, of which lm-eval scores nothing: log-likelihood 0,
    the best there is. Here it follows another prefix."""
    pytest.importorskip("lm_eval")
    from types import SimpleNamespace

    from lm_eval.api.model import TemplateLM

    tokenizer = characters()
    stub = SimpleNamespace(
        prefix_token_id=prefix,
        tok_encode=lambda text, **_: tokenizer.encode(text).ids,
        _loglikelihood_tokens=lambda requests, **_: requests,
    )
    ((_, before, after),) = TemplateLM.loglikelihood(stub, [Ask("", continuation)], True)
    found = encode_pair(tokenizer, "", continuation, vocab_size=6, bos=None, prefix=prefix)
    if not after:
        before, after = [prefix], [prefix]
    assert found.tokens.tolist() == before + after
    assert found.scored == len(after) > 0


@pytest.mark.parametrize("context", ["ab", "ab ", "b  ", "a\n", "a b", " a"])
@pytest.mark.parametrize("continuation", ["ab", " ab", "\nb", " "])
def test_the_cut_is_that_of_lm_eval(context, continuation):
    """Its `_encode_pair` itself, on a tokenizer that merges across the cut."""
    pytest.importorskip("lm_eval")
    from types import SimpleNamespace

    from lm_eval.api.model import TemplateLM

    tokenizer = characters()
    stub = SimpleNamespace(backend="causal", tok_encode=lambda text: tokenizer.encode(text).ids)
    before, after = TemplateLM._encode_pair(stub, context, continuation)
    found = encode_pair(tokenizer, context, continuation, vocab_size=6, bos=None, prefix=9)
    assert found.tokens.tolist() == before + after
    assert found.scored == len(after)
