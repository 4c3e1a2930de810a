"""What a report shows of the activations, measured once a run and kept in anatomy.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from qrot.run.inspect import SITES, residual_figures, site_figures
from qrot.run.methods import METHODS
from qrot.run.prepare import Inputs
from qrot.run.results import write_text
from qrot.progress import forward_seconds
from qrot.calibrate.capture import capture, capture_hidden
from qrot.model.params import Model
from qrot.rotation.forms import Learned, Rotations, rotate
from qrot.rotation.store import load_rotations
from qrot.scheme import Scheme, layer_schemes

FILE = "anatomy.json"
TOKENS = 256
CELLS = (64, 144)  # of the picture of an activation, at most
STEPS = 2 + len(SITES)
_KEPT_IN_A_FILE = ("smoothquant", "equalised")
_LOUD = 4  # channels that are named


def keep_anatomy(inputs: Inputs, rows: list[dict[str, Any]]) -> None:
    """Look at the first window that judges, before and after what the best row put on the network;
    once, the file stays. Raises OSError where it cannot be written.
    """
    file = inputs.folder / FILE
    if file.exists():
        return
    name, learned = _best(inputs, rows)
    window = inputs.rows[:1, :TOKENS]
    seconds = 4 + 2 * forward_seconds(inputs.model, window.size)
    with inputs.stages.stage("looking at activations", STEPS, seconds=seconds) as advance:
        found = anatomy(inputs.model, window, learned, inputs.config.scheme, advance=advance)
    write_text(file, json.dumps({"after": name, **found}, separators=(",", ":")) + "\n")


def anatomy(
    model: Model,
    rows: Int[np.ndarray, "count length"],
    learned: Learned | None,
    scheme: Scheme,
    *,
    advance: Callable[..., None] = lambda: None,
) -> dict[str, Any]:
    """Outliers and rounding errors of each site by layer, and one activation, in plain values.

    model: folded. learned: what comes between before and after; without it there is no after.
    Two passes over `rows`, layer by layer. advance: called STEPS times.
    Returns {"tokens": how many, "sites": {site: {"crest" and "error": {"before" and "after": [one a
    layer]}}}, "activation": the residual stream in front of the layer, or behind the last, where
    its largest value is: {"place", "channels": how many, "loud": [[channel, largest |x|]],
    "before" and "after": |x| [tokens, channels] as in `pooled`}}. `crest` and `error` are those of
    `qrot.run.inspect`; the residual stream is not rounded and has no error, and no after
    where it is not rotated.
    """
    config = model.config
    captured, _ = capture(model, rows, taps=rows.shape[1], seed=0)
    advance()
    hidden = capture_hidden(model, rows)
    rotation = None if learned is None else learned.rotations.residual
    layers = residual_figures(hidden, Learned(Rotations(residual=rotation)))
    whens = ("before",) if rotation is None else ("before", "after")
    sites = {"residual": {"crest": {w: [_short(x[w]["crest"]) for x in layers] for w in whens}}}
    advance()
    states = {"before": Learned(Rotations())} | ({"after": learned} if learned else {})
    for site in SITES:
        grids = [getattr(each, site) for each in layer_schemes(scheme, config.num_hidden_layers)]
        told = {w: site_figures(site, captured, x, config, grids) for w, x in states.items()}
        sites[site] = {
            figure: {w: [_short(layer[figure]) for layer in each] for w, each in told.items()}
            for figure in ("crest", "error")
        }
        advance()
    return {"tokens": rows.size, "sites": sites, "activation": _activation(hidden, rotation)}


def pooled(x: Float[np.ndarray, "tokens channels"]) -> Float[np.ndarray, "rows columns"]:
    """|x| in at most CELLS cells, each the largest of its tokens and channels."""
    x = np.abs(x)
    for axis, most in enumerate(CELLS):
        size = x.shape[axis]
        starts = np.arange(min(size, most)) * size // min(size, most)
        x = np.maximum.reduceat(x, starts, axis=axis)
    return x


def _activation(hidden: np.ndarray, rotation) -> dict[str, Any]:
    """hidden [layers_and_last count length n]."""
    wide = hidden.astype(np.float32).reshape(len(hidden), -1, hidden.shape[-1])
    layer = int(np.abs(wide).max((1, 2)).argmax())
    x = wide[layer]
    largest = np.abs(x).max(0)
    pictures = {"before": x}
    if rotation is not None:
        pictures["after"] = np.asarray(rotate(jnp.asarray(x), rotation))
    return {
        "place": "after the last layer" if layer == len(hidden) - 1 else f"input of layer {layer}",
        "channels": x.shape[1],
        "loud": [[int(i), _short(largest[i])] for i in np.argsort(-largest)[:_LOUD]],
        **{w: [[_short(v) for v in line] for line in pooled(y)] for w, y in pictures.items()},
    }


def _best(inputs: Inputs, rows: list[dict[str, Any]]) -> tuple[str, Learned | None]:
    """The row of least loss that put something on the network: its name, and what that was."""
    for row in sorted(rows, key=lambda row: row["nll"]):
        method, seed = row["method"], row["seed"]
        name = method.replace("_", " ")
        if method == "learned":
            file = inputs.folder / row["rotations"]
        elif method == "saved":
            file = Path(inputs.config.saved or "")
        elif method in _KEPT_IN_A_FILE:
            file = inputs.folder / f"{name}.safetensors"
        elif method.startswith("random"):
            return f"{name}, seed {seed}", METHODS[method](inputs, name, seed)[0]
        else:  # nothing, or directions that are measured and cut off
            continue
        if not file.exists():  # moved or deleted since
            continue
        learned, _ = load_rotations(file, digest=inputs.model.digest)
        return name + ("" if seed is None else f", seed {seed}"), learned
    return "", None


def _short(x) -> float:
    return float(f"{float(x):.3g}")
