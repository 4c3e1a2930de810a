"""Which rotation suits which number format: none, random or learned, whole or in blocks.

python experiments/formats/run.py DIR [--out runs/formats] [--only SCHEME ...]

DIR holds WikiText-2's raw files. Each cell is a `qrot run` of its own; what is done is not done
again. The table is kept after every cell and printed at the end. The first seed of every row comes
first.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path

from qrot.report.results import spread
from qrot.report.tables import markdown_table
from qrot.run.results import RESULTS
from qrot.study.sweep import run_command

HERE = Path(__file__).parent
BY_GPTQ = "weights.method=gptq"
WEIGHTS_ALONE = "scheme.weights={bits: 16}"

# name: settings; the default model's weights lie on a grid of 4 bits of their own, so activations
# are judged beside weights at 16 bits, too.
SCHEMES: dict[str, list[str]] = {
    "A-NVFP4": ["scheme=NVFP4", WEIGHTS_ALONE],
    "NVFP4, GPTQ": ["scheme=NVFP4", BY_GPTQ],
    "NVFP4, RTN": ["scheme=NVFP4"],
    "A-MXFP4": ["scheme=MXFP4", WEIGHTS_ALONE],
    "MXFP4, GPTQ": ["scheme=MXFP4", BY_GPTQ],
    "A-INT4": ["scheme=W16A4"],
    "FP8, RTN": ["scheme=FP8"],
}
# name: (method, size of the blocks, or true for whole, seeds); no R3, as no cache is rounded.
ROWS: dict[str, tuple[str, str, int]] = {
    "no rotation": ("no_rotation", "true", 1),
    "random Hadamard": ("random_hadamard", "true", 3),
    "random Hadamard, blocks of 16": ("random_hadamard", "16", 3),
    "random Hadamard, blocks of 32": ("random_hadamard", "32", 3),
    "learned": ("learned", "true", 3),
    "learned, blocks of 16": ("learned", "16", 3),
    "learned, blocks of 32": ("learned", "32", 3),
}


def folder_of(out: Path, name: str, scheme: str, seed: int) -> Path:
    """Where a cell is."""
    return out / "_".join((scheme, name)).replace(", ", "_").replace(" ", "-") / f"seed{seed}"


def measure(folder: Path, settings: list[str]) -> None:
    """One `qrot run`, resumed or skipped if it was begun or done before."""
    command = run_command(HERE / "base.yaml", [*settings, f"out={folder}"])
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def settings_of(name: str, scheme: str, seed: int) -> list[str]:
    """What a cell has on top of base.yaml."""
    method, size, _ = ROWS[name]
    rotations = f"rotations={{residual: {size}, value: {size}, key: false, down: {size}}}"
    seeds = [f"methods=[{method}]", f"seeds=[{seed}]", f"learn_seeds=[{seed}]"]
    return [*SCHEMES[scheme], rotations, *seeds]


def table(out: Path) -> str:
    """Perplexity by row and scheme, in Markdown; of what is done."""
    lines = []
    schemes = [s for s in SCHEMES if any(out.glob(f"{folder_of(out, '', s, 0).parent.name}*"))]
    for name in ROWS:
        cells = []
        for scheme in schemes:
            files = sorted(folder_of(out, name, scheme, 0).parent.glob(f"seed*/{RESULTS}"))
            rows = [row for file in files for row in json.loads(file.read_text())["rows"]]
            cells.append(spread([row["perplexity"] for row in rows]) if rows else "")
        if any(cells):
            lines.append((name, *cells))
    return markdown_table(("rotation", *schemes), lines, ("rotation",))


def main() -> None:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", help="the folder with wiki.train*.raw and wiki.test.raw")
    parser.add_argument("--out", type=Path, default=Path("runs/formats"))
    parser.add_argument("--only", nargs="*", default=list(SCHEMES), choices=list(SCHEMES))
    parser.add_argument("--seeds", type=int, default=3, help="at most so many a row")
    arguments = parser.parse_args()
    out = arguments.out
    todo = [
        (scheme, name, seed)
        for scheme in arguments.only
        for seed in range(arguments.seeds)
        for name in ROWS
        if seed < ROWS[name][2]
    ]
    for done, (scheme, name, seed) in enumerate(todo, 1):
        print(f"[{done}/{len(todo)}] {scheme}: {name}, seed {seed}", flush=True)
        folder = folder_of(out, name, scheme, seed)
        measure(folder, [f"data.path={arguments.data}", *settings_of(name, scheme, seed)])
        (out / "table.md").write_text(table(out))
    print(table(out))


if __name__ == "__main__":
    main()
