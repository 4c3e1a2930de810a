"""qrot's docstrings as Markdown: what is said of arguments and fields becomes a list."""

import re
from collections.abc import Iterable

try:
    import griffe
except ImportError:  # the settings page does without
    griffe = None


def itemised(text: str, names: Iterable[str]) -> str:
    """Markdown of a docstring: a line that begins with some of the names and a colon, such as
    "keys, values: of the cache", begins an item, to which the lines below it belong that are
    indented or go on with the sentence."""
    known, lines, item = set(names), [], False
    for line in text.splitlines():
        found = re.match(r"(\w+(?:, \w+)*): ", line)
        if found and known.issuperset(found[1].split(", ")):
            if not item and lines and lines[-1]:
                lines.append("")
            line = "- " + ", ".join(f"`{n}`" for n in found[1].split(", ")) + line[found.end(1) :]
            item = True
        elif item and (line.startswith("  ") or line[:1].islower()):
            line = f"    {line.strip()}"
        elif item:
            item = False
            if line:
                lines.append("")
        lines.append(line if line.startswith("    ") and not item else _escaped(line))
    return "\n".join(lines)


def _escaped(line: str) -> str:
    """Names in angle brackets, as in runs/<name>, are no HTML; within backticks they are safe."""
    parts = line.split("`")
    parts[::2] = [re.sub(r"<(?=[A-Za-z])", "&lt;", part) for part in parts[::2]]
    return "`".join(parts)


if griffe is not None:

    class Itemised(griffe.Extension):
        """For mkdocstrings: every docstring through `itemised`."""

        def on_package(self, *, pkg, **_):
            """Called once all of a package is read."""
            _itemise(pkg)

    def _itemise(obj) -> None:
        parameters = [p.name.lstrip("*") for p in getattr(obj, "parameters", ())]
        if obj.docstring is not None:
            obj.docstring.value = itemised(obj.docstring.value, [*parameters, *obj.members])
        for member in obj.members.values():
            if not member.is_alias:
                _itemise(member)
