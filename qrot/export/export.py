"""`export`: a source into a folder of some format, whole, and if asked for verified."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

import qrot
from qrot.errors import InputError
from qrot.export import verify
from qrot.export.beside import beside
from qrot.export.build import build, check_plan, difference
from qrot.export.content import Content
from qrot.export.format import Format, Options, Plan, check_dtype, check_options
from qrot.export.registry import FORMATS
from qrot.export.source import Source, weight_method
from qrot.files.plain import shown
from qrot.files.whole import whole_folder
from qrot.progress import Stages
from qrot.records import check_name
from qrot.scheme import Scheme

CARD = "qrot.json"  # in every export: what it is of, for programs
_NAMED = 20  # of the files that are not copied
# Of perplexities, or three standard errors where the noise of float32 decides between two levels:
# at 4 bits a change of 1e-6 in the embedding is another network, token by token.
_TOLERANCE = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 1e-2}


def export(
    source: Source,
    out: Path,
    name: str,
    options: Options,
    stages: Stages,
    *,
    check: bool = False,
) -> tuple[tuple[str, ...], verify.Difference | None]:
    """Write `out`, a folder that is not there yet, and open it again if `check`.

    Args:
        source: what is exported.
        out: the folder.
        name: of the format.
        options: what else is asked for.
        stages: that progress is told to.
        check: whether to load it and compare.

    Returns:
        What is to be said of it, as the README of the folder says it, and the comparison.

    Raises:
        InputError: where the format cannot hold what is asked for or what is loaded computes
            something else; nothing is left behind.
    """
    check_name(name, FORMATS, "--format")
    form = FORMATS[name]
    check_dtype(options.dtype)
    check_options(options, form, FORMATS)
    _check_installed(form, check)
    weight_method(source, options.weights)  # refuses before all else
    plan = form.check(source, options)
    check_plan(source, plan, options.weights, same_bits=not (options.scheme or options.type))
    said = (*plan.lines, difference(source, plan, options.weights))
    layers = source.opened.config.num_hidden_layers
    with whole_folder(out) as folder:
        content = build(source, plan, options.weights, stages)
        with stages.stage(f"writing {name}", layers, seconds=0.2 * layers) as advance:
            form.write(folder, source, plan, content, advance)
        more = (*_left(source, folder), *_mismatch(source), *_gate(source))
        readme = _readme(source, name, (*said, *more))
        (folder / "README.md").write_text(readme, encoding="utf-8", errors="backslashreplace")
        card = json.dumps(_card(source, name, plan), indent=2)
        (folder / CARD).write_text(card + "\n", encoding="utf-8")
        proof = _verify(folder, source, form, plan, content, stages) if check else None
    return said, proof


def _check_installed(form: Format, check: bool) -> None:
    needed = {*form.needs, *(form.proves if check else ())}
    if missing := [name for name in sorted(needed) if find_spec(name) is None]:
        raise InputError(f"this needs {', '.join(missing)}: `pip install qrot[export]`")


def _verify(
    folder: Path, source: Source, form: Format, plan: Plan, content: Content, stages: Stages
) -> verify.Difference:
    rows, config = verify.windows_of(source.opened), content.config
    dtype = "float64" if plan.exact else "float32"
    with stages.stage("loading both", seconds=15.0):
        ours = verify.logits_in_qrot(content.network(), dtype=dtype)
        theirs = form.program.logits(form.load(folder, source), config, dtype)
    with stages.stage("comparing", len(rows), seconds=4.0 * len(rows)) as advance:
        name = form.program.name
        proof = verify.compare(ours, theirs, rows, dtype=dtype, program=name, advance=advance)
    allowed = _TOLERANCE[plan.dtype]
    if plan.scheme.activations.on and not plan.exact:
        allowed = max(allowed, 3 * proof.error)
    if not proof.relative <= allowed:
        raise InputError(f"the export computes something else, and was not kept: {proof}")
    return proof


def _left(source: Source, folder: Path) -> list[str]:
    """What lay beside the model's weights and is not in a folder that is a model itself."""
    left = beside(source.opened).left if (folder / "config.json").is_file() else []
    if not left:
        return []
    more = f" and {len(left) - _NAMED} more" if len(left) > _NAMED else ""
    named = ", ".join(map(shown, left[:_NAMED])) + more
    return [f"Not copied from the folder of the model: {named}."]


def _mismatch(source: Source) -> list[str]:
    """That the weights are others than those that it was fitted to, where that was allowed."""
    said = source.about.get("mismatch")
    return [f"Made with --allow-mismatch: {said}."] if said else []


def _gate(source: Source) -> list[str]:
    """What the gate of the run has found, where it had one."""
    gate = source.about.get("gate")
    if gate is None:
        return []
    if gate["ungated"]:
        return [f"Exported with --ungated: {gate['reason']}."]
    kept = [
        f"{x['name']} {x['value']:.4g} on {x['text']}, at most {x['limit']:.4g}"
        for x in gate["limits"]
    ]
    return [f"{gate['row']} passed the gate of its run: {'; '.join(kept)}."]


def _card(source: Source, name: str, plan: Plan) -> dict[str, Any]:
    """What the folder says of itself to programs: whose weights it holds, and how they came."""
    about, opened = source.about, source.opened
    known = ("row", "method", "seed", "merge", "mismatch", "gate")
    return {
        "qrot": qrot.__version__,
        "format": name,
        "model": about["model"],
        "digest": about["digest"],
        "fingerprint": opened.identity.fingerprint.total,
        "revision": opened.revision,
        "scheme": TypeAdapter(Scheme).dump_python(plan.scheme, mode="json"),
        "left_out": plan.lost,
        **{key: about[key] for key in known if about.get(key) is not None},
    }


def _readme(source: Source, name: str, said: tuple[str, ...]) -> str:
    about = source.about
    lines = [f"# {Path(str(about['model'])).name}, rotated ({name})", *said]
    known = [
        f"{key.replace('_', ' ')} {about[key]}"
        for key in ("objective", "steps", "seed", "trained_weight_bits", "text")
        if about.get(key) is not None
    ]
    lines.append(
        f"Made by qrot {qrot.__version__} from {about['file']}, fitted to {about['model']} "
        f"({_version(source)})" + (f": {', '.join(known)}." if known else ".")
    )
    return "\n\n".join(lines) + "\n"


def _version(source: Source) -> str:
    commit = f"commit {source.opened.revision}, " if source.opened.revision else ""
    return f"{commit}sha256 {source.about['digest']}"
