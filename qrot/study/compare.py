"""Runs side by side: means and spreads over seeds, and which differences are more than that."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from qrot.errors import InputError, located
from qrot.files.plain import first_difference, read_yaml, readable, shown
from qrot.run.older import translated
from qrot.run.results import FULL_PRECISION, RESULTS, read_results

LEVEL = 0.95  # of the intervals
# No settings of a row.
_ASIDE = ("out", "methods", "seeds", "learn_seeds", "saved", "data.path")
_ASIDE += ("track", "keep", "gate", "refresh")
_MOST = 3  # settings in the name of a row; the run's folder stands for more


@dataclass(frozen=True)
class Run:
    """One run folder.

    Attributes:
        folder: its path.
        name: the way to it from what was asked for, without parts such as seed0.
        settings: of its configuration, by dotted key.
        results: the contents of its results.json.
    """

    folder: Path
    name: str
    settings: dict[str, Any]
    results: dict[str, Any]


@dataclass(frozen=True)
class Group:
    """What is compared: rows that differ in nothing but the seed.

    Attributes:
        name: the method and what sets the rows apart from other groups.
        rows: of results.json.
    """

    name: str
    rows: list[dict[str, Any]]

    @property
    def nll(self) -> dict[int | None, float]:
        """Nats a token by seed; None for what has no seed."""
        return {_seed(row): float(row["nll"]) for row in self.rows}


@dataclass(frozen=True)
class Difference:
    """Nats a token of one group above another, and what may be said of it.

    Attributes:
        mean: of the difference.
        interval: of confidence, at LEVEL; None where there are not the seeds for it.
        paired: whether the seeds were paired.
        verdict: in words.
    """

    mean: float
    interval: tuple[float, float] | None
    paired: bool
    verdict: str


def read_runs(folders: Sequence[Path], other: bool = False) -> list[Run]:
    """All runs in some folders.

    Args:
        folders: each a run folder or a folder of them.
        other: with what they measured on the other text in place of the first.

    Raises:
        InputError: where there is none, one is damaged, one has no other text, or two were measured
            by different protocols, whose numbers are no numbers to compare.
    """
    runs = []
    for folder in folders:
        with readable(folder):
            files = sorted(folder.rglob(RESULTS))
        if not files:
            raise InputError(f"{folder}: no run folder, and none in it")
        above = folder if len(folders) == 1 else folder.parent
        runs += [_read_run(file, above, other) for file in files]
    first = runs[0]
    for run in runs[1:]:
        key = first_difference(first.results["protocol"], run.results["protocol"])
        if key is not None:
            values = [r.results["protocol"].get(key) for r in (first, run)]
            raise InputError(
                f"{first.folder} and {run.folder} do not compare: their protocols differ in {key} "
                f"({shown(str(values[0]))}, {shown(str(values[1]))})"
            )
    return runs


def _read_run(file: Path, above: Path, other: bool) -> Run:
    """The run of a results.json, named by the way to it from the folder above."""
    results = read_results(file)
    if results is None:
        raise InputError(f"{file}: is gone")
    if other:
        with located(file):
            results = on_the_other_text(results)
    parts = file.parent.relative_to(above).parts
    name = "/".join(part for part in parts if not re.fullmatch(r"seed\d+", part))
    return Run(file.parent, name, _settings(file.parent / "config.yaml"), results)


def on_the_other_text(results: dict[str, Any]) -> dict[str, Any]:
    """Results as if the other text had been the one that was judged on.

    Raises:
        InputError: where there was none.
    """
    protocol = dict(results["protocol"])
    if "other_text" not in protocol:
        raise InputError("no other text was measured (the section `other` of a config)")
    protocol.pop("scored_tokens", None)  # of the first text
    protocol |= {"text": protocol.pop("other_text"), "count": protocol.pop("other_count")}
    rows = [
        {**row, "nll": row["other_nll"], "perplexity": row["other_perplexity"]}
        for row in results["rows"]
    ]
    return {**results, "protocol": protocol, "rows": rows}


def together(runs: Sequence[Run]) -> dict[str, Any]:
    """The first run's results with the rows of all."""
    return {**runs[0].results, "rows": [row for run in runs for row in run.results["rows"]]}


