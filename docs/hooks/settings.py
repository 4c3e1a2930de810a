"""The tables of settings.md, out of the dataclasses that a config is read into.

The source is read, not imported: the site is built without JAX.
"""

import ast
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from docstrings import itemised

MARK = "<!-- settings -->"
_TYPES = {
    "str": "text",
    "int": "integer",
    "float": "number",
    "bool": "true or false",
    "None": "null",
}


class Source(NamedTuple):
    """A dataclass, and what its module calls by a name: constants and Literals."""

    node: ast.ClassDef
    names: dict[str, ast.expr]


class Field(NamedTuple):
    """A key. default: as YAML has it; "" where the key is needed, None for a section of its own.

    section: the class that it is read into, if it is a section.
    """

    key: str
    kind: str
    default: str | None
    section: str | None


def on_page_markdown(markdown: str, config, **_) -> str:
    """The page with the tables in place of the mark."""
    if MARK not in markdown:
        return markdown
    package = Path(config.config_file_path).parent / "qrot"
    return markdown.replace(MARK, "\n".join(sections(read(package), "RunConfig")))


def read(package: Path) -> dict[str, Source]:
    """The dataclasses of a package, by name."""
    found = {}
    for file in sorted(package.rglob("*.py")):
        body = ast.parse(file.read_text(encoding="utf-8")).body
        assigned = [node for node in body if isinstance(node, ast.Assign)]
        names = {ast.unparse(node.targets[0]): node.value for node in assigned}
        for node in body:
            if isinstance(node, ast.ClassDef) and node.decorator_list:
                found[node.name] = Source(node, names)
    return found


def fields(classes: dict[str, Source], name: str) -> list[Field]:
    """The keys of a dataclass."""
    node, names = classes[name]
    found = []
    for line in node.body:
        if not isinstance(line, ast.AnnAssign):
            continue
        used = [n.id for n in ast.walk(line.annotation) if isinstance(n, ast.Name)]
        section = next((n for n in used if n in classes), None)
        own = isinstance(line.value, ast.Call) or ast.unparse(line.value or line) == "_ALONE"
        default = "" if line.value is None else None if own else _yaml(_value(line.value, names))
        kind = _kind(line.annotation, names, classes)
        found.append(Field(ast.unparse(line.target), kind, default, section))
    return found


def sections(classes: dict[str, Source], top: str) -> list[str]:
    """Markdown: a heading, the docstring and a table for the class and for all below it."""
    lines, queue, seen = [], [(top, "")], {}
    while queue:
        name, path = queue.pop(0)
        lines += [f"## {path or 'Top level'}", ""]
        if name in seen:
            lines += [f"As [`{seen[name]}`](#{_anchor(seen[name])}).", ""]
            continue
        seen[name] = path
        rows, below = fields(classes, name), []
        text = ast.get_docstring(classes[name].node) or ""
        lines += [itemised(text, [row.key for row in rows]), ""]
        lines += ["| key | may be | default |", "| --- | --- | --- |"]
        for row in rows:
            where, kind = f"{path}.{row.key}" if path else row.key, row.kind
            if row.section is not None:
                kind = kind.replace(row.section, f"[section](#{_anchor(where)})")
                below.append((row.section, where))
            default = {"": "needed", None: "as there"}.get(row.default, f"`{row.default}`")
            lines.append(f"| `{where}` | {kind} | {default} |")
        lines.append("")
        queue = below + queue
    return lines


def _anchor(path: str) -> str:
    return path.replace(".", "")


def _kind(node: ast.expr, names: dict[str, ast.expr], classes: dict[str, Source]) -> str:
    """What a value may be, in words; a section by the name of its class."""
    if isinstance(node, ast.BinOp):
        return " or ".join(_kind(side, names, classes) for side in (node.left, node.right))
    if isinstance(node, ast.Subscript):
        inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if ast.unparse(node.value) == "Literal":
            return ", ".join(f"`{ast.literal_eval(value)}`" for value in inner)
        return f"list of {_kind(inner[0], names, classes)}"
    name = ast.unparse(node)
    if name in names:
        return _kind(names[name], names, classes)
    return name if name in classes else _TYPES[name]


def _value(node: ast.expr, names: dict[str, ast.expr]) -> Any:
    return ast.literal_eval(names.get(ast.unparse(node), node))


def _yaml(value: Any) -> str:
    """In one line, without the end mark that YAML puts after a lone value."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_yaml, value))}]"
    if isinstance(value, str):
        return value if value.isprintable() else json.dumps(value)
    return json.dumps(value)
