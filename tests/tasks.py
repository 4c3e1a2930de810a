"""Zero-shot tasks of all three kinds, and a slow oracle in float64 for their likelihoods."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from runs import WORDS
from tokenizers import Tokenizer, models, pre_tokenizers

from qrot.model.forward import forward


def drawing(seed):
    """A function of a count: that many words, others at each call."""
    draw = np.random.default_rng(seed)
    return lambda count: " ".join(draw.choice(WORDS, count))


def task_rows():
    """Rows of all three kinds, of 1 to 150 words: past the model's window of 128."""
    words = drawing(0)
    lengths = [1, 3, 17, 40, 150, 7]
    return {
        "last": [{"context": words(n), "continuation": words(1 + n % 3)} for n in lengths],
        "choice": [
            {
                "query": words(n) + "\n" * (n % 2),
                "choices": [words(1 + (i * n) % 5) for i in range(2 + n % 3)],
                "gold": n % 2,
                "id": n,  # fields that no kind has are left alone
            }
            for n in lengths
        ],
        "partial": [
            {
                "context_options": [words(n), words(n + 2)],
                "continuation": words(2),
                "gold": n % 2,
            }
            for n in lengths
        ],
    }


def write_tasks(path: Path) -> Path:
    """The three kinds as files."""
    for name, rows in task_rows().items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (path / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return path


exact = jax.jit(forward)


def oracle(model, tokens, scored):
    """Log-likelihood of the last `scored` tokens in float64, one row and one token at a time."""
    total, greedy = 0.0, True
    read = list(tokens)[-129:]  # the window, and the token that is predicted last
    with jax.enable_x64(True):
        network = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), model.network)
        row = jnp.asarray([(read[:-1] + [0] * 128)[:128]])  # one program for all
        logits = np.asarray(exact(network, row))[0]
    for place in range(len(read) - scored, len(read)):
        row = logits[place - 1]
        total += row[read[place]] - np.logaddexp.reduce(row)
        greedy &= bool(row[read[place]] == row.max())
    return total, greedy


def characters():
    """A BPE that merges a blank with the letter after it, so that the cut of a context matters."""
    vocabulary = {c: i for i, c in enumerate("abĠĊ")} | {"Ġa": 4, "Ġb": 5}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("Ġ", "a"), ("Ġ", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return tokenizer
