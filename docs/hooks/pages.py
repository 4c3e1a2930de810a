"""Formulas as MathML while the site is built, and no page that loads anything from elsewhere."""

import html
import re

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError

# What pymdownx.arithmatex makes of $...$ and $$...$$.
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\s*\\([(\[])(.*?)\\[)\]]\s*</\1>', re.DOTALL)
_LOADS = re.compile(
    r"<(?:script|img|iframe|source|video|audio|embed)\b[^>]*\bsrc=[\"']?(?:https?:)?//[^>]*>"
    r"|<link\b(?![^>]*rel=[\"']?canonical)[^>]*\bhref=[\"']?(?:https?:)?//[^>]*>"
    r"|url\([\"']?(?:https?:)?//[^)]*\)|@import\s+[\"'](?:https?:)?//",
    re.IGNORECASE,
)


def on_page_content(content: str, page, **_) -> str:
    """HTML of a page, its formulas turned to MathML; raises PluginError where one is not."""

    def mathml(found: re.Match) -> str:
        display = "block" if found[2] == "[" else "inline"
        made = convert(html.unescape(found[3]).strip(), display=display)
        if unknown := re.search(r"\\\w+", made):
            raise PluginError(f"{page.file.src_uri}: {unknown[0]} cannot be written as MathML")
        # On a phone a long formula is pushed aside, not the page.
        return f'<div style="overflow-x: auto">{made}</div>' if display == "block" else made

    return _FORMULA.sub(mathml, content)


def on_post_page(output: str, page, **_) -> str:
    """The page as it is; raises PluginError where it would load something from elsewhere."""
    if found := _LOADS.search(output):
        raise PluginError(f"{page.file.src_uri} loads from elsewhere: {found[0][:200]}")
    return output