def grouped(runs: Sequence[Run], by: Sequence[str] = ()) -> list[Group]:
    """Rows that differ in nothing but the seed, named by method and what sets them apart.

    Args:
        runs: see `read_runs`.
        by: keys of the configuration, such as `scheme.keys.bits`; without any, those in which the
            runs differ, or the run's folder where they are many.

    Returns:
        The groups, the largest loss first.

    Raises:
        InputError: where a key is not known, there are no rows, or two have the same name and seed.
    """
    for key in by:
        if not any(key in run.settings for run in runs):
            raise InputError(f"--by {key}: no run has this key")
    keys = list(by) or differing(runs)
    apart = {run.folder: _apart(run, keys, named=bool(by) or len(keys) <= _MOST) for run in runs}
    sets: dict[str, set[tuple[str, ...]]] = {}  # by method, what sets its rows apart
    for run in runs:
        for row in run.results["rows"]:
            sets.setdefault(row["method"], set()).add(apart[run.folder])
    found: dict[str, dict[int | None, dict[str, Any]]] = {}
    for run in runs:
        for row in run.results["rows"]:
            full = row["method"] == FULL_PRECISION  # on no grid: the same whatever the settings
            alone = full or (len(sets[row["method"]]) == 1 and not by)
            parts = () if alone else apart[run.folder]
            name = ", ".join([row["method"].replace("_", " "), *parts])
            rows, seed = found.setdefault(name, {}), _seed(row)
            if seed in rows and not full:
                raise InputError(
                    f"two rows are '{name}' with seed {seed}: say with --by what sets them "
                    f"apart ({', '.join(differing(runs)) or 'their configs are equal'})"
                )
            rows[seed] = row
    if not found:
        raise InputError(f"{runs[0].folder}: no row is in it yet")
    groups = [Group(name, list(rows.values())) for name, rows in found.items()]
    return sorted(groups, key=lambda group: -statistics.fmean(group.nll.values()))


def _apart(run: Run, keys: Sequence[str], *, named: bool) -> tuple[str, ...]:
    """What sets the rows of a run apart: values of its settings, or where it is."""
    return tuple(f"{k}={_plain(run.settings.get(k))}" for k in keys) if named else (run.name,)


def difference(group: Group, base: Group) -> Difference:
    """How many nats a token `group` is above `base`.

    Where both have the same seeds, the mean of the differences seed by seed with Student's interval
    for it; otherwise the difference of the means with Welch's (1947). What has no seed does not
    vary.
    """
    ours, theirs = group.nll, base.nll
    mean = statistics.fmean(ours.values()) - statistics.fmean(theirs.values())
    fixed = [set(nll) == {None} for nll in (ours, theirs)]
    paired = not any(fixed) and len(ours) > 1 and set(ours) == set(theirs)
    if all(fixed):
        return Difference(mean, None, False, _which(mean) + " (no seeds in it)")
    if paired or any(fixed):
        seeds = theirs if fixed[0] else ours
        each = [ours[None if fixed[0] else s] - theirs[None if fixed[1] else s] for s in seeds]
        interval = _student(np.array(each))
    else:
        interval = _welch(np.array(list(ours.values())), np.array(list(theirs.values())))
    if interval is None:
        return Difference(mean, None, paired, "one seed: cannot be told from noise")
    apart = interval[0] > 0 or interval[1] < 0
    verdict = _which(mean) if apart else "not to be told from seed noise"
    return Difference(mean, interval, paired, verdict)


def _seed(row: dict[str, Any]) -> int | None:
    """The seed that a row depends on: of rotations that were saved, their own."""
    return row.get("rotation_seed", row["seed"])


def _which(mean: float) -> str:
    return "equal" if mean == 0 else "better" if mean < 0 else "worse"


def _student(each: np.ndarray) -> tuple[float, float] | None:
    if len(each) < 2:
        return None
    half = stats.t.ppf((1 + LEVEL) / 2, len(each) - 1) * each.std(ddof=1) / math.sqrt(len(each))
    return float(each.mean() - half), float(each.mean() + half)


def _welch(ours: np.ndarray, theirs: np.ndarray) -> tuple[float, float] | None:
    if min(len(ours), len(theirs)) < 2:
        return None
    interval = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval(LEVEL)
    return float(interval.low), float(interval.high)


def chosen(groups: Sequence[Group], against: str | None) -> Group:
    """The group that the others are compared with.

    Args:
        groups: see `grouped`.
        against: its name or how it begins; None for the first one.

    Raises:
        InputError: where no name, or more than one, begins like that.
    """
    if against is None:
        return groups[0]
    exact = [group for group in groups if group.name == against]
    near = exact or [group for group in groups if group.name.startswith(against)]
    if len(near) != 1:
        names = "; ".join(group.name for group in near or groups)
        raise InputError(f"--against {against}: {'none' if not near else 'several'} of {names}")
    return near[0]


def _settings(file: Path) -> dict[str, Any]:
    settings = read_yaml(file)
    if not isinstance(settings, dict):
        raise InputError(f"{file}: damaged")
    with located(file):
        return dict(_flat(translated(settings), ""))


def _flat(settings: Any, where: str):
    if not isinstance(settings, dict) or not settings:
        yield where, settings
        return
    for key, value in settings.items():
        yield from _flat(value, f"{where}.{key}" if where else str(key))


def differing(runs: Sequence[Run]) -> list[str]:
    """The keys in which the settings of runs differ, those aside that make no other rows."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    keys = [key for key in keys if not {key, key.partition(".")[0]} & {*_ASIDE}]
    return [k for k in keys if any(r.settings.get(k) != runs[0].settings.get(k) for r in runs)]


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
