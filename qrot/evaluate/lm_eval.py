"""A model of qrot's, rotated and quantised or not, as lm-eval wants it.

    lm_eval.simple_evaluate(model=LikelihoodModel(logits_of, model), tasks=["piqa"])

Needs `pip install qrot[lm-eval]`. It answers by likelihood; tasks that generate text are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
from jaxtyping import Array, Float, Int

from qrot.errors import InputError
from qrot.evaluate.likelihood import Request, encode_pair, log_likelihoods
from qrot.model.io.tokenizer import encode
from qrot.model.params import Model

try:
    from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]
    from lm_eval.utils import (  # pyright: ignore[reportMissingImports]
        get_rolling_token_windows,
        make_disjoint_window,
    )
    from tqdm import tqdm  # pyright: ignore[reportMissingModuleSource]
except ImportError as error:
    raise InputError("lm-eval is not installed: run `pip install qrot[lm-eval]`") from error


class LikelihoodModel(LM):
    """A logits function with the tokenizer and the window of a model.

    An empty context is BOS, or EOS where the model has no BOS, with or without `bos`.
    """

    def __init__(
        self,
        logits_of: Callable[[Int[Array, "batch length"]], Float[Array, "batch length vocab"]],
        model: Model,
        *,
        bos: bool = False,
    ):
        """Wrap a network.

        Args:
            logits_of: jit-compiled logits of a batch of rows.
            model: whose tokenizer and window are used.
            bos: whether a BOS token stands before every context.

        Raises:
            InputError: where BOS is asked of a model without.
        """
        super().__init__()
        config = model.network.config
        if bos and config.bos_token_id is None:
            raise InputError("bos: this model has no BOS token")
        self._logits_of, self._tokenizer = logits_of, model.tokenizer
        self._window, self._vocab_size = config.max_position_embeddings, config.vocab_size
        self._bos = config.bos_token_id if bos else None
        self._prefix = config.prefix_token_id

    def loglikelihood(
        self, requests: list[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation after its context, and whether it is greedy."""
        about = {"vocab_size": self._vocab_size, "bos": self._bos, "prefix": self._prefix}
        pairs = [encode_pair(self._tokenizer, *r.args, **about) for r in requests]
        return self._answers(pairs, disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of each whole text, in windows that overlap by one token, as lm-eval cuts
        them; the first token follows BOS, or EOS where there is none."""
        if self._prefix is None:
            raise InputError("a text needs a BOS or EOS before it, and the model has neither")
        parts, owners = [], []
        for owner, request in enumerate(requests):
            tokens = encode(self._tokenizer, request.args[0], self._vocab_size).tolist()
            for window in get_rolling_token_windows(tokens, self._prefix, self._window, 1):
                context, scored = make_disjoint_window(window)
                parts.append(Request(np.asarray(context + scored, np.int32), len(scored)))
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, (found, _greedy) in zip(owners, self._answers(parts, disable_tqdm), strict=True):
            totals[owner] += found
        return totals

    def generate_until(self, requests: list[Any], **_: Any) -> NoReturn:
        """Not there: raises NotImplementedError."""
        raise NotImplementedError("qrot answers tasks by likelihood; this one generates text")

    def _answers(self, requests: list[Request], quiet: bool) -> list[tuple[float, bool]]:
        with tqdm(total=len(requests), desc="likelihoods", disable=quiet) as bar:
            found, greedy = log_likelihoods(
                self._logits_of, requests, window=self._window, advance=bar.update
            )
        return [(float(x), bool(y)) for x, y in zip(found, greedy, strict=True)]
