"""What llama.cpp makes of exported GGUF files, against what qrot makes of the same files.

    python experiments/served/llama_cpp.py DIR FILE.gguf ...

DIR holds WikiText-2's raw files. llama.cpp comes from the package llama-cpp-py-sync.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from qrot.evaluate.losses import token_nll
from qrot.evaluate.perplexity import Windows, cut_windows
from qrot.export.formats.gguf import read_network
from qrot.export.verify import logits_in_qrot
from qrot.model.io.load import open_model
from qrot.model.io.tokenizer import encode
from qrot.text import Data, read_texts


def main() -> None:
    """Print a table with a row for each file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("texts", help="the folder of WikiText-2's raw files")
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--cache", default="f16", help="the type of llama.cpp's cache: f16, f32")
    asked = parser.parse_args()
    windows = Windows(length=asked.length, count=asked.windows)
    opened = open_model("smollm2")
    text = read_texts(Data("wikitext2", asked.texts)).evaluation
    rows = cut_windows(encode(opened.tokenizer, text, opened.config.vocab_size), windows)
    print("| file | MB | in llama.cpp | in qrot | nats apart, mean | largest |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for file in asked.files:
        theirs, ours = in_llama_cpp(file, rows, asked.cache), in_qrot(file, rows)
        apart = np.abs(theirs - ours)
        size = file.stat().st_size / 1e6
        perplexity = (f"{np.exp(x.mean()):.3f}" for x in (theirs, ours))
        columns = (
            file.stem,
            f"{size:.0f}",
            *perplexity,
            f"{apart.mean():.1e}",
            f"{apart.max():.1e}",
        )
        print(f"| {' | '.join(columns)} |", flush=True)


def in_qrot(file: Path, rows: Int[np.ndarray, "count length"]) -> Float[np.ndarray, "count rest"]:
    """Nats of each token but the first, in qrot."""
    logits = logits_in_qrot(read_network(file))
    return np.concatenate([nats(logits(row), row) for row in np.split(rows, len(rows))])


def nats(
    logits: Float[np.ndarray, "count length vocab"], rows: Int[np.ndarray, "count length"]
) -> Float[np.ndarray, "count rest"]:
    """Of each token but the first, by the logits before it."""
    return np.asarray(token_nll(jnp.asarray(logits), jnp.asarray(rows)))


def in_llama_cpp(
    file: Path, rows: Int[np.ndarray, "count length"], cache: str
) -> Float[np.ndarray, "count rest"]:
    """Nats of each token but the first, in llama.cpp, a window at a time."""
    import llama_cpp_py_sync

    length = rows.shape[1]
    model = llama_cpp_py_sync.Llama(
        str(file), n_ctx=length, n_batch=length, type_k=cache, type_v=cache
    )
    found = [nats(prompt_logits(model, row)[None], row[None]) for row in rows]
    model.close()
    return np.concatenate(found)


def prompt_logits(model: Any, row: Int[np.ndarray, " length"]) -> Float[np.ndarray, "length vocab"]:
    """The logits behind every token of a prompt."""
    library, ffi = model._lib, model._ffi
    model._clear_context_state()
    batch = library.llama_batch_init(len(row), 0, 1)
    batch.n_tokens = len(row)
    for i, token in enumerate(row.tolist()):
        batch.token[i], batch.pos[i], batch.logits[i] = token, i, 1
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
    if library.llama_decode(model._ctx, batch):
        raise SystemExit("llama.cpp could not decode the prompt")
    count = len(row) * model.n_vocab
    content = ffi.buffer(library.llama_get_logits(model._ctx), 4 * count)
    logits = np.frombuffer(content, np.float32).reshape(len(row), -1).copy()
    library.llama_batch_free(batch)
    return logits


if __name__ == "__main__":
    main()
