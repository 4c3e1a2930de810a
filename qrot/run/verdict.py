"""What was measured against the limits of a gate: a line for each, and a file for CI systems."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

from qrot.run.limits import OF_TEXT, SITE_COST, Gate

_Z95 = 1.959964  # standard errors of a normal distribution, to either side
_CALIBRATION = "the calibration text"


def lines(gate: Gate, measured: Mapping[str, Any], drop: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each limit on each text: its value, and whether it passes.

    Args:
        gate: the limits.
        measured: the section of that name in gate.json, with all that they ask for.
        drop: that of the scores, see `zeroshot_drop`; not looked at without a limit on it.

    Returns:
        The section `limits` of gate.json.
    """
    found = []
    for name, limit in gate.limits.items():
        if name in OF_TEXT:
            values = [{"text": text["text"], "value": text[name]} for text in measured["texts"]]
        elif name == SITE_COST:
            site, cost = max(measured["site_costs"].items(), key=lambda pair: pair[1])
            values = [{"text": _CALIBRATION, "value": cost, "site": site}]
        else:
            values = [drop]
        for value in values:
            passed = value["value"] <= limit
            found.append({"name": name, "limit": limit, **value, "passed": passed})
    return found


def zeroshot_drop(exact: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """What the mean accuracy of a row is below that of another, with an interval of 95 %.

    The standard errors of the two count as independent, which they are not, since both answer the
    same questions: the interval is wider than need be.

    Args:
        exact: the row that is compared with, of full precision.
        row: the other.
    """
    tasks = list(exact["zeroshot"])
    value = sum(exact["zeroshot"][t]["acc"] - row["zeroshot"][t]["acc"] for t in tasks) / len(tasks)
    errors = [of["zeroshot"][task]["acc_stderr"] for of in (exact, row) for task in tasks]
    interval = None
    if None not in errors:
        half = _Z95 * sum(error**2 for error in errors) ** 0.5 / len(tasks)
        interval = [value - half, value + half]
    return {"text": ", ".join(tasks), "value": value, "interval": interval}


def failures(limits: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence for each limit that is not kept to, with how much is missing.

    Args:
        limits: the section of that name in gate.json.
    """
    return [
        f"{line['name']} on {short_name(line['text'])} is {line['value']:.4g}{_at(line)}, "
        f"{line['value'] - line['limit']:.3g} above its limit of {line['limit']:.4g}"
        for line in limits
        if not line["passed"]
    ]


def _at(line: Mapping[str, Any]) -> str:
    return f" at {line['site']}" if line.get("site") else ""


def short_name(text: str) -> str:
    """The name of a text without its hash."""
    return re.sub(r", sha256 \w+", "", text)


def junit(gate: Mapping[str, Any]) -> str:
    """The contents of gate.json as JUnit XML: a test case for each limit on each text.

    Args:
        gate: the contents.
    """
    limits, of = gate["limits"], gate["of"]
    failed = sum(not line["passed"] for line in limits)
    counts = {"tests": str(len(limits)), "failures": str(failed), "errors": "0"}
    root = ElementTree.Element("testsuites", counts)
    suite = ElementTree.SubElement(
        root,
        "testsuite",
        {**counts, "name": "qrot gate", "skipped": "0", "time": f"{gate['seconds']:.3f}"},
    )
    properties = ElementTree.SubElement(suite, "properties")
    for name in ("row", "network", "digest", "model", "fingerprint"):
        ElementTree.SubElement(properties, "property", {"name": name, "value": _plain(of[name])})
    for line in limits:
        case = ElementTree.SubElement(
            suite,
            "testcase",
            {"classname": f"qrot.gate.{_plain(of['row'])}", "name": _case(line), "time": "0"},
        )
        said = f"{line['value']:.6g}{_at(line)}, at most {line['limit']:.6g}"
        if not line["passed"]:
            (message,) = failures([line])
            failure = {"type": line["name"], "message": _plain(message)}
            ElementTree.SubElement(case, "failure", failure).text = _plain(said)
        ElementTree.SubElement(case, "system-out").text = _plain(said)
    ElementTree.indent(root)
    return f"<?xml version='1.0' encoding='utf-8'?>\n{ElementTree.tostring(root, 'unicode')}\n"


def _case(line: Mapping[str, Any]) -> str:
    return _plain(f"{line['name']} on {line['text']}")


def _plain(text: str) -> str:
    """Without the characters that XML has no form for."""
    return "".join(x if x.isprintable() else "\N{REPLACEMENT CHARACTER}" for x in text)
