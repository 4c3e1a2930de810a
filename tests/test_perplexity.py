"""Perplexity: which tokens are scored, and with what."""

import jax.numpy as jnp
import numpy as np
import pytest

from qrot.errors import InputError
from qrot.evaluate.losses import token_nll
from qrot.evaluate.perplexity import Windows, cut_windows, mean_nll

TEXT = np.arange(10, 33, dtype=np.int32)  # 23 tokens


@pytest.mark.parametrize(
    ("windows", "rows"),
    [
        (Windows(5, None), [[10, 14], [15, 19], [20, 24], [25, 29]]),
        (Windows(5, 2), [[10, 14], [15, 19]]),
        (Windows(5, None, stride=5), [[10, 14], [15, 19], [20, 24], [25, 29]]),
        (Windows(10, None, stride=4), [[10, 19], [14, 23], [18, 27], [22, 31]]),
        (Windows(23, None), [[10, 32]]),
        (Windows(22, None, stride=1), [[10, 31], [11, 32]]),
    ],
)
def test_windows(windows, rows):
    cut = cut_windows(TEXT, windows)
    assert cut.tolist() == [list(range(first, last + 1)) for first, last in rows]


def test_bos_takes_a_place_in_the_window():
    cut = cut_windows(TEXT, Windows(5, None, bos=True), bos_token_id=1)
    starts = range(10, 30, 4)
    assert cut.tolist() == [[1, *range(first, first + 4)] for first in starts]
    assert cut.dtype == TEXT.dtype
    with pytest.raises(InputError, match="no BOS"):
        cut_windows(TEXT, Windows(5, None, bos=True))


@pytest.mark.parametrize(
    ("windows", "message"),
    [
        (Windows(24, None), "23 tokens: 0 windows of 24, not 1"),
        (Windows(24, 1), "23 tokens: 0 windows of 24, not 1"),
        (Windows(5, 5), "23 tokens: 4 windows of 5, not 5"),
        (Windows(10, 5, stride=4), "23 tokens: 4 windows of 10, not 5"),
    ],
)
def test_a_text_that_is_too_short(windows, message):
    with pytest.raises(InputError, match=message):
        cut_windows(TEXT, windows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 1}, "length: a window of 1"),
        ({"count": 0}, "count: 0"),
        ({"stride": 0}, "stride: 0"),
        ({"length": 8, "stride": 9}, "stride: 9 is outside 1 to the text of a window, 8"),
    ],
)
def test_windows_that_make_no_sense(arguments, message):
    with pytest.raises(InputError, match=message):
        Windows(**arguments)


def random_logits(rows, seed=0):
    draw = np.random.default_rng(seed)
    return draw.normal(0, 3, (*rows.shape, 40)).astype(np.float32)


def nll_by_hand(logits, rows):
    """-log softmax of each next token, in float64, one by one."""
    result = np.zeros((len(rows), rows.shape[1] - 1))
    for i, row in enumerate(rows):
        for t in range(len(row) - 1):
            p = np.exp(logits[i, t].astype(np.float64))
            result[i, t] = -np.log(p[row[t + 1]] / p.sum())
    return result


def replay(logits, rows):
    """A network that answers with `logits`, and fails for any other rows or batch."""
    of = {tuple(row): logit for row, logit in zip(rows.tolist(), logits, strict=True)}

    def logits_of(batch):
        return jnp.asarray(np.stack([of[tuple(row)] for row in np.asarray(batch).tolist()]))

    return logits_of


@pytest.mark.parametrize("batch", [1, 2, 3, 8])
def test_mean_nll_by_hand(batch):
    windows = Windows(5, None)
    rows = cut_windows(TEXT, windows)
    logits, done = random_logits(rows), []
    result = mean_nll(replay(logits, rows), rows, windows, batch=batch, advance=done.append)
    np.testing.assert_allclose(result, nll_by_hand(logits, rows).mean(), rtol=1e-5)
    assert sum(done) == len(rows)


def test_token_nll():
    rows = cut_windows(TEXT, Windows(5, 2))
    logits = random_logits(rows)
    expected = nll_by_hand(logits, rows)
    result = token_nll(jnp.asarray(logits), jnp.asarray(rows))
    np.testing.assert_allclose(result, expected, rtol=1e-5)
    half = token_nll(jnp.asarray(logits, jnp.bfloat16), jnp.asarray(rows))
    assert half.dtype == jnp.float32
    np.testing.assert_allclose(half, expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("stride", [1, 3, 4, 7, 8])
def test_overlapping_windows_score_every_token_once(stride, bos):
    """Each token costs its own number of nats, so the mean tells which were scored."""
    windows = Windows(8, None, stride=min(stride, 7) if bos else stride, bos=bos)
    rows = cut_windows(TEXT, windows, bos_token_id=1)
    price = {token: float(token**2) for token in range(40)}

    def logits_of(batch):
        """Logits whose next-token cost is price: 2 classes, and 0 for all others."""
        following = np.roll(np.asarray(batch), -1, axis=1)
        logits = np.full((*batch.shape, 40), -1e4, np.float32)
        np.put_along_axis(logits, np.zeros_like(following)[..., None], 0, axis=-1)
        cost = np.vectorize(price.get)(following).astype(np.float32)
        np.put_along_axis(logits, following[..., None], -cost[..., None], axis=-1)
        return jnp.asarray(logits)

    result = mean_nll(logits_of, rows, windows, batch=2)
    last = rows[-1, -1]
    tokens = set(range(10 if bos else 11, last + 1))
    if windows.stride == 8:  # windows side by side: the first of each is not predicted
        tokens -= {10, 18}
    np.testing.assert_allclose(result, np.mean([price[t] for t in tokens]), rtol=1e-5)


def test_uniform_logits_have_the_perplexity_of_the_vocabulary():
    windows = Windows(5, None)
    rows = cut_windows(TEXT, windows)
    nll = mean_nll(lambda batch: jnp.zeros((*batch.shape, 40)), rows, windows)
    np.testing.assert_allclose(np.exp(nll), 40, rtol=1e-5)


def test_a_batch_is_at_most_all_windows():
    windows, shapes = Windows(5, 4), []
    rows = cut_windows(TEXT, windows)

    def logits(batch):
        shapes.append(batch.shape)
        return jnp.zeros((*batch.shape, 40))

    mean_nll(logits, rows, windows, batch=10**10)
    assert shapes == [(4, 5)]
