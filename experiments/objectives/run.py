"""Objective x optimiser x start: learn, judge at W16A4KV4 and, by RTN and GPTQ, at W4A4KV4.

python experiments/objectives/run.py DIR [--out runs/objectives] [--only NAME ...]

DIR holds WikiText-2's raw files. Each cell is a `qrot run` in a process of its own, for the sake of
its peak memory; what is done is not done again. The first seed of every row comes first.
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
END_TO_END = ["learn.steps=20", "learn.batch=2", "learn.evaluate_every=5"]
NO_SCALES = "learn.scales=false"

# name: (method, seeds, settings on top of base.yaml)
ROWS: dict[str, tuple[str, int, list[str]]] = {
    "full precision": ("full_precision", 1, []),
    "random Hadamard": ("random_hadamard", 3, []),
    "random Hadamard, shift": ("random_hadamard_shift", 3, []),
    "fisher": ("learned", 3, ["learn.objective=fisher", "learn.start=balanced"]),
    "cross-entropy after fisher": ("learned", 3, ["learn.start=fisher", *END_TO_END]),
    "KL after fisher": (
        "learned",
        1,
        ["learn.objective=kl", "learn.start=fisher", "learn.learning_rate=0.02", *END_TO_END],
    ),
    "fisher, random start": ("learned", 1, ["learn.objective=fisher", "learn.start=hadamard"]),
    "fisher, no scales": (
        "learned",
        1,
        ["learn.objective=fisher", "learn.start=balanced", NO_SCALES],
    ),
    "whip": ("learned", 1, ["learn.objective=whip", "learn.start=hadamard", NO_SCALES]),
    "kurtosis": ("learned", 1, ["learn.objective=kurtosis", "learn.start=hadamard", NO_SCALES]),
    "reconstruction": ("learned", 1, ["learn.objective=reconstruction", "learn.start=hadamard"]),
    "cross-entropy, random start": ("learned", 1, ["learn.start=hadamard", *END_TO_END]),
    "cross-entropy, W4 weights": (
        "learned",
        1,
        ["learn.start=fisher", "learn.weight_bits=4", *END_TO_END],
    ),
    "fisher, PCA start": ("learned", 1, ["learn.objective=fisher", "learn.start=pca"]),
    "fisher, cayley_adam": (
        "learned",
        1,
        [
            "learn.objective=fisher",
            "learn.start=balanced",
            "learn.optimiser=cayley_adam",
            "learn.learning_rate=0.003",
        ],
    ),
    "fisher, qr_adam": (
        "learned",
        1,
        [
            "learn.objective=fisher",
            "learn.start=balanced",
            "learn.optimiser=qr_adam",
            "learn.learning_rate=0.003",
        ],
    ),
    "fisher, R3 learned": (
        "learned",
        1,
        ["learn.objective=fisher", "learn.start=balanced", "learn.online=[key]"],
    ),
    "fisher, R4 learned": (
        "learned",
        1,
        ["learn.objective=fisher", "learn.start=balanced", "learn.online=[down]"],
    ),
    "layer reconstruction": (
        "learned",
        1,
        ["learn.objective=layer_reconstruction", "learn.start=hadamard", *END_TO_END],
    ),
}
COLUMNS = (
    "setting",
    "optimiser",
    "start",
    "seeds",
    "W16A4KV4",
    "other text, W16A4KV4",
    "W4A4KV4, RTN",
    "W4A4KV4, GPTQ",
    "other text, W4A4KV4, GPTQ",
    "learning, s",
    "GiB",
)


def run(folder: Path, overrides: list[str]) -> None:
    """One `qrot run`, resumed or skipped if it was begun or done before."""
    command = run_command(HERE / "base.yaml", [*overrides, f"out={folder}"])
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def cell(out: Path, name: str, seed: int, data: str) -> None:
    """One row at one seed: learned at 16-bit weights, then judged with rounded ones as well."""
    method, _, settings = ROWS[name]
    folder = out / name.replace(" ", "-") / f"seed{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    shared = [*settings, f"methods=[{method}]", f"seeds=[{seed}]", f"learn_seeds=[{seed}]"]
    shared.append(f"data.path={data}")
    w4 = "scheme.weights.bits=4"
    by_gptq = [w4, "weights.method=gptq", "calibration={windows: 32, length: 512}"]
    if "learn.weight_bits=4" in settings:
        run(folder / "w4", [*shared, w4])
        return
    run(folder / "w16", shared)
    if method == "learned":
        learned = folder / "w16" / "rotations.safetensors"
        shared = [f"data.path={data}", "methods=[saved]", f"saved={learned}"]
    if method != "full_precision":
        run(folder / "w4", [*shared, w4])
        run(folder / "gptq", [*shared, *by_gptq])


def rows_of(out: Path, name: str, bits: str) -> list[dict]:
    """The results of a setting at some bits, one for each seed that is done."""
    files = sorted((out / name.replace(" ", "-")).glob(f"seed*/{bits}/{RESULTS}"))
    return [row for file in files for row in json.loads(file.read_text())["rows"]]


def table(out: Path) -> str:
    """All that is done, in Markdown."""
    lines = []
    for name in ROWS:
        w16, w4, gptq = (rows_of(out, name, bits) for bits in ("w16", "w4", "gptq"))
        if not w16 + w4:
            continue
        learned = [row for row in w16 + w4 if "learn_seconds" in row]
        first = learned[0] if learned else {}
        lines.append(
            (
                name,
                first.get("optimiser", ""),
                first.get("start", ""),
                str(len(w16 or w4)),
                *(
                    spread([row[key] for row in rows]) if rows else ""
                    for rows, key in (
                        (w16, "perplexity"),
                        (w16, "other_perplexity"),
                        (w4, "perplexity"),
                        (gptq, "perplexity"),
                        (gptq, "other_perplexity"),
                    )
                ),
                f"{statistics.fmean(r['learn_seconds'] for r in learned):.0f}" if learned else "",
                f"{max(r['peak_gib'] for r in learned):.1f}" if learned else "",
            )
        )
    return markdown_table(COLUMNS, lines, COLUMNS[:3])


def main() -> None:
    """Run what is missing and print the table after every cell."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", help="the folder with wiki.train*.raw and wiki.test.raw")
    parser.add_argument("--out", type=Path, default=Path("runs/objectives"))
    parser.add_argument("--seeds", type=int, default=3, help="at most so many of each row")
    parser.add_argument("--only", nargs="*", default=list(ROWS), choices=list(ROWS), metavar="NAME")
    arguments = parser.parse_args()
    names = arguments.only
    todo = [
        (seed, name) for seed in range(arguments.seeds) for name in names if seed < ROWS[name][1]
    ]
    for done, (seed, name) in enumerate(todo, 1):
        print(f"[{done}/{len(todo)}] {name}, seed {seed}", flush=True)
        cell(arguments.out, name, seed, arguments.data)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "table.md").write_text(table(arguments.out))
    print(table(arguments.out))


if __name__ == "__main__":
    main()
