"""Rotations for other weights than those they were fitted to: kept, moved on from, or learned anew.

A new run folder names its parent, and refresh.json says what was measured and what follows from it.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from rich.console import Console

import qrot
from qrot.errors import InputError
from qrot.export.source import Source, open_source, weight_method
from qrot.files.plain import first_difference
from qrot.files.whole import write_text
from qrot.identity import difference, digest
from qrot.learn.starting_point import with_weight_bits
from qrot.learn.starts.saved import SAVED
from qrot.model.adapter.source import Merge
from qrot.model.io.load import Opened, open_model
from qrot.model.io.tokenizer import encode
from qrot.model.params import Network
from qrot.network import fold
from qrot.progress import Stages, forward_seconds, millions
from qrot.quantize.rtn import RTN
from qrot.rotation.store import read_metadata, save_rotations
from qrot.run.about import model_metadata
from qrot.run.config import RunConfig, resolved
from qrot.run.environment import environment
from qrot.run.folder import check_out, writing
from qrot.run.lock import entered
from qrot.run.methods import METHODS
from qrot.run.moved import STEPS, Tokens, known_of, moved
from qrot.run.read import read_run
from qrot.run.results import ALIGNED, BEFORE, FULL_PRECISION, REFRESH, read_before, read_refresh
from qrot.run.run import run
from qrot.run.thresholds import Refresh
from qrot.text import read_texts

_SAVED, _LEARNED = "saved", "learned"
_ENDS = ("tie_word_embeddings", "vocab_size")  # no rotation depends on them
Decision = Literal["keep", "warm", "relearn"]


class Refreshed(NamedTuple):
    """A run that was carried over to other weights.

    Attributes:
        config: of the new run.
        found: the contents of refresh.json.
        results: of results.json.
    """

    config: RunConfig
    found: dict[str, Any]
    results: dict[str, Any]


def refresh(
    parent: Path,
    model: str | Merge | None,
    out: Path,
    overrides: Sequence[str],
    console: Console,
    *,
    told: Callable[[dict[str, Any]], None] = lambda found: None,
    report: Callable[[Path], None] = lambda folder: None,
) -> Refreshed:
    """Carry a run over to other weights.

    Called again after a kill it goes on where it stopped, and what was measured is not measured
    again.

    Args:
        parent: the folder of a run that learned rotations.
        model: the other weights, of the same sizes; None for those that `overrides` names.
        out: the folder of the new run.
        overrides: settings on top of the parent's, `key=value`.
        console: that progress goes to.
        told: called with the contents of refresh.json before the new run begins.
        report: as of `qrot.run.run.run`.

    Returns:
        The new run.

    Raises:
        InputError: where the parent has no rotations, the models are of other sizes, or as
            `qrot.run.run.run` does.
    """
    config = replace(read_run(parent, overrides), out=str(out))
    config = config if model is None else replace(config, model=model)
    source = open_source(parent)
    file = source.rotations
    if file is None:
        raise InputError(f"{parent}: the row that it kept has no file of rotations to refresh")
    new = open_model(config.model, dtype=jnp.dtype(config.dtype))
    _check_sizes(source, new)
    of = _of(config, source, new, file)
    found = read_refresh(out / REFRESH)
    if found is not None and (key := first_difference(found["of"], of)):
        raise InputError(f"{out}: holds a refresh with another {key}; choose another --out")
    if found is None:
        check_out(out, _child(config, source, file, "keep"))
        found = {"of": of, **_measured(config, source, new, of, console)}
    kl = found["moved"]["kl"]
    found |= {"decision": decided(kl, config.refresh), "settings": asdict(config.refresh)}
    start = out / ALIGNED if is_aligned(kl, config.refresh) else file
    child = _child(config, source, start, found["decision"])
    check_out(out, child)
    with writing(out), entered(out):
        write_text(out / REFRESH, json.dumps(found, indent=2) + "\n")
    told(found)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*: fitted to ")  # which is what this is about
        return Refreshed(child, found, run(child, console, report=report))


def is_aligned(kl: dict[str, float], settings: Refresh) -> bool:
    """Whether the old rotations, aligned with the new weights, are better than as they are."""
    return kl["aligned"] < settings.align * kl["after"]


def decided(kl: dict[str, float], settings: Refresh) -> Decision:
    """What follows from the divergence on the old weights and on the new ones."""
    least = kl["aligned"] if is_aligned(kl, settings) else kl["after"]
    if kl["before"] <= settings.keep * least and least <= settings.keep * kl["before"]:
        return "keep"
    return "warm" if least < settings.relearn * kl["before"] else "relearn"


def _check_sizes(source: Source, new: Opened) -> None:
    """Raise InputError where the models differ in more than their weights."""
    old, other = (asdict(opened.config) for opened in (source.opened, new))
    for key, value in old.items():
        if key not in _ENDS and other[key] != value:
            raise InputError(
                f"--model: has {key} {other[key]}, where the model of {source.about['file']} has "
                f"{value}; rotations of another architecture cannot be refreshed"
            )


def _of(config: RunConfig, source: Source, new: Opened, file: Path) -> dict[str, Any]:
    """All that was compared, and what the values depend on."""
    old, other = source.opened.identity.fingerprint, new.identity.fingerprint
    settings = resolved(config)
    return {
        "parent": str(file.parent),
        "row": source.about.get("row"),
        "rotations": digest([file]),
        "before": old.total,
        "after": other.total,
        "difference": difference(old.tensors, other.tensors),
        **{key: settings[key] for key in ("scheme", "learn", "data")},
    }


def _measured(
    config: RunConfig, source: Source, new: Opened, of: Mapping[str, Any], console: Console
) -> dict[str, Any]:
    """What was found; the aligned rotations are in a file of the new run's folder then."""
    began, out = time.perf_counter(), Path(config.out)
    file, key = Path(of["parent"]) / BEFORE, _key_before(of)
    known = read_before(file)
    known = known if known is not None and known["of"] == key else None
    with Stages(console) as stages:
        with stages.stage("loading the old weights", seconds=7.0):
            before = _loaded(config, source.opened)
        with stages.stage("loading the new weights", seconds=7.0):
            after = _loaded(config, new)
        assert source.transform is not None
        seconds = 20 * forward_seconds(millions(before[0].params), 1000)
        with stages.stage("comparing old and new weights", STEPS, seconds=seconds) as advance:
            options = {"kept": _kept(source, before[0]), "known": known, "advance": advance}
            found, fitted = moved(before, after, source.transform, config.learn, **options)
    if known is None:
        with suppress(OSError):  # the parent's folder may be another's
            write_text(file, json.dumps({"of": key, **known_of(found)}, indent=2) + "\n")
    with writing(out), entered(out):
        save_rotations(out / ALIGNED, fitted, _about_aligned(config, source, new))
    told = {"environment": environment(), "seconds": time.perf_counter() - began}
    return {"moved": found, **told}


