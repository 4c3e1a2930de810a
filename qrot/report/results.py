"""The table that results.json makes, with the protocol above it and notes below."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from qrot.report.scores import score_markdown
from qrot.report.tables import by_method, is_learned, markdown_table
from qrot.run.results import FULL_PRECISION, NO_ROTATION, RANDOM

COLUMNS = ("method", "seeds", "perplexity", "nats lost", "gap closed", "s")
BESIDE = ("shifts", "scales", "clips")  # what may be learned beside rotations


def columns(rows: list[dict[str, Any]]) -> tuple[str, ...]:
    """The names of the columns of `cells`."""
    other = ("other text",) if any("other_perplexity" in row for row in rows) else ()
    return (*COLUMNS[:3], *other, *COLUMNS[3:])


def cells(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A line of text cells for each method, its seeds taken together.

    "nats lost" are above full precision; "gap closed" is their share that a random Hadamard
    rotation loses (0 %) and this method does not (100 %: full precision); s is seconds a seed.

    Args:
        rows: of results.json.

    Returns:
        The lines, under `columns`.
    """
    groups = by_method(rows)
    nll = {m: statistics.fmean(row["nll"] for row in group) for m, group in groups.items()}
    full = nll.get(FULL_PRECISION)
    lines = []
    for method, group in groups.items():
        above = closed = ""
        other = ()
        if "other text" in columns(rows):
            other = (spread([row["other_perplexity"] for row in group]),)
        if full is not None and method != FULL_PRECISION:
            above = f"{nll[method] - full:.3f}"
            gap = nll.get(RANDOM, 0) - full
            if method != NO_ROTATION and gap > 0:
                closed = f"{(nll[RANDOM] - nll[method]) / gap:.1%}"
        lines.append(
            (
                method.replace("_", " "),
                str(sum(row["seed"] is not None for row in group) or ""),
                spread([row["perplexity"] for row in group]),
                *other,
                above,
                closed,
                _seconds(group),
            )
        )
    return lines


def _seconds(group: list[dict[str, Any]]) -> str:
    if not all("seconds" in row for row in group):
        return ""
    return f"{statistics.fmean(row['seconds'] for row in group):.0f}"


def bits(rows: list[dict[str, Any]]) -> str:
    """The schemes of all rows but full precision, such as W4A4KV4 (gptq weights)."""
    return ", ".join(sorted({_bits(row) for row in rows if row["method"] != FULL_PRECISION}))


def _bits(row: dict[str, Any]) -> str:
    by = f" ({row['weight_method']} weights)" if "weight_method" in row else ""
    return scheme_name(row) + by


def scheme_name(row: dict[str, Any]) -> str:
    """The scheme of a row, such as W4A4KV4; one whose codes are no integers says its name."""
    if row.get("scheme"):
        return row["scheme"]
    k, v = row["keys"], row["values"]
    cache = f"KV{k}" if k == v else f"K{k}V{v}"
    return f"W{row['weights']}A{row['activations']}{cache}"


def spread(values: Sequence[float | int]) -> str:
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
    """What the columns mean, how weights were rounded and how rotations were learned."""
    text = (
        "Several seeds: mean ± sample standard deviation. Nats lost: above full precision, a "
        "token. Gap closed: the share of random Hadamard's loss that is gone. "
        "s: seconds a seed."
    )
    timed = [row for row in results["rows"] if "weight_seconds" in row]
    if timed:
        seconds = statistics.fmean(row["weight_seconds"] for row in timed)
        text += f" Weights were rounded by {timed[0]['weight_method']}, {seconds:.0f} s of it."
    mixed = next((row["mixed"] for row in results["rows"] if "mixed" in row), None)
    if mixed is not None:
        text += (
            f" Weights have bits by projection and layer, {mixed['bits_per_weight']:.3f} on average"
            f" and {mixed['with_scales']:.3f} with their scales."
        )
    for row in results["rows"]:
        if "mismatch" in row:
            text += f" Made with allow_mismatch: {row['mismatch']}."
    for row in results["rows"]:
        if is_learned(row):
            beside = [name for name in BESIDE if row.get(name)]
            parts = f", with {', '.join(beside)}" if beside else ""
            start = f" from {row['start']}" if "start" in row else ""
            return (
                f"{text} Learned: {row['objective'].replace('_', ' ')} with weights at "
                f"{row['trained_weight_bits']} bits{parts}, {row['steps']} steps of "
                f"{row['optimiser']}{start}."
            )
    return text
