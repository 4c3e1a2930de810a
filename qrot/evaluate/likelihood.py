"""Log-likelihoods of texts, each after a context of its own.

Texts are as long as they are, so rows are padded on the right to one of a few lengths; in a causal
network nothing that is scored sees the padding. (Grids whose scale spans a whole batch, `tensor`
and a `threshold`, do see it, as they see the other rows.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from qrot.errors import InputError
from qrot.model.io.tokenizer import encode

SHORTEST = 32  # no row is padded to less
TOKENS = 1024  # in a batch: many short rows or few long ones, all about equally much work


class Request(NamedTuple):
    """A context and its continuation, in tokens.

    Attributes:
        tokens: of both.
        scored: how many of them, the last ones, are the continuation's.
    """

    tokens: Int[np.ndarray, " tokens"]
    scored: int


def encode_pair(
    tokenizer: Any,
    context: str,
    continuation: str,
    *,
    vocab_size: int,
    bos: int | None,
    prefix: int | None,
) -> Request:
    """Tokenise a context and its continuation as one text, cut where the context alone would end.

    Spaces at the end of the context go to the continuation first, as most tokens begin with one
    (so does lm-eval).

    Args:
        tokenizer: of the package `tokenizers`.
        context: what is read.
        continuation: what is scored.
        vocab_size: rows of the embedding.
        bos: put in front; None for nothing.
        prefix: what stands for a context that is empty. A text that begins with it itself has it
            for its context, as lm-eval takes it, unless nothing would be left to be scored.

    Raises:
        InputError: where the continuation has no token of its own, there is no prefix, or the
            embedding has no row for a token.
    """
    bare = context.rstrip()
    whole = encode(tokenizer, context + continuation, vocab_size)
    scored = len(whole) - len(encode(tokenizer, bare, vocab_size))
    if scored < 1:
        raise InputError(f"{continuation!r} adds no token to its context")
    if bos is not None:
        return Request(np.concatenate([[bos], whole]).astype(np.int32), scored)
    if scored < len(whole):
        return Request(whole, scored)
    if prefix is None:
        raise InputError("a context is empty, and the model has no BOS or EOS to stand for it")
    if whole[0] == prefix and scored > 1:
        return Request(whole, scored - 1)
    return Request(np.concatenate([[prefix], whole]).astype(np.int32), scored)


def log_likelihoods(
    logits_of: Callable[[Int[Array, "batch length"]], Float[Array, "batch length vocab"]],
    requests: Sequence[Request],
    *,
    window: int,
    tokens: int = TOKENS,
    advance: Callable[[int], object] = lambda done: None,
) -> tuple[Float[np.ndarray, " requests"], Bool[np.ndarray, " requests"]]:
    """Score continuations.

    Args:
        logits_of: jit-compiled logits of a batch of rows, as for `mean_nll`.
        requests: contexts and continuations.
        window: the tokens that the model reads at once; of what is longer the beginning is left
            out.
        tokens: in a batch.
        advance: told the requests done after a batch.

    Returns:
        The log-likelihood of each continuation in nats, summed over its tokens, and whether it is
        what greedy decoding would write.

    Raises:
        InputError: where a continuation alone is longer than the window.
    """
    rows = [_cut(request, window) for request in requests]
    order = sorted(range(len(rows)), key=lambda i: len(rows[i].tokens), reverse=True)
    total, greedy = np.zeros(len(rows)), np.zeros(len(rows), bool)

    def length_of(i: int) -> int:
        return padded_length(rows[i], window)

    for length, alike in groupby(order, key=length_of):
        left, batch = list(alike), max(1, tokens // length)
        while left:
            part, left = left[:batch], left[batch:]
            read, expected = _padded([rows[i] for i in part], batch, length)
            found = _of_targets(logits_of(read), expected)
            log, hit = np.asarray(found[0], np.float64), np.asarray(found[1])
            for row, i in enumerate(part):
                stop = len(rows[i].tokens) - 1
                here = slice(stop - rows[i].scored, stop)
                total[i], greedy[i] = log[row, here].sum(), hit[row, here].all()
            advance(len(part))
    return total, greedy


def padded_length(request: Request, window: int) -> int:
    """What a row of this request is padded to: a power of two, so that there are few lengths."""
    length = min(len(request.tokens) - 1, window)
    return min(window, max(SHORTEST, 1 << (length - 1).bit_length()))


def _cut(request: Request, window: int) -> Request:
    if request.scored > window:
        raise InputError(
            f"a continuation of {request.scored} tokens does not fit into the model's window, "
            f"{window}"
        )
    return Request(request.tokens[-window - 1 :], request.scored)


def _padded(rows: list[Request], batch: int, length: int) -> tuple[Any, Any]:
    """What is read and what should come next, [batch, length]; rows end in copies of their last
    token, and the batch in copies of its last row."""
    full = np.stack([np.pad(r.tokens, (0, length + 1 - len(r.tokens)), "edge") for r in rows])
    full = np.concatenate([full, np.repeat(full[-1:], batch - len(rows), 0)])
    return jnp.asarray(full[:, :-1]), jnp.asarray(full[:, 1:])


@jax.jit
def _of_targets(
    logits: Float[Array, "batch length vocab"], targets: Int[Array, "batch length"]
) -> tuple[Float[Array, "batch length"], Bool[Array, "batch length"]]:
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1), logits.argmax(-1) == targets