def _key_before(of: Mapping[str, Any]) -> str:
    """A digest of all that what is known of the old weights depends on."""
    new = {"after", "difference", "parent"}
    told = {key: value for key, value in of.items() if key not in new} | {"qrot": qrot.__version__}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def _kept(source: Source, network: Network) -> Network | None:
    """What the run kept, where it is the network under its rotations, rounded to nearest."""
    kept = source.network
    if kept is None or weight_method(source)[0] is not RTN or kept.scheme != network.scheme:
        return None
    return None if kept.params.embed.dtype != network.params.embed.dtype else kept


def _about_aligned(config: RunConfig, source: Source, new: Opened) -> dict[str, Any]:
    """The metadata of the old rotations, with the model that they are aligned with."""
    assert source.rotations is not None
    own = ("model", "merge", "digest", "fingerprint", "revision")
    old = {k: v for k, v in read_metadata(source.rotations).items() if k not in own}
    return {**old, **model_metadata(config.model, new.identity, new.revision)}


def _loaded(config: RunConfig, opened: Opened) -> tuple[Network, Tokens]:
    """The network with the scheme that rotations are learned for, and the text in its tokens."""
    bits = config.trained_weight_bits if config.calibrates else config.learn.weight_bits
    scheme = with_weight_bits(config.scheme, bits)
    network = fold(opened.model(opened.read()).network).replace(scheme=scheme)
    text = read_texts(config.data).calibration
    tokens = encode(opened.tokenizer, text, opened.config.vocab_size)
    return jax.block_until_ready(network), tokens


def _child(config: RunConfig, source: Source, file: Path, decision: str) -> RunConfig:
    """The run that follows: in full precision, with the old rotations, and with new ones."""
    learn, methods = config.learn, [FULL_PRECISION, _SAVED]
    if decision != "keep":
        methods.append(_LEARNED)
    if decision == "warm":
        steps = max(1, math.ceil(config.refresh.steps * learn.steps))
        learn = replace(learn, start=SAVED.name, steps=steps, draws=1)
    seed = source.about.get("seed") or 0
    return replace(
        config,
        methods=tuple(name for name in METHODS if name in methods),
        saved=str(file),
        allow_mismatch=True,
        learn_seeds=(seed,),
        learn=learn,
    )
