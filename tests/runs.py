"""A tiny model with two texts, and a run of it that takes seconds."""

import random
from pathlib import Path

import models
from rich.console import Console
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel

from qrot.calibrate.moments import Calibration
from qrot.evaluate.perplexity import Windows
from qrot.grid import Grid
from qrot.learn.settings import Learn
from qrot.run.config import RunConfig
from qrot.scheme import Scheme
from qrot.text import Data

METHODS = ("full_precision", "no_rotation", "random_orthogonal", "random_hadamard", "learned")
CHEAP = ("full_precision", "no_rotation")
LEARN = Learn(
    objective="cross_entropy",
    start="hadamard",
    steps=3,
    length=16,
    held_out=2,
    evaluate_every=2,
    checkpoint_every=1,
)
CALIBRATION = Calibration(windows=6, length=16)
WORDS = [f"w{i}" for i in range(97)]
A4 = Grid(4, "asymmetric")


def write_tiny(folder: Path) -> None:
    """A model of 97 words and two texts of 400 of them."""
    models.write_variant(folder / "model", "llama-tied")
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "model" / "tokenizer.json"))
    draw = random.Random(0)
    for name in ("calibration.txt", "evaluation.txt"):
        (folder / name).write_text(" ".join(draw.choices(WORDS, k=400)))


def tiny_config(tiny: Path, out: Path) -> RunConfig:
    return RunConfig(
        model=str(tiny / "model"),
        out=str(out),
        data=Data("files", str(tiny)),
        scheme=Scheme(Grid(4, clip="mse"), A4, A4, A4),
        methods=METHODS,
        seeds=(0, 1),
        learn=LEARN,
        evaluate=Windows(16, 5),
    )


def quiet() -> Console:
    return Console(quiet=True)
