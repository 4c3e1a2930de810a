"""The report of a run, from what lies in its folder; the model is not needed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from qrot.files.plain import MOST_YAML, read_bytes, readable
from qrot.files.whole import write_text
from qrot.learn.history import load_history
from qrot.report import page
from qrot.report.anatomy import anatomy_sections
from qrot.report.bars import Bar, caption, perplexity, seconds
from qrot.report.curves import learning
from qrot.report.gate import gate_section
from qrot.report.refresh import refresh_section
from qrot.report.results import bits, cells, columns, notes, scheme_name, spread, title
from qrot.report.svg import both
from qrot.report.tables import by_method, is_learned
from qrot.run.results import (
    ANATOMY,
    FULL_PRECISION,
    GATE,
    METRICS,
    REFRESH,
    RESULTS,
    learned_file,
    read_anatomy,
    read_gate,
    read_refresh,
    read_results,
    row_name,
)

FILE = "report.html"
PICTURE = "learning.png"
PARTS = {"learning": "learning", "weights": "rounding weights", "rest": "fusing, judging, the rest"}


class History(NamedTuple):
    """How a row was learned: the row, the folder of its files, and the lines of metrics.jsonl."""

    row: dict[str, Any]
    folder: Path
    lines: list[dict[str, Any]]

    @property
    def unit(self) -> str:
        """Of the loss; runs of older versions have no record of it."""
        return self.row.get("unit") or self.row["objective"].replace("_", " ")


def write_report(folder: Path) -> None:
    """Write report.html into a run folder, and learning.png beside what was learned in it.

    Each file is written whole or not at all. Nothing is written where there are no results.

    Args:
        folder: of a run.

    Raises:
        InputError: where a file of the folder is damaged.
        OSError: where one cannot be written.
    """
    results = read_results(folder / RESULTS)
    if results is None or not results["rows"]:
        return
    learned = histories(folder, results)
    for history in learned:
        _plot(history, page.model_name(results["protocol"]))
    anatomy, gate = read_anatomy(folder / ANATOMY), read_gate(folder / GATE)
    refresh = read_refresh(folder / REFRESH)
    verdicts = [
        gate_section(gate) if gate is not None else "",
        refresh_section(refresh) if refresh is not None else "",
    ]
    config = folder / "config.yaml"
    with readable(config):
        settings = read_bytes(config, MOST_YAML).decode()
    write_text(folder / FILE, report(results, learned, anatomy, settings, verdicts))


def histories(folder: Path, results: dict[str, Any]) -> list[History]:
    """How the rows that were learned in this folder came about.

    Args:
        folder: of the run.
        results: the contents of its results.json.

    Raises:
        InputError: where a metrics.jsonl is damaged, or a row has its files in another folder.
    """
    found = []
    for row in results["rows"]:
        rotations = learned_file(folder, row) if is_learned(row) else None
        if rotations is not None:
            file = rotations.with_name(METRICS)
            with readable(file):
                there = file.exists()
            if there:
                found.append(History(row, file.parent, load_history(file)))
    return found


def _plot(history: History, model: str) -> None:
    from qrot.report.plot import plot_learning  # matplotlib takes a moment

    row = history.row
    name = f"{model}, {scheme_name(row)}, seed {row['seed']}"
    plot_learning(history.lines, history.unit, name, history.folder / PICTURE)


def report(
    results: dict[str, Any],
    learned: list[History],
    anatomy: dict[str, Any] | None,
    settings: str,
    verdicts: Sequence[str] = (),
) -> str:
    """The page; what is not there is left out.

    Args:
        results: the contents of results.json.
        learned: see `histories`.
        anatomy: the contents of anatomy.json, or None.
        settings: the text of config.yaml.
        verdicts: sections that go before all others, as HTML.

    Returns:
        The page as HTML.
    """
    rows, protocol = results["rows"], results["protocol"]
    at = f" at {bits(rows)}" if bits(rows) else ""
    names = columns(rows)
    parts = [
        page.figures_of(_figures_of(rows)),
        *verdicts,
        page.section(
            "Results",
            page.table(names, cells(rows), ("method",)),
            page.note(title(results)),
            page.note(notes(results)),
        ),
        page.section("Perplexity", *_perplexity(rows)),
        *(anatomy_sections(anatomy) if anatomy else ()),
        page.section("Learning", *_learning(learned)),
        page.section("Cost", *_cost(rows)),
        page.section(
            "Protocol and settings",
            page.pairs(protocol),
            page.folded("Settings (config.yaml)", page.preformatted(settings)),
            page.folded("Environment", page.pairs(results.get("environment", {}))),
            _elsewhere(rows),
        ),
    ]
    return page.page(f"{page.model_name(protocol)}{at}", page.lead(protocol), parts)


def _elsewhere(rows: list[dict[str, Any]]) -> str:
    """Where rows were measured that are not of the same environment as the first ones."""
    moved = [row for row in rows if "environment" in row]
    if not moved:
        return ""
    known = dict.fromkeys(key for row in moved for key in row["environment"])
    lines = []
    for row in moved:
        values = [str(row["environment"].get(key, "")) for key in known]
        lines.append([row_name(row["method"], row["seed"]), *values])
    columns = ["row", *known]
    return page.folded("Rows measured elsewhere", page.table(columns, lines, columns))


def _figures_of(rows: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """Full precision, the best of the rest, and the distance between them."""
    means = {m: statistics.fmean(r["nll"] for r in group) for m, group in by_method(rows).items()}
    found = []
    full = means.pop(FULL_PRECISION, None)
    if full is not None:
        own = [row["perplexity"] for row in rows if row["method"] == FULL_PRECISION]
        found.append(("Full precision", spread(own), "perplexity"))
    if means:
        best = min(means, key=means.__getitem__)
        values = [row["perplexity"] for row in rows if row["method"] == best]
        seeds = f"perplexity, mean of {len(values)} seeds" if len(values) > 1 else "perplexity"
        value = spread([statistics.fmean(values)])
        found.append((f"Best when rounded: {best.replace('_', ' ')}", value, seeds))
        if full is not None:
            found.append(("Still lost", f"{means[best] - full:.3f}", "nats a token"))
    return found


def _bars(rows: list[dict[str, Any]], key: str) -> list[Bar]:
    groups = by_method(rows)
    means = {m: statistics.fmean(r["nll"] for r in group) for m, group in groups.items()}
    best = min((m for m in means if m != FULL_PRECISION), key=means.__getitem__, default=None)
    kinds: dict[str | None, Any] = {FULL_PRECISION: "full", best: "best"}
    return [
        Bar(
            method.replace("_", " "),
            {row["seed"]: row[key] for row in group},
            kinds.get(method, "plain"),
        )
        for method, group in groups.items()
    ]


def _perplexity(rows: list[dict[str, Any]]) -> list[str]:
    own = _bars(rows, "perplexity")
    drawn = [page.figure(both(lambda width: perplexity(own, width)), caption(own))]
    if all("other_perplexity" in row for row in rows):
        other, unit = _bars(rows, "other_perplexity"), "perplexity, other text"
        drawn.append(page.figure(both(lambda w: perplexity(other, w, unit)), caption(other)))
    return drawn


def _learning(learned: list[History]) -> list[str]:
    if not any("held_out" in line or "loss" in line for one in learned for line in one.lines):
        return []
    unit = learned[0].unit
    below = (
        f"{unit[0].upper()}{unit[1:]}. With dots: windows held out of training. Thin: training "
        "batches. Ring and number: the best, whose rotations are kept."
    )
    told = [(f"seed {one.row['seed']}", one.lines) for one in learned]
    return [page.figure(both(lambda width: learning(told, unit, width)), below)]


def _cost(rows: list[dict[str, Any]]) -> list[str]:
    """Seconds as recorded, and the memory of rows that tell it."""
    spent, lines = [], []
    for method, group in by_method(rows).items():
        if not all("seconds" in row for row in group):
            continue

        def mean(of, group=group) -> float:
            return statistics.fmean(of(row) for row in group)

        parts = {
            "learning": mean(lambda row: row.get("learn_seconds", 0.0)),
            "weights": mean(
                lambda row: (
                    row.get("weight_seconds", 0.0) + (row.get("mixed") or {}).get("seconds", 0.0)
                )
            ),
        }
        total = mean(lambda row: row["seconds"])
        parts["rest"] = max(total - sum(parts.values()), 0.0)
        name = method.replace("_", " ")
        spent.append((name, parts))
        memory = [row["peak_gib"] for row in group if "peak_gib" in row]
        lines.append(
            (
                name,
                *(f"{x:,.1f}" if x else "" for x in parts.values()),
                f"{total:,.1f}",
                f"{max(memory):.2f}" if memory else "",
            )
        )
    if not spent:
        return []
    there = [part for part in PARTS if any(parts[part] for _, parts in spent)]
    key = page.key([(f"bar {part}", PARTS[part]) for part in there])
    names = ("method", *(f"{name}, s" for name in PARTS.values()), "in all, s", "peak, GiB")
    table = page.table(names, lines, ("method",))
    drawn = page.figure(key + both(lambda width: seconds(spent, width)))
    return [drawn, page.folded("The same as a table", table)]
