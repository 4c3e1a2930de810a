"""results.json, and the table that it makes."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from qrot.errors import InputError
from qrot.report.scores import score_markdown
from qrot.report.tables import by_method, markdown_table

BESIDE = ("shifts", "scales", "clips")  # what may be learned beside the rotations
COLUMNS = ("method", "seeds", "perplexity", "nats lost", "gap closed", "s")


def read_results(path: Path) -> dict[str, Any] | None:
    """The contents of results.json; None where there is none. Raises InputError if damaged."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise InputError(f"{path}: damaged ({error}); delete it to measure again") from error


def write_results(path: Path, results: dict[str, Any]) -> None:
    """Replace results.json at once, so that a reader or a kill never meets half of it."""
    write_text(path, json.dumps(results, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all; raises OSError where it cannot be written."""
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield another path to write to, which takes the place of `path` once it is written."""
    partial = path.with_name(path.name + ".partial")
    try:
        yield partial
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def columns(rows: list[dict[str, Any]]) -> tuple[str, ...]:
    """The names of the columns of `cells`."""
    other = ("other text",) if any("other_perplexity" in row for row in rows) else ()
    return (*COLUMNS[:3], *other, *COLUMNS[3:])


def cells(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A line of text cells for each method, its seeds taken together, under `columns`.

    "nats lost" are above full precision; "gap closed" is their share that a random Hadamard
    rotation loses (0 %) and this method does not (100 %: full precision); s is seconds a seed.
    """
    groups = by_method(rows)
    nll = {m: statistics.fmean(row["nll"] for row in group) for m, group in groups.items()}
    lines = []
    for method, group in groups.items():
        above = closed = ""
        other = ()
        if "other text" in columns(rows):
            other = (spread([row["other_perplexity"] for row in group]),)
        if "full_precision" in nll and method != "full_precision":
            above = f"{nll[method] - nll['full_precision']:.3f}"
            gap = nll.get("random_hadamard", 0) - nll["full_precision"]
            if method != "no_rotation" and gap > 0:
                closed = f"{(nll['random_hadamard'] - nll[method]) / gap:.1%}"
        lines.append(
            (
                method.replace("_", " "),
                str(sum(row["seed"] is not None for row in group) or ""),
                spread([row["perplexity"] for row in group]),
                *other,
                above,
                closed,
                f"{statistics.fmean(row['seconds'] for row in group):.0f}",
            )
        )
    return lines


def bits(rows: list[dict[str, Any]]) -> str:
    """The schemes of all rows but full precision, such as W4A4KV4."""
    return ", ".join(sorted({_bits(row) for row in rows if row["method"] != "full_precision"}))


def _bits(row: dict[str, Any]) -> str:
    k, v = row["keys"], row["values"]
    cache = f"KV{k}" if k == v else f"K{k}V{v}"
    by = f" ({row['weight_method']} weights)" if "weight_method" in row else ""
    return f"W{row['weights']}A{row['activations']}{cache}{by}"


def _method(results: dict[str, Any]) -> str:
    return next(row["weight_method"] for row in results["rows"] if "weight_method" in row)


def spread(values: list[float]) -> str:
    """Mean and sample standard deviation."""
    mean = statistics.fmean(values)
    form = ",.2f" if mean < 1000 else ",.0f" if mean < 1e9 else ".2e"
    text = f"{mean:{form}}"
    if len(values) > 1 and math.isfinite(mean):
        text += f" ± {statistics.stdev(values):{form}}"
    return text


def table(results: dict[str, Any]) -> Table:
    """The results as a table for a terminal, to be printed between `title` and `notes`."""
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in columns(results["rows"]):
        drawn.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    for line in cells(results["rows"]):
        drawn.add_row(*line)
    return drawn


def markdown(results: dict[str, Any]) -> str:
    """The results as tables in Markdown, with titles and notes."""
    rows = results["rows"]
    drawn = markdown_table(columns(rows), cells(rows), ("method",))
    tasks = f"\n{score_markdown(results)}" if "zeroshot" in results else ""
    return f"{title(results)}\n\n{drawn}\n{notes(results)}\n{tasks}"


def title(results: dict[str, Any]) -> str:
    """The protocol in one sentence: numbers under another protocol are other numbers."""
    p = results["protocol"]
    model = f"{p['model']} ({p['note']})" if p["note"] else p["model"]
    bos = "with BOS" if p["bos"] else "no BOS"
    at = f" at {bits(results['rows'])}" if bits(results["rows"]) else ""
    other = ""
    if "other_text" in p:
        other = f" Other text: {p['other_text']}, first {p['other_count']} windows."
    return (
        f"Perplexity of {model}{at} on {p['text']}: first {p['count']} windows of {p['window']} "
        f"tokens at stride {p['stride']}, {bos}, logits in {p['logits']}, norms {p['norms']}."
        f"{other}"
    )


def notes(results: dict[str, Any]) -> str:
    """What the columns mean, how weights were rounded and the learned rotations learned."""
    text = (
        "Several seeds: mean ± sample standard deviation. Nats lost: above full precision, a "
        "token. Gap closed: the share of random Hadamard's loss that is gone. "
        "s: seconds a seed."
    )
    seconds = [row["weight_seconds"] for row in results["rows"] if "weight_seconds" in row]
    if seconds:
        text += (
            f" Weights were rounded by {_method(results)}, {statistics.fmean(seconds):.0f} s of it."
        )
    mixed = next((row["mixed"] for row in results["rows"] if "mixed" in row), None)
    if mixed is not None:
        text += (
            f" Weights have bits by projection and layer, {mixed['bits_per_weight']:.3f} on average"
            f" and {mixed['with_scales']:.3f} with their scales."
        )
    for row in results["rows"]:
        if row["method"] == "learned":
            beside = [name for name in BESIDE if row[name]]
            shifts = f", with {', '.join(beside)}" if beside else ""
            return (
                f"{text} Learned: {row['objective'].replace('_', ' ')} with weights at "
                f"{row['trained_weight_bits']} bits{shifts}, {row['steps']} steps of "
                f"{row['optimiser']} from {row['start']}."
            )
    return text
