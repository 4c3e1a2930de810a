"""Text for calibration, for choosing settings, and for judging: always disjoint."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from qrot.errors import InputError
from qrot.files.plain import read_bytes, readable

MOST_TEXT = 1 << 30  # bytes; WikiText-103 has half of it


@dataclass(frozen=True)
class Data:
    """Where text comes from.

    source: `pydoc`, the language reference that ships with Python (every second topic calibrates,
      the others judge; a paragraph that is in both only judges); `wikitext2`, the published
      benchmark; `files`, two text files of your own.
    path: for wikitext2 the folder with wiki.train.raw (or a part of it) and wiki.test.raw; without
      one the data set is fetched through `datasets`. For files the folder they are in.
    calibration, evaluation: file names for `files`.
    join: for wikitext2, `raw` takes a file as it is; `rows` joins its rows by a blank line, which
      is what the published figures do.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    source: Literal["pydoc", "wikitext2", "files"] = "pydoc"
    path: str | None = None
    calibration: str = "calibration.txt"
    evaluation: str = "evaluation.txt"
    join: Literal["raw", "rows"] = "raw"


@dataclass(frozen=True)
class Texts:
    """The two texts and their names; the names say how to get exactly these texts again."""

    calibration: str
    evaluation: str
    name: str


def read_texts(data: Data) -> Texts:
    """Read the texts that the configuration names.

    Raises InputError where one is missing, is not UTF-8, or cannot be fetched, and where text to
    calibrate on and text to judge by are one and the same.
    """
    if data.source == "pydoc":
        calibration, evaluation = _pydoc()
    elif data.source == "wikitext2":
        calibration, evaluation = _wikitext2(data)
    else:
        folder = Path(data.path or ".")
        calibration = read_text(folder / data.calibration)
        evaluation = read_text(folder / data.evaluation)
    if calibration == evaluation:
        raise InputError("data: the text that calibrates is the one that judges")
    name = f"{data.source}, {data.join}" if data.source == "wikitext2" else data.source
    return Texts(calibration, evaluation, f"{name}, sha256 {_sha256(evaluation)}")


def read_evaluation(data: Data) -> tuple[str, str]:
    """A text to judge by, with its name first; of two files of your own the other is not needed.

    Raises InputError as `read_texts` does.
    """
    if data.source == "files":
        text = read_text(Path(data.path or ".") / data.evaluation)
        return f"{data.evaluation}, sha256 {_sha256(text)}", text
    texts = read_texts(data)
    return texts.name, texts.evaluation


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _pydoc() -> tuple[str, str]:
    from pydoc_data.topics import topics

    names = sorted(topics)
    # Topics quote each other: nearly a quarter of the judging half is in the other half, too.
    calibration, evaluation = (
        [part for name in names[i::2] for part in topics[name].split("\n\n")] for i in (0, 1)
    )
    judging = {part.strip() for part in evaluation}
    calibration = [part for part in calibration if part.strip() not in judging]
    return "\n\n".join(calibration), "\n\n".join(evaluation)


def _wikitext2(data: Data) -> tuple[str, str]:
    if data.path is None:
        rows = [_hub_rows(split) for split in ("train", "test")]
    else:
        folder = Path(data.path)
        with readable(folder):
            parts = sorted(folder.glob("wiki.train*.raw"))
        train = parts[0] if parts else folder / "wiki.train.raw"
        raw = [read_text(train), read_text(folder / "wiki.test.raw")]
        if data.join == "raw":
            return raw[0], raw[1]
        rows = [
            ["" if line == " " else line + "\n" for line in text.split("\n")[:-1]] for text in raw
        ]
    separator = "\n\n" if data.join == "rows" else ""
    if data.join == "raw":  # the hub drops the single space that a blank row is in the file
        rows = [[row or " \n" for row in split] for split in rows]
    return separator.join(rows[0]), separator.join(rows[1])


def _hub_rows(split: str) -> list[str]:
    try:
        from datasets import load_dataset  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise InputError(
            "data.path: give the folder with WikiText-2's raw files, or `pip install qrot[hub]`"
        ) from error
    try:
        return load_dataset("Salesforce/wikitext", "wikitext-2-raw-v1", split=split)["text"]
    except Exception as error:  # no network: the hub's client has no common base class for it
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"WikiText-2 could not be fetched from the hub: {reason}") from error


def read_text(path: Path) -> str:
    """A text file; raises InputError where it cannot be read as UTF-8. Lines end in line feeds."""
    content = read_bytes(path, MOST_TEXT)
    with readable(path):
        return content.decode().replace("\r\n", "\n").replace("\r", "\n")
