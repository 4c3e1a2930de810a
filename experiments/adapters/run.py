"""Other weights under old rotations: python experiments/adapters/run.py DIR [--out runs/adapters].

DIR holds WikiText-2's raw files. Learns rotations of the base model, trains a LoRA, makes one that
moves the outliers and leaves the function as it is, and for each: old rotations and old weights
where the new ones are expected, old rotations with the new weights, `qrot refresh`, and learning
from scratch. What is done is not done again; times are those of a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from qrot.report.tables import markdown_table
from qrot.run.results import GATE, REFRESH, RESULTS

HERE = Path(__file__).parent
ADAPTERS = {"lora": "trained LoRA", "move": "moved outliers"}
GATE_LIMITS = "gate={nats: 0.8, kl: 1.2}"
# By adapter and folder, settings on top: as it decides, and for one that keeps them learning on.
WARM = ("refresh.keep=1", "refresh.relearn=1000")
REFRESHES = {"lora": {"refresh": (), "refresh-warm": WARM}, "move": {"refresh": ()}}
COLUMNS = ("adapter", "network", "perplexity", "nats a token", "nats lost", "KL", "gate")
COLUMNS += ("finding, s", "seconds")


def qrot(*words: str) -> None:
    """A command of qrot's; a gate that fails is one of the things to see."""
    code = subprocess.run([sys.executable, "-m", "qrot.cli", *words], check=False).returncode
    if code not in (0, 3):
        raise SystemExit(code)


def timed(folder: Path, *words: str) -> None:
    """A command whose seconds are kept in its folder, once."""
    if (folder / "seconds").exists():
        return
    began = time.perf_counter()
    qrot(*words)
    (folder / "seconds").write_text(f"{time.perf_counter() - began:.0f}\n")


def adapters(data: str, out: Path) -> None:
    """Both PEFT folders."""
    for name, script, words in (("lora", "train.py", [data]), ("move", "move.py", [])):
        folder = out / name / "adapter"
        if not (folder / "adapter_model.safetensors").exists():
            command = [sys.executable, str(HERE / script), *words, str(folder)]
            subprocess.run(command, check=True)


def runs(data: str, out: Path, name: str) -> None:
    """All runs of one adapter."""
    base, text = str(HERE / "base.yaml"), f"data.path={data}"
    parent, folder = out / "parent", out / name
    merged = f"model={{base: smollm2, adapters: [{folder / 'adapter'}]}}"
    alone = [text, merged, GATE_LIMITS, "allow_mismatch=true", "methods=[full_precision, saved]"]
    for kept, file in (("weights", "network.safetensors"), ("rotations", "rotations.safetensors")):
        saved = f"saved={parent / file}"
        timed(folder / kept, "run", base, *alone, saved, f"out={folder / kept}")
    refreshed = ["--model", "smollm2", "--adapter", str(folder / "adapter"), GATE_LIMITS]
    for kept, settings in REFRESHES[name].items():
        new = folder / kept
        timed(new, "refresh", str(parent), *refreshed, *settings, "--out", str(new))
    scratch = folder / "scratch"
    timed(scratch, "run", base, text, merged, GATE_LIMITS, f"out={scratch}")


def read(file: Path) -> dict[str, Any]:
    """A JSON file of a run."""
    return json.loads(file.read_text())


def line(out: Path, name: str, kept: str, what: str) -> tuple[str, ...]:
    """A line of the table: the best row of a run that is rounded, and its gate."""
    folder = out / name / kept
    rows = read(folder / RESULTS)["rows"]
    full = next(row for row in rows if row["method"] == "full_precision")
    best = min((row for row in rows if row is not full), key=lambda row: row["nll"])
    gate, file = read(folder / GATE), folder / REFRESH
    compared = read(file)["seconds"] if file.exists() else 0.0
    learned = sum(row.get("learn_seconds", 0.0) for row in rows)
    return (
        ADAPTERS[name],
        what,
        f"{best['perplexity']:.2f}",
        f"{best['nll']:.4f}",
        f"{best['nll'] - full['nll']:.3f}",
        f"{gate['measured']['texts'][0]['kl']:.3f}",
        "passed" if gate["passed"] else "failed",
        f"{compared + learned:.0f}",
        (folder / "seconds").read_text().strip(),
    )


def table(out: Path) -> str:
    """All of it in Markdown."""
    lines = []
    for name, what in ADAPTERS.items():
        rows = read(out / name / "scratch" / RESULTS)["rows"]
        full = next(row for row in rows if row["method"] == "full_precision")
        exact = f"{full['perplexity']:.2f}", f"{full['nll']:.4f}"
        lines.append((what, "full precision, merged", *exact, *[""] * 5))
        lines.append(line(out, name, "weights", "old rotations, old quantised weights"))
        lines.append(line(out, name, "rotations", "old rotations, new weights"))
        for kept, settings in REFRESHES[name].items():
            decision = read(out / name / kept / REFRESH)["decision"]
            asked = " ".join(["refresh", *settings])
            lines.append(line(out, name, kept, f"{asked}: {decision}"))
        lines.append(line(out, name, "scratch", "learned from scratch"))
    return markdown_table(COLUMNS, lines, (*COLUMNS[:2], "gate"))


def main() -> None:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", help="the folder with wiki.train*.raw and wiki.test.raw")
    parser.add_argument("--out", type=Path, default=Path("runs/adapters"))
    arguments = parser.parse_args()
    data, out = arguments.data, arguments.out
    parent = out / "parent"
    timed(parent, "run", str(HERE / "base.yaml"), f"data.path={data}", f"out={parent}")
    adapters(data, out)
    for name in ADAPTERS:
        runs(data, out, name)
    (out / "table.md").write_text(table(out))
    print(table(out))


if __name__ == "__main__":
    main()
