"""What a gate lets through: limits on how far a network may be from full precision."""

from __future__ import annotations

from dataclasses import dataclass

from qrot.errors import InputError
from qrot.text import Data, read_evaluation, read_texts


@dataclass(frozen=True)
class Gate:
    """Limits that the kept network has to keep to, against the model in full precision.

    A value that is above its limit fails the run. A limit that is null is none; one at least is
    needed.

    Attributes:
        perplexity_ratio: perplexity, as a multiple of that of full precision.
        nats: nats a token above full precision.
        kl: mean Kullback-Leibler divergence from full precision, in nats a token.
        kl_p99: its 99th percentile over tokens.
        flips: share of the tokens after which another token is the most likely next one.
        site_cost: the largest cost of a site, summed over the layers, that rounding is expected to
            have, in nats a token: the objective `fisher` of one site.
        zeroshot_drop: what the mean accuracy over the tasks of `zeroshot` is below that of full
            precision.
        texts: that perplexity, divergence and flips are measured on, in the windows of `evaluate`;
            each has to pass. Empty for the text that the run is judged by.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    perplexity_ratio: float | None = None
    nats: float | None = None
    kl: float | None = None
    kl_p99: float | None = None
    flips: float | None = None
    site_cost: float | None = None
    zeroshot_drop: float | None = None
    texts: tuple[Data, ...] = ()

    def __post_init__(self):
        if not self.limits:
            raise InputError(f"gate: sets no limit; one of {', '.join(NAMES)} is needed")
        for name, limit in self.limits.items():
            if not limit >= 0:
                raise InputError(f"gate.{name}: {limit} is negative")
            if name in SHARES and limit > 1:
                raise InputError(f"gate.{name}: {limit} is above 1, the share of all")
        if len(set(self.texts)) < len(self.texts):
            raise InputError("gate.texts: names one twice")

    @property
    def limits(self) -> dict[str, float]:
        """The limits that are set, by name."""
        found = {name: getattr(self, name) for name in NAMES}
        return {name: limit for name, limit in found.items() if limit is not None}

    def __str__(self) -> str:
        texts = "the run's own text" if not self.texts else f"{len(self.texts)} texts of its own"
        limits = ", ".join(f"{name} at most {limit:g}" for name, limit in self.limits.items())
        return f"gate, on the kept network and {texts}: {limits}"


OF_TEXT = ("perplexity_ratio", "nats", "kl", "kl_p99", "flips")  # measured on each text
SITE_COST, ZEROSHOT_DROP = "site_cost", "zeroshot_drop"
NAMES = (*OF_TEXT, SITE_COST, ZEROSHOT_DROP)
SHARES = ("flips", ZEROSHOT_DROP)


def gate_texts(gate: Gate, own: Data) -> list[tuple[str, str]]:
    """The texts that a gate is measured on, each with a name that says which text it is.

    Args:
        gate: its settings.
        own: what the run is judged by.

    Raises:
        InputError: where one cannot be read.
    """
    if not gate.texts:
        texts = read_texts(own)
        return [(texts.name, texts.evaluation)]
    return [read_evaluation(data) for data in gate.texts]
