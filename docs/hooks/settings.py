"""The tables of settings.md, out of the dataclasses that a config is read into.

The source is read, not imported: the site is built without JAX.
"""

import ast
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

MARK = "<!-- settings -->"
WEIGHTS = "WeightSettings"  # the union of all dataclasses that have a `method`
# The package whose records have the names that a key may have.
RECORDS = {"methods": "run/methods", "objective": "learn/objectives", "start": "learn/starts"}
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

    @property
    def method(self) -> str:
        """What the field `method` has to be; "" where there is none."""
        for line in self.node.body:
            if isinstance(line, ast.AnnAssign) and ast.unparse(line.target) == "method":
                value = None if line.value is None else ast.literal_eval(line.value)
                return value if isinstance(value, str) else ""
        return ""


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
    tables = sections(read(package), "RunConfig", names=record_names(package))
    return markdown.replace(MARK, "\n".join(tables))


def record_names(package: Path) -> dict[str, list[str]]:
    """By key the names of the records that it may name: RECORD = Kind("name", ...)."""
    found: dict[str, list[str]] = {}
    for key, folder in RECORDS.items():
        for file in sorted((package / folder).glob("*.py")):
            for node in ast.parse(file.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                    name = node.value.args[0] if node.value.args else None
                    if isinstance(name, ast.Constant) and isinstance(name.value, str):
                        found.setdefault(key, []).append(name.value)
    return found


def itemised(text: str) -> str:
    """Markdown of a docstring: what stands under `Attributes:` becomes a list."""
    before, _, after = text.partition("Attributes:\n")
    lines = [_escaped(line) for line in before.splitlines()]
    for line in after.splitlines():
        entry = re.match(r"    (\w+): (.*)", line)
        lines.append(f"- `{entry[1]}`: {_escaped(entry[2])}" if entry else _escaped(line[4:]))
    return "\n".join(lines)


def _escaped(line: str) -> str:
    """Names in angle brackets, as in runs/<name>, are no HTML; within backticks they are safe."""
    parts = line.split("`")
    parts[::2] = [re.sub(r"<(?=[A-Za-z])", "&lt;", part) for part in parts[::2]]
    return "`".join(parts)


def read(package: Path) -> dict[str, Source]:
    """The dataclasses of a package, by name."""
    bodies = [ast.parse(f.read_text(encoding="utf-8")).body for f in sorted(package.rglob("*.py"))]
    own = [_assigned(body) for body in bodies]
    literals = {
        name: value
        for names in own
        for name, value in names.items()
        if ast.unparse(value).startswith("Literal[")  # which other modules may import
    }
    return {
        node.name: Source(node, literals | names)
        for body, names in zip(bodies, own, strict=True)
        for node in body
        if isinstance(node, ast.ClassDef) and node.decorator_list
    }


def _assigned(body: list[ast.stmt]) -> dict[str, ast.expr]:
    """What the names of a module stand for."""
    nodes = (node for node in body if isinstance(node, ast.Assign))
    return {ast.unparse(node.targets[0]): node.value for node in nodes}


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


def sections(
    classes: dict[str, Source], top: str, names: dict[str, list[str]] | None = None
) -> list[str]:
    """Markdown: a heading, the docstring and a table for the class and for all below it.

    Args:
        classes: by name.
        top: the name of the first one.
        names: by key, what a text may be.
    """
    lines, queue, done = [], [(top, "")], {}
    while queue:
        name, path = queue.pop(0)
        method = classes[name].method
        heading = f"{path}: {{method: {method}}}" if method else path or "Top level"
        lines += [f"## {heading}", ""]
        if name in done:
            lines += [f"As [`{done[name]}`](#{_anchor(done[name])}).", ""]
            continue
        done[name] = path
        rows, below = fields(classes, name), []
        lines += [itemised(ast.get_docstring(classes[name].node) or ""), ""]
        lines += ["| key | may be | default |", "| --- | --- | --- |"]
        for row in rows:
            where, kind = f"{path}.{row.key}" if path else row.key, row.kind
            if kind == WEIGHTS:
                union = [n for n, source in classes.items() if source.method]
                below += [(member, where) for member in union]
                kind = "section by `method`: " + ", ".join(f"`{classes[n].method}`" for n in union)
            elif row.section is not None:
                kind = kind.replace(row.section, f"[section](#{_anchor(where)})")
                below.append((row.section, where))
            elif names and row.key in names:
                kind = kind.replace("text", ", ".join(f"`{n}`" for n in names[row.key]))
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
    if name == WEIGHTS:
        return name
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
