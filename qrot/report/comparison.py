"""The report of a comparison."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qrot.files.whole import write_text
from qrot.report import page
from qrot.report.bars import Bar, caption, differences, perplexity
from qrot.report.differences import COLUMNS, NOTE, WORDS, lines
from qrot.report.results import title
from qrot.report.svg import both
from qrot.run.results import FULL_PRECISION
from qrot.study.compare import Group, Run, difference, differing, together


def write_comparison(file: Path, runs: Sequence[Run], groups: Sequence[Group], base: Group) -> None:
    """Write the page whole or not at all.

    Args:
        file: to write.
        runs, groups, base: as for `comparison`.

    Raises:
        OSError: where it cannot be written.
    """
    write_text(file, comparison(runs, groups, base))


def comparison(runs: Sequence[Run], groups: Sequence[Group], base: Group) -> str:
    """The page: groups side by side, their differences, and what sets runs apart.

    Args:
        runs: that the groups come from.
        groups: see `qrot.study.compare.grouped`.
        base: the one of them that the others are compared with.

    Returns:
        The page as HTML.
    """
    everything = together(runs)
    protocol = everything["protocol"]
    bars = _bars(groups)
    found = [(g.name, None if g is base else difference(g, base)) for g in groups]
    parts = [
        page.section(
            "Differences",
            page.figure(
                both(lambda width: differences(found, width)),
                "Bars: means. Whiskers: 95 % intervals. Broken and pale: not to be told from the "
                "spread over seeds.",
            ),
            page.table(COLUMNS, lines(groups, base), WORDS),
            page.note(NOTE),
        ),
        page.section(
            "Perplexity",
            page.figure(
                both(lambda width: perplexity(bars, width)),
                caption(bars),
            ),
            page.note(title(everything)),
        ),
        page.section("Settings that differ", _settings(runs)),
        page.section(
            "Protocol and environment",
            page.pairs(protocol),
            page.folded(f"Runs ({len(runs)})", _environments(runs)),
        ),
    ]
    heading = f"{page.model_name(protocol)}: {len(groups)} rows side by side"
    return page.page(heading, page.lead(protocol), parts)


def _bars(groups: Sequence[Group]) -> list[Bar]:
    """The best of what is rounded stands out; the last of the groups loses least."""
    rounded = [g for g in groups if any(row["method"] != FULL_PRECISION for row in g.rows)]
    bars = []
    for group in groups:
        values = {seed: row["perplexity"] for seed, row in zip(group.nll, group.rows, strict=True)}
        kind: Any = "full" if group not in rounded else "best" if group is rounded[-1] else "plain"
        bars.append(Bar(group.name, values, kind))
    return bars


def _settings(runs: Sequence[Run]) -> str:
    keys = differing(runs)
    if not keys:
        return ""
    rows = {tuple([_name(run), *(_plain(run.settings.get(k)) for k in keys)]): None for run in runs}
    return page.table(["run", *keys], rows, ["run", *keys])


def _environments(runs: Sequence[Run]) -> str:
    known = dict.fromkeys(key for run in runs for key in run.results.get("environment", {}))
    rows = [
        [str(run.folder), *(str(run.results.get("environment", {}).get(k, "")) for k in known)]
        for run in runs
    ]
    return page.table(["run", *known], rows, ["run", *known])


def _name(run: Run) -> str:
    return run.name or str(run.folder)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
