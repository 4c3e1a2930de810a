"""The page: its frame and the parts that are no pictures, as HTML text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

STYLE = Path(__file__).parent / "style.css"
# Nothing is fetched and nothing is run, whatever a name in the results may hold.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page(title: str, lead: str, parts: Iterable[str]) -> str:
    """A whole page.

    Args:
        title: its heading.
        lead: the line below the heading.
        parts: sections, as HTML.

    Returns:
        The page as HTML.
    """
    style = STYLE.read_text(encoding="utf-8")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{escape(title)}</title>
<style>
{style}</style>
</head>
<body>
<main>
<header><h1>{escape(title)}</h1><p class="lead">{escape(lead)}</p></header>
{"".join(parts)}</main>
</body>
</html>
"""


def model_name(protocol: dict[str, Any]) -> str:
    """The model in a heading: of a path its last part."""
    return Path(str(protocol["model"])).name


def lead(protocol: dict[str, Any]) -> str:
    """The line below the heading."""
    text = re.sub(r", sha256 \w+", "", str(protocol["text"]))
    return f"Perplexity on {text}, with qrot"


def section(heading: str, *parts: str) -> str:
    """A section; nothing where it has nothing in it."""
    inside = "\n".join(part for part in parts if part)
    return f"<section>\n<h2>{escape(heading)}</h2>\n{inside}\n</section>\n" if inside else ""


def note(text: str) -> str:
    """A paragraph that explains."""
    return f'<p class="note">{escape(text)}</p>' if text else ""


def verdict(passed: bool, text: str) -> str:
    """A line that says at a glance how something ended."""
    return f'<p class="verdict {"passed" if passed else "failed"}">{escape(text)}</p>'


def figure(drawing: str, caption: str = "") -> str:
    """A picture and what to see in it."""
    below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f"<figure>{drawing}{below}</figure>"


def panels(drawings: Iterable[str], kind: str = "panels") -> str:
    """Small pictures beside one another, as many as there is room for."""
    return f'<div class="{kind}">{"".join(drawings)}</div>'


def key(entries: Sequence[tuple[str, str]]) -> str:
    """What kinds of marks mean: (class, words)."""
    parts = [f'<span><i class="{kind}"></i>{escape(text)}</span>' for kind, text in entries]
    return f'<p class="key">{"".join(parts)}</p>'


def figures_of(facts: Sequence[tuple[str, str, str]]) -> str:
    """The few numbers that matter: what it is, the number, what of it."""
    parts = [
        f"<div><dt>{escape(what)}</dt><dd>{escape(value)}</dd><dd>{escape(of)}</dd></div>"
        for what, value, of in facts
    ]
    return f'<dl class="facts">{"".join(parts)}</dl>\n'


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], words: Sequence[str]) -> str:
    """A table that scrolls in its own box, without columns that are empty.

    Args:
        columns: their names.
        rows: cells under them.
        words: names of columns that hold no numbers.

    Returns:
        The table as HTML.
    """
    rows = list(rows)
    kept = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    columns, rows = [columns[i] for i in kept], [[row[i] for i in kept] for row in rows]

    def cells(tag: str, line: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=words' if name in words else ''}>{escape(text)}</{tag}>"
            for name, text in zip(columns, line, strict=True)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    head = f"<thead><tr>{cells('th', columns)}</tr></thead>"
    return f'<div class="box" tabindex="0"><table>{head}<tbody>{body}</tbody></table></div>'


def pairs(facts: dict[str, object]) -> str:
    """Names and values."""
    parts = [
        f"<dt>{escape(str(name).replace('_', ' '))}</dt><dd>{escape(_plain(value))}</dd>"
        for name, value in facts.items()
        if value not in (None, "")
    ]
    return f'<dl class="pairs">{"".join(parts)}</dl>'


def folded(summary: str, inside: str) -> str:
    """What opens on a click."""
    return f"<details><summary>{escape(summary)}</summary>{inside}</details>"


def preformatted(text: str) -> str:
    """Text as it is, in a box that scrolls."""
    return f'<pre class="box" tabindex="0">{escape(text)}</pre>'


def _plain(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
