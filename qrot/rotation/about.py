"""What a file of qrot's says of itself: whose rotations or weights it holds, and how they came."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qrot.errors import InputError, located
from qrot.files.own import strictly
from qrot.files.plain import shown
from qrot.identity import Fingerprint, Identity, difference

Section = dict[str, Any]  # settings, which are checked where they are used


@dataclass(frozen=True)
class About:
    """The kinds of what is read from such files again; what else they say is passed on as it is.

    Attributes:
        model: its name, as `load` takes it where nothing is merged.
        merge: what is merged, a base model and adapters.
        digest: of its files.
        fingerprint: of its weights.
        revision: of the hub.
        row: of results, that is in the file.
        method, seed: of the row.
        nll: nats a token of the row.
        weight_bits: of its weights, on average.
        text: that judged it.
        scheme, weights, data, calibration: sections of the run's configuration.
        mixed: bits of the weights by projection.
        weight_method: its name.
        objective, steps, trained_weight_bits: of learning.
        hidden_kept: directions that SliceGPT has left.
    """

    __pydantic_config__ = {"extra": "ignore"}  # noqa: RUF012

    model: str = ""
    merge: Section | None = None
    digest: str = ""
    fingerprint: Section | None = None
    revision: str = ""
    row: str | None = None
    method: str | None = None
    seed: int | None = None
    nll: float | None = None
    weight_bits: float | None = None
    text: str | None = None
    scheme: Section = field(default_factory=dict)
    weights: Section = field(default_factory=dict)
    data: Section = field(default_factory=dict)
    calibration: Section = field(default_factory=dict)
    mixed: Section | None = None
    weight_method: str | None = None
    objective: str | None = None
    steps: int | None = None
    trained_weight_bits: int | None = None
    hidden_kept: int | None = None


def check_about(metadata: Mapping[str, Any]) -> None:
    """Raise InputError where what a file says of itself is of the wrong kind, see `About`."""
    strictly(About, metadata, "metadata")


def fitted_to(path: Path, metadata: Mapping[str, Any]) -> tuple[str, str]:
    """Name and digest of the model of a file; raises InputError where it does not say them."""
    model, digest = metadata.get("model"), metadata.get("digest")
    if not model or not digest:
        raise InputError(f"{path}: does not say which model it was fitted to")
    return model, digest


def check_model(
    path: Path, metadata: Mapping[str, Any], identity: Identity, *, allow: bool | None = None
) -> str | None:
    """Compare the model that a file was fitted to with the one that it meets.

    Args:
        path: of the file.
        metadata: of it. Files of qrot 0.2 and before know their model by its files alone.
        identity: of the model that it meets.
        allow: whether another one is a warning only; None where there is no way to ask for that.

    Returns:
        How they differ, in a sentence; None where they are the same.

    Raises:
        InputError: where they differ and that is not allowed.
    """
    model, own = fitted_to(path, metadata)
    theirs = metadata.get("fingerprint")
    if theirs is not None:
        with located(path):
            of_file = strictly(Fingerprint, theirs, "metadata.fingerprint")
        where = difference(of_file.tensors, identity.fingerprint.tensors)
    else:
        where = None if own == identity.of_files else f"{shown(own)} is not {identity.of_files}"
    if where is None:
        return None
    said = f"{path}: fitted to {shown(model)}, not to this model ({where})"
    if not allow:
        way = "; --allow-mismatch, or allow_mismatch in a config, puts it there"
        raise InputError(said if allow is None else said + way)
    warnings.warn(
        f"{said}: nothing says that it is any good there, judge what comes out", stacklevel=2
    )
    return said
