"""What is exported: a network as it was judged, what was fitted, and the model of both."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import yaml
from jaxtyping import Int
from pydantic import TypeAdapter, ValidationError

from qrot.calibrate.moments import Calibration
from qrot.errors import InputError, located
from qrot.evaluate.perplexity import spread_windows
from qrot.model.io.load import Opened, open_model
from qrot.model.io.tokenizer import encode
from qrot.model.params import Network
from qrot.quantize.keep import load_network, read_about
from qrot.quantize.method import WeightMethod
from qrot.quantize.registry import WEIGHT_METHODS
from qrot.quantize.rtn import RTN
from qrot.records import check_name
from qrot.rotation.store import check_digest, load_rotations
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
        scheme: that it was judged at.
        about: what its files say of it, and as `file` where it was.
    """

    opened: Opened
    network: Network | None
    transform: Transform | None
    scheme: Scheme
    about: dict[str, Any]


def open_source(path: Path, *, model: str | None = None, row: str | None = None) -> Source:
    """Open a run folder, a rotation file or a kept network, and the model that it names.

    Args:
        path: of a run folder, whose kept network goes before its rotations, or of a file.
        model: where that model is now, if no longer under its name.
        row: of a run's results, by its name or that of its file; the kept one if None.

    Raises:
        InputError: where there is nothing to export or several things, and where the model is not
            the one that they were fitted to.
    """
    if not path.exists():
        raise InputError(f"{path}: there is no such run folder or file")
    kept = _kept_file(path, row)
    fitted = _rotation_file(path) if kept is None else _rotations_beside(kept)
    network, transform, about = None, None, {}
    if fitted is not None:
        transform, about = load_rotations(fitted)
        about = {**_settings_of_run(fitted), **about}
    if kept is not None:
        network, own = load_network(kept)
        about |= own
    file = kept or fitted
    opened = open_model(model or about["model"])
    check_digest(Path(str(file)), about, opened.digest)
    about["file"] = str(file)
    if network is None:
        scheme = read(Scheme, about.get("scheme", {}), about["file"])
    else:
        scheme = network.scheme
    return Source(opened, network, transform, scheme, about)


def read(kind: type[T], settings: Any, where: object) -> T:
    """Settings out of a file's metadata.

    Args:
        kind: a dataclass.
        settings: plain values.
        where: the file, for messages.

    Raises:
        InputError: where they are not of this kind.
    """
    with located(where):
        try:
            return TypeAdapter(kind).validate_json(json.dumps(settings), strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            raise InputError(f"{kind.__name__}.{key}: {first['msg']}") from error


def weight_method(source: Source, asked: str | None = None) -> tuple[WeightMethod, Any]:
    """What rounds the weights where they are rounded anew, and its settings.

    Args:
        source: whose run said how.
        asked: another method, with its own settings; the run's if None.

    Raises:
        InputError: where there is no such method.
    """
    settings = source.about.get("weights", {"method": RTN.name})
    if asked not in (None, settings["method"]):
        settings = {"method": asked}
    check_name(settings["method"], WEIGHT_METHODS, "--weights")
    method = WEIGHT_METHODS[settings["method"]]
    return method, read(method.settings, settings, source.about["file"])


def calibration_rows(source: Source) -> Int[np.ndarray, "count length"]:
    """Windows of the text that the run calibrated on; raises InputError where it is not there."""
    about, file = source.about, source.about["file"]
    data, windows = read(Data, about.get("data", {}), file), about.get("calibration", {})
    calibration = read(Calibration, windows, file)
    tokens = encode(source.opened.tokenizer, read_texts(data).calibration)
    return spread_windows(tokens, calibration.length, calibration.windows)


def _kept_file(path: Path, row: str | None) -> Path | None:
    """The kept network that is meant; None where rotations are."""
    if path.is_file():
        if row is not None:
            raise InputError(f"--row picks one of the networks in a run folder; {path} is a file")
        return path if _is_network(path) else None
    if row is None:
        return path / KEPT if (path / KEPT).is_file() else None
    found = {}
    for file in [*sorted((path / ALL_KEPT).glob("*.safetensors")), path / KEPT]:
        if file.is_file():
            found |= {read_about(file)["row"]: file, file.stem: file}
    if not found:
        raise InputError(f"{path}: kept no network of a row; run it again with keep=all")
    check_name(row, found, "--row")
    return found[row]


def _is_network(path: Path) -> bool:
    try:
        read_about(path)
    except InputError:
        return False  # what it is instead is for the reader of rotation files to say
    return True


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
    row = read_about(kept)["row"]
    for folder in (kept.parent, kept.parent.parent):
        files = folder / FITTED, folder / f"{row}.safetensors", *folder.glob(f"seed*/{FITTED}")
        for file in files:
            if file.is_file() and load_rotations(file)[1].get("row") == row:
                return file
    return None


def _settings_of_run(fitted: Path) -> dict[str, Any]:
    """What a run's config.yaml says of weights and text; {} for a file on its own.

    Rotation files of before had only the name of the weight method, and the settings of each
    method were a section of the config.
    """
    for file in _configs(fitted):
        try:
            config = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise InputError(f"{file}: cannot be read ({error})") from error
        method = config.get("weight_method", RTN.name)
        section = config.get(method.partition("_")[0], {})  # quip_sharp shared quip's
        told = {"weights": {"method": method, **section}}
        known = ("data", "calibration", "mixed", "weights")
        return told | {key: config[key] for key in known if config.get(key) is not None}
    return {}


def _configs(fitted: Path) -> Iterator[Path]:
    for folder in fitted.resolve().parents[:2]:  # in the run's folder, or in one for each seed
        if (folder / "config.yaml").is_file():
            yield folder / "config.yaml"
