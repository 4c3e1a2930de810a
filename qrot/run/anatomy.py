"""What a report shows of the activations, measured once a run and kept in anatomy.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from qrot.calibrate.capture import capture, capture_hidden
from qrot.files.whole import write_text
from qrot.model.params import Network
from qrot.progress import forward_seconds
from qrot.rotation.forms import Rotation, rotate
from qrot.rotation.transform import Transform
from qrot.run.about import row_name
from qrot.run.inputs import Inputs
from qrot.run.inspect import residual_figures, site_figures
from qrot.run.methods import METHODS
from qrot.run.results import ANATOMY
from qrot.sites import SITES

TOKENS = 256
CELLS = (64, 144)  # of the picture of an activation, at most
STEPS = 2 + len(SITES)
_LOUD = 4  # channels that are named


def keep_anatomy(inputs: Inputs, rows: list[dict[str, Any]]) -> None:
    """Look at the first window that judges, before and after what the best row put on the network;
    once, the file stays. Raises OSError where it cannot be written.
    """
    file = inputs.folder / ANATOMY
    if file.exists():
        return
    name, transform = _best(inputs, rows)
    window = inputs.rows[:1, :TOKENS]
    seconds = 4 + 2 * forward_seconds(inputs.millions, window.size)
    network = inputs.network.replace(scheme=inputs.config.scheme)
    with inputs.stages.stage("looking at activations", STEPS, seconds=seconds) as advance:
        found = anatomy(network, window, transform, advance=advance)
    write_text(file, json.dumps({"after": name, **found}, separators=(",", ":")) + "\n")


def _best(inputs: Inputs, rows: list[dict[str, Any]]) -> tuple[str, Transform | None]:
    """The row of least loss that put something on the network: its name, and what that was."""
    for row in sorted(rows, key=lambda row: row["nll"]):
        transform = METHODS[row["method"]].recall(inputs, row)
        if transform is not None:
            return row_name(row["method"], row["seed"]), transform
    return "", None


def anatomy(
    network: Network,
    rows: Int[np.ndarray, "count length"],
    transform: Transform | None,
    *,
    advance: Callable[..., None] = lambda: None,
) -> dict[str, Any]:
    """Outliers and rounding errors of each site by layer, and one activation, in plain values.

    Two passes over the windows, layer by layer.

    Args:
        network: folded; its scheme is that whose rounding errors are measured.
        rows: tokens of the windows to look at.
        transform: what comes between before and after; without it there is no after.
        advance: called STEPS times.

    Returns:
        {"tokens": how many, "sites": {site: {"crest" and "error": {"before" and "after": [one a
        layer]}}}, "activation": the residual stream in front of the layer, or behind the last,
        where its largest value is: {"place", "channels": how many, "loud": [[channel, largest
        |x|]], "before" and "after": |x| [tokens, channels] as in `pooled`}}. `crest` and `error`
        are those of `qrot.run.inspect`; the residual stream is not rounded and has no error, and
        no after where it is not rotated.
    """
    captured, _ = capture(network, rows, vectors=rows.shape[1], seed=0)
    advance()
    hidden = capture_hidden(network, rows)
    rotation = None if transform is None else transform.rotations.get("residual")
    layers = residual_figures(hidden, rotation)
    whens = ("before",) if rotation is None else ("before", "after")
    sites = {"residual": {"crest": {w: [_short(x[w]["crest"]) for x in layers] for w in whens}}}
    advance()
    states = {"before": Transform()} | ({} if transform is None else {"after": transform})
    for name, site in SITES.items():
        figures = {w: site_figures(site, captured, x, network) for w, x in states.items()}
        sites[name] = {
            figure: {w: [_short(layer[figure]) for layer in each] for w, each in figures.items()}
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


def _activation(
    hidden: Float[np.ndarray, "layers_and_last count length n"], rotation: Rotation | None
) -> dict[str, Any]:
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


def _short(x: float | np.floating) -> float:
    return float(f"{float(x):.3g}")
