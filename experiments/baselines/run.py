"""Every method at every scheme that it is for: one table.

python experiments/baselines/run.py DIR [--out runs/baselines] [--only NAME ...]

DIR holds WikiText-2's raw files. Each cell is a `qrot run` of its own; what is done is not done
again. The table is kept after every cell and printed at the end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from pathlib import Path

from qrot.report.results import spread
from qrot.report.tables import markdown_table
from qrot.run.results import RESULTS
from qrot.study.sweep import run_command

HERE = Path(__file__).parent
GROUPS = ["scheme.weights.granularity=group", "scheme.weights.group=64"]


def _activations(bits: int, cache: int) -> list[str]:
    roles = {"activations": bits, "keys": cache, "values": cache}
    return [f"scheme.{r}={{bits: {b}, kind: asymmetric}}" for r, b in roles.items() if b < 16]


SCHEMES: dict[str, list[str]] = {
    "W8A8": ["scheme.weights.bits=8", *_activations(8, 16)],
    "W4A16": [*GROUPS],
    "W4A8KV8": _activations(8, 8),
    "W4A4KV4": _activations(4, 4),
    "W2A16": ["scheme.weights.bits=2", *GROUPS],
}
WHOLE = ["scheme.weights.granularity=channel", "scheme.weights.group=null"]  # one scale or none
SYMMETRIC = [
    "scheme.activations={bits: 4, kind: symmetric, clip: 0.9}",
    "scheme.keys={bits: 4, kind: asymmetric, clip: 0.95}",
    "scheme.values={bits: 4, kind: asymmetric, clip: 0.95}",
    "weights.act_order=false",
]
BY_GPTQ, BY_AWQ = ["weights.method=gptq"], ["weights.method=awq", "scheme.weights.clip=1.0"]
SPINQUANT = [
    "learn.optimiser=cayley_sgd",
    "learn.learning_rate=1.5",
    "learn.start=hadamard",
    "learn.steps=40",
    "learn.shifts=false",
    "learn.scales=false",
    "learn.clips=false",
    "scheme.scale_gradient=false",
    "weights.act_order=false",
]
NO_HAD = ["rotations={key: false, down: false}"]

# name: (method, settings, schemes, seeds)
ROWS: dict[str, tuple[str, list[str], tuple[str, ...], int]] = {
    "RTN": ("no_rotation", [], tuple(SCHEMES), 1),
    "GPTQ": ("no_rotation", BY_GPTQ, tuple(SCHEMES)[1:], 1),
    "equalised, RTN": ("equalised", [], ("W4A16", "W4A8KV8"), 1),
    "SmoothQuant, RTN": ("smoothquant", [], ("W8A8", "W4A8KV8", "W4A4KV4"), 1),
    "LLM.int8()": (
        "no_rotation",
        ["scheme.activations={bits: 8, kind: symmetric, threshold: 6.0}"],
        ("W8A8",),
        1,
    ),
    "AWQ": ("no_rotation", BY_AWQ, ("W4A16", "W2A16"), 1),
    "QuIP": ("no_rotation", ["weights.method=quip", *WHOLE], ("W4A16", "W2A16"), 1),
    "QuIP#": ("no_rotation", ["weights.method=quip_sharp", *WHOLE], ("W4A16", "W2A16"), 1),
    "mixed bits, GPTQ": ("no_rotation", [*BY_GPTQ, "mixed.bits={bits}"], ("W4A16",), 1),
    "LLM-QAT": (
        "no_rotation",
        ["weights={method: qat, steps: 20, batch: 4, length: 256}"],
        ("W4A8KV8",),
        1,
    ),
    "Hadamard, RTN": ("random_hadamard", [], ("W8A8", "W4A8KV8", "W4A4KV4"), 3),
    "Hadamard, GPTQ": ("random_hadamard", BY_GPTQ, tuple(SCHEMES)[1:4], 3),
    "QuaRot": ("random_hadamard", [*SYMMETRIC, *BY_GPTQ], ("W4A4KV4",), 3),
    "SpinQuant no_had": ("learned", [*SPINQUANT, *NO_HAD, *BY_GPTQ], ("W4A8KV8",), 1),
    "SpinQuant had": ("learned", [*SPINQUANT, *BY_GPTQ], ("W4A4KV4",), 1),
    "qrot fisher, GPTQ": (
        "learned",
        ["learn.objective=fisher", "learn.start=balanced", "learn.steps=60", "learn.batch=64",
         *BY_GPTQ],
        ("W4A8KV8", "W4A4KV4"),
        1,
    ),
    "qrot cross-entropy, GPTQ": ("learned", ["learn.steps=20", *BY_GPTQ], ("W4A4KV4",), 1),
}  # fmt: skip
SLICED = (0.0, 0.05, 0.1, 0.2, 0.3)  # of the directions, by SliceGPT


def run(folder: Path, overrides: list[str]) -> None:
    """One `qrot run`, resumed or skipped if it was begun or done before."""
    command = run_command(HERE / "base.yaml", [*overrides, f"out={folder}"])
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def cells(names: list[str]) -> list[tuple[str, str, int]]:
    """(row, scheme, seed) of everything to measure, the first seed of every row first."""
    return [
        (name, scheme, seed)
        for seed in range(3)
        for name in names
        for scheme in ROWS[name][2]
        if seed < (ROWS[name][3] if scheme == "W4A4KV4" else 1)
    ]


def folder_of(out: Path, name: str, scheme: str, seed: int) -> Path:
    """Where a cell is."""
    return out / name.replace(" ", "-") / scheme / f"seed{seed}"


def measure(out: Path, name: str, scheme: str, seed: int, data: str) -> None:
    """One cell."""
    method, settings, _, _ = ROWS[name]
    settings = [setting.replace("{bits}", scheme[1]) for setting in settings]
    shared = [f"methods=[{method}]", f"seeds=[{seed}]", f"learn_seeds=[{seed}]"]
    run(
        folder_of(out, name, scheme, seed),
        [f"data.path={data}", *SCHEMES[scheme], *settings, *shared],
    )


def found(out: Path, name: str, scheme: str) -> list[dict]:
    """The rows of a cell, one for each seed that is done."""
    files = sorted((out / name.replace(" ", "-") / scheme).glob(f"seed*/{RESULTS}"))
    return [row for file in files for row in json.loads(file.read_text())["rows"]]


def table(out: Path) -> str:
    """All that is done, in Markdown: perplexity, and seconds a cell with rounding and judging."""
    lines = []
    full = found(out, "full precision", "W16A16")
    if full:
        lines.append(("full precision", *[f"{full[0]['perplexity']:.2f}"] * len(SCHEMES), ""))
    for name in ROWS:
        rows = {scheme: found(out, name, scheme) for scheme in SCHEMES}
        seconds = [row["seconds"] for some in rows.values() for row in some]
        if seconds:
            ppl = [
                spread([r["perplexity"] for r in some]) if some else "" for some in rows.values()
            ]
            lines.append((name, *ppl, f"{statistics.fmean(seconds):.0f}"))
    return markdown_table(("method", *SCHEMES, "s"), lines, ("method",))


def sliced(out: Path) -> str:
    """Perplexity against the share of directions that SliceGPT cuts off, in Markdown."""
    lines = []
    for fraction in SLICED:
        for row in found(out, "SliceGPT", f"{fraction}"):
            left = str(row["hidden_kept"])
            lines.append((f"{fraction:.0%}", left, f"{row['perplexity']:.2f}"))
    return markdown_table(("cut off", "directions left", "perplexity"), lines, ())


def main() -> None:
    """Run what is missing, keep the table after every cell, print both at the end."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", help="the folder with wiki.train*.raw and wiki.test.raw")
    parser.add_argument("--out", type=Path, default=Path("runs/baselines"))
    parser.add_argument("--only", nargs="*", default=list(ROWS), choices=list(ROWS), metavar="NAME")
    arguments = parser.parse_args()
    out, data = arguments.out, f"data.path={arguments.data}"
    whole = ["scheme.weights.bits=16", "scheme.weights.clip=1.0"]
    run(folder_of(out, "full precision", "W16A16", 0), [data, "methods=[full_precision]", *whole])
    todo = cells(arguments.only)
    for done, (name, scheme, seed) in enumerate(todo, 1):
        print(f"[{done}/{len(todo)}] {name}, {scheme}, seed {seed}", flush=True)
        measure(out, name, scheme, seed, arguments.data)
        (out / "table.md").write_text(table(out))
    for fraction in SLICED:
        print(f"SliceGPT, {fraction:.0%} cut off", flush=True)
        settings = ["methods=[slicegpt]", f"slicegpt.fraction={fraction}", *whole]
        run(folder_of(out, "SliceGPT", str(fraction), 0), [data, *settings])
    (out / "sliced.md").write_text(sliced(out))
    print(table(out), sliced(out), sep="\n")


if __name__ == "__main__":
    main()
