"""What is exported: a network as it was judged, what was fitted, and the model of both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Int

from qrot.calibrate.moments import Calibration
from qrot.errors import InputError, located
from qrot.evaluate.perplexity import spread_windows
from qrot.files.own import strictly
from qrot.files.plain import read_yaml, readable, short
from qrot.model.adapter.source import Merge
from qrot.model.io.load import Opened, open_model
from qrot.model.io.tokenizer import encode
from qrot.model.params import Network
from qrot.quantize.keep import is_network, load_network, read_about
from qrot.quantize.method import WeightMethod
from qrot.quantize.registry import WEIGHT_METHODS
from qrot.quantize.rtn import RTN
from qrot.records import check_name
from qrot.rotation.about import check_model, fitted_to
from qrot.rotation.store import load_rotations, read_metadata
from qrot.rotation.transform import Transform
from qrot.scheme import Scheme
from qrot.text import Data, read_texts

FITTED, KEPT, ALL_KEPT = "rotations.safetensors", "network.safetensors", "networks"
T = TypeVar("T")


@dataclass(frozen=True)
class Source:
    """What there is to export, and its model, whose parameters are yet to be read.

    Attributes:
        opened: the model.
        network: as it was judged, its weights rounded; None where it was not kept.
        transform: what was fitted; None where only the network was kept.
        rotations: the file of it; None where there is none.
        scheme: that it was judged at.
        about: what its files say of it, and as `file` where it was.
    """

    opened: Opened
    network: Network | None
    transform: Transform | None
    rotations: Path | None
    scheme: Scheme
    about: dict[str, Any]


def open_source(
    path: Path,
    *,
    model: str | None = None,
    row: str | None = None,
    allow_mismatch: bool | None = None,
) -> Source:
    """Open a run folder, a rotation file or a kept network, and the model that it names.

    Args:
        path: of a run folder, whose kept network goes before its rotations, or of a file.
        model: where that model is now, if no longer under its name.
        row: of a run's results, by its name or that of its file; the kept one if None.
        allow_mismatch: whether another model than the one that they were fitted to is taken, which
            `about` says as `mismatch`; None where the caller has no option for it.

    Raises:
        InputError: where there is nothing to export or several things, and where the model is not
            the one that they were fitted to.
    """
    with readable(path):
        there = path.exists()
    if not there:
        raise InputError(f"{path}: there is no such run folder or file")
    kept = _kept_file(path, row)
    fitted = _rotation_file(path) if kept is None else _rotations_beside(kept)
    about: dict[str, Any] = {}
    if fitted is not None:
        about = {**_settings_of_run(fitted), **read_metadata(fitted)}
    if kept is not None:
        about |= read_about(kept)
    file = kept or fitted or path
    opened = open_model(model or model_of(file, about))
    # One that was there already stays: a network that was kept from others' rotations.
    mismatch = check_model(file, about, opened.identity, allow=allow_mismatch)
    about |= {"mismatch": mismatch} if mismatch else {}
    about["file"] = str(file)
    transform = None
    if fitted is not None:
        transform = load_rotations(fitted, sizes=opened.config)[0]
    if kept is None:
        scheme = _read(Scheme, about.get("scheme", {}), file)
        return Source(opened, None, transform, fitted, scheme, about)
    network = load_network(kept, opened.config)[0]
    return Source(opened, network, transform, fitted, network.scheme, about)


def model_of(file: Path, about: Mapping[str, Any]) -> str | Merge:
    """The model that a file was fitted to, as `qrot.model.io.load.load` takes it.

    Args:
        file: a rotation file or a kept network.
        about: its metadata.

    Raises:
        InputError: where it does not say.
    """
    name = fitted_to(file, about)[0]
    return name if about.get("merge") is None else _read(Merge, about["merge"], file)


def _read(kind: type[T], settings: Any, where: object) -> T:
    """Settings out of what a file says of itself; raises InputError where they are not such."""
    with located(where):
        return strictly(kind, settings)


def weight_method(source: Source, asked: str | None = None) -> tuple[WeightMethod, Any]:
    """What rounds the weights where they are rounded anew, and its settings.

    Args:
        source: whose run said how.
        asked: another method, with its own settings; the run's if None.

    Raises:
        InputError: where there is no such method.
    """
    file = source.about["file"]
    settings = source.about.get("weights", {"method": RTN.name})
    name = settings.get("method")
    if not isinstance(name, str):
        raise InputError(f"{file}: names no method for the weights, but {short(name)}")
    if asked not in (None, name):
        settings = {"method": asked}
    check_name(name := settings["method"], WEIGHT_METHODS, "--weights")
    return WEIGHT_METHODS[name], _read(WEIGHT_METHODS[name].settings, settings, file)


def calibration_rows(source: Source) -> Int[np.ndarray, "count length"]:
    """Windows of the text that the run calibrated on; raises InputError where it is not there."""
    about, file = source.about, source.about["file"]
    data = _read(Data, about.get("data", {}), file)
    calibration = _read(Calibration, about.get("calibration", {}), file)
    opened = source.opened
    tokens = encode(opened.tokenizer, read_texts(data).calibration, opened.config.vocab_size)
    return spread_windows(tokens, calibration.length, calibration.windows)


def _kept_file(path: Path, row: str | None) -> Path | None:
    """The kept network that is meant; None where rotations are."""
    if path.is_file():
        if row is not None:
            raise InputError(f"--row picks one of the networks in a run folder; {path} is a file")
        return path if is_network(path) else None
    if row is None:
        return path / KEPT if (path / KEPT).is_file() else None
    found = {}
    for file in [*sorted((path / ALL_KEPT).glob("*.safetensors")), path / KEPT]:
        if file.is_file():
            found |= {_row_of(file): file, file.stem: file}
    if not found:
        raise InputError(f"{path}: kept no network of a row; run it again with keep=all")
    check_name(row, found, "--row")
    return found[row]


def _row_of(kept: Path) -> str:
    """The row whose network was kept."""
    row = read_about(kept).get("row")
    if not row:
        raise InputError(f"{kept}: names no row")
    return row


def _rotation_file(source: Path) -> Path:
    if not source.is_dir():
        return source
    if (source / FITTED).is_file():
        return source / FITTED
    seeds = sorted(str(path) for path in source.glob(f"seed*/{FITTED}"))
    if seeds:
        raise InputError(f"{source}: several seeds, export one of {', '.join(seeds)}")
    raise InputError(f"{source}: a run without learned rotations or a kept network")


def _rotations_beside(kept: Path) -> Path | None:
    """The rotation file of the row whose network was kept; None where there is none."""
    row = _row_of(kept)
    for folder in (kept.parent, kept.parent.parent):
        named = (file for file in folder.glob("*.safetensors") if file.stem == row)
        for file in (folder / FITTED, *named, *sorted(folder.glob(f"seed*/{FITTED}"))):
            if file.is_file() and read_metadata(file).get("row") == row:
                return file
    return None


def _settings_of_run(fitted: Path) -> dict[str, Any]:
    """What a run's config.yaml says of weights and text; {} for a file on its own.

    Rotation files of before had only the name of the weight method, and the settings of each
    method were a section of the config.
    """
    for file in _configs(fitted):
        settings = read_yaml(file)
        with located(file):
            config = _mapping(settings, "it")
            method = config.get("weight_method") or RTN.name
            if not isinstance(method, str):
                raise InputError(f"weight_method must be a name, not {short(method)}")
            key = method.partition("_")[0]  # quip_sharp shared quip's
            told = {"weights": {"method": method, **_mapping(config.get(key), key)}}
            for key in ("data", "calibration", "mixed", "weights"):
                if config.get(key) is not None:
                    told[key] = _mapping(config[key], key)
            return told
    return {}


def _mapping(settings: Any, name: str) -> dict[str, Any]:
    """A section of a configuration, {} for null; raises InputError where it is none."""
    if settings is not None and not isinstance(settings, dict):
        raise InputError(f"{name} must be a section of keys with values, not {short(settings)}")
    return settings or {}


def _configs(fitted: Path) -> Iterator[Path]:
    for folder in fitted.resolve().parents[:2]:  # in the run's folder, or in one for each seed
        if (folder / "config.yaml").is_file():
            yield folder / "config.yaml"
