"""A LoRA that leaves the network's function as it is and moves its outliers: python move.py OUT.

Loud channels change places with quiet ones, in all that writes them and all that reads them, which
is a change of small rank that undoes itself exactly:
- of the residual stream: the embedding, o and down write it; q, k, v, gate, up and the head read
  it. A norm's scale w stays where it is, so that what reads channel i in place of j is also
  multiplied by w_j / w_i;
- of the input of down, in each layer: gate and up write it;
- of each kv head's values, in each layer: v writes them, o reads them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from peft_folder import EMBED, HEAD, MODULES, Update, write_adapter

from qrot.calibrate.capture import Captured, capture
from qrot.evaluate.perplexity import Windows, cut_windows
from qrot.model.adapter.source import Merge
from qrot.model.forward import forward
from qrot.model.io.load import load
from qrot.model.io.tokenizer import encode
from qrot.model.params import Network
from qrot.network import fold
from qrot.rotation.random import stream
from qrot.text import Data, read_texts

RESIDUAL, INTERMEDIATE, VALUES = 8, 16, 2  # pairs of channels that change places
MOST = 64  # no change has a larger rank
Array = np.ndarray


def pairs_of(loudness: Array, count: int) -> Array:
    """The loudest channels, each with a quiet one: [count, 2]."""
    order = np.argsort(-loudness)
    return np.stack([order[:count], order[-count:]], 1)


def swapped_order(pairs: Array, n: int) -> Array:
    """The order of channels after the pairs have changed places."""
    order = np.arange(n)
    order[pairs[:, 0]], order[pairs[:, 1]] = pairs[:, 1], pairs[:, 0]
    return order


def changed(network: Network, captured: Captured, pairs: Array) -> dict[str, Array]:
    """All weights of the moved network, in float64, by projection, and EMBED and HEAD.

    Args:
        network: as it is loaded.
        captured: of it.
        pairs: channels of the residual stream that change places.
    """
    params, layers = network.params, network.params.layers
    order = swapped_order(pairs, network.config.hidden_size)
    w = {name: np.asarray(layers.linear(name).weight, np.float64) for name in MODULES}
    readers = ((layers.attention_norm, ("q", "k", "v")), (layers.mlp_norm, ("gate", "up")))
    for norm, names in readers:
        scale = np.asarray(norm, np.float64)
        for name in names:
            w[name] = w[name][:, order] * (scale[:, order] / scale)[:, :, None]
    for name in ("o", "down"):
        w[name] = w[name][:, :, order]
    loud = {
        name: np.abs(captured.inputs[name].astype(np.float32)).max(1) for name in captured.inputs
    }
    for i in range(network.config.num_hidden_layers):
        inner = swapped_order(pairs_of(loud["down"][i], INTERMEDIATE), w["down"].shape[1])
        for name in ("gate", "up"):
            w[name][i] = w[name][i][:, inner]
        w["down"][i] = w["down"][i][inner]
        _swap_values(w, i, loud["values"][i], network.config.num_attention_heads)
    embed, norm = (np.asarray(x, np.float64) for x in (params.embed, params.norm))
    head = embed if params.head is None else np.asarray(params.head, np.float64).T
    return {**w, EMBED: embed[:, order], HEAD: head[:, order] * (norm[order] / norm)}


def _swap_values(w: dict[str, Array], i: int, loud: Array, heads: int) -> None:
    """Let channels of the values of each kv head change places, in v and in o."""
    kv_heads, dim = loud.shape
    group = heads // kv_heads
    for head in range(kv_heads):
        order = swapped_order(pairs_of(loud[head], VALUES), dim)
        own = slice(head * dim, (head + 1) * dim)
        w["v"][i][:, own] = w["v"][i][:, own][:, order]
        for query in range(head * group, (head + 1) * group):
            own = slice(query * dim, (query + 1) * dim)
            w["o"][i][own] = w["o"][i][own][order]


def low_rank(change: Array) -> Update:
    """A change of a rank below MOST as a product, by what it makes of random vectors (Halko,
    Martinsson and Tropp, 2011, arXiv 0909.4061, algorithm 4.1)."""
    random = stream(0, "low rank").standard_normal((change.shape[1], MOST))
    q, _ = np.linalg.qr(change @ random)
    u, s, vt = np.linalg.svd(q.T @ change, full_matrices=False)
    rank = int((s > 1e-9 * s[0]).sum())
    return Update(q @ u[:, :rank] * s[:rank], vt[:rank])


def swapped(change: Array, pairs: Array) -> Update:
    """A change [vocab, hidden] that is -(x_i - x_j) in channel i and its like in channel j."""
    a, b = change[:, pairs[:, 0]], np.zeros((len(pairs), change.shape[1]))
    for row, (i, j) in enumerate(pairs):
        column = np.argmax(np.abs(a[:, row]))
        b[row, i] = 1.0
        b[row, j] = change[column, j] / a[column, row]
    return Update(a, b)


def main() -> None:
    """Write the PEFT folder, and say how much the logits move."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="the PEFT folder to write")
    arguments = parser.parse_args()
    model = load("smollm2")
    network = model.network
    tokens = encode(model.tokenizer, read_texts(Data()).calibration, network.config.vocab_size)
    rows = cut_windows(tokens, Windows(512, 2))
    captured, _ = capture(fold(network), rows, vectors=512, seed=0)
    loudness = np.abs(captured.inputs["qkv"].astype(np.float32)).max((0, 1))
    pairs = pairs_of(loudness, RESIDUAL)
    print("channels that change places:", ", ".join(f"{i} and {j}" for i, j in pairs))
    moved = changed(network, captured, pairs)
    layers = network.params.layers
    updates = {
        f"model.layers.{i}.{module}": low_rank(
            moved[name][i] - np.asarray(layers.linear(name).weight[i], np.float64)
        )
        for name, module in MODULES.items()
        for i in range(network.config.num_hidden_layers)
    }
    embed = np.asarray(network.params.embed, np.float64)
    updates[EMBED] = swapped(moved[EMBED] - embed, pairs)
    a, b = swapped(moved[HEAD] - embed, pairs)
    updates[HEAD] = Update(b.T, a.T)
    write_adapter(arguments.out, updates)
    ranks = [update.a.shape[1] for update in updates.values()]
    print(f"{arguments.out}: {len(updates)} updates of ranks {min(ranks)} to {max(ranks)}")
    check(network, arguments.out, rows)


def check(network: Network, adapter: Path, rows: Array) -> None:
    """Print how far the merged model's logits are from the base model's."""
    merged = load(Merge("smollm2", (str(adapter),))).network
    ours, theirs = (forward(n, jnp.asarray(rows)) for n in (network, merged))
    error = float(jnp.abs(ours - theirs).max() / jnp.abs(ours).max())
    print(f"logits move by at most {error:.1e} of the largest")


if __name__ == "__main__":
    main()
