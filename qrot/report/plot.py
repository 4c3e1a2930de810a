"""The picture of a learning run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from qrot.run.results import whole_file

INK, FAINT = "#2b2f36", "#b9bec7"
TRAINING, HELD_OUT = "#9db7dd", "#1f4e9c"
UNITS = {
    "cross_entropy": "cross-entropy (nats per token)",
    "kl": "KL to full precision (nats per token)",
    "kl_top": "KL to full precision, top tokens (nats per token)",
    "layer_reconstruction": "reconstruction error (relative to what a layer adds)",
    "reconstruction": "reconstruction error (relative to the output's energy)",
    "fisher": "expected loss by rounding (nats per token)",
    "whip": "mean of exp(-|y|), sum of sites",
    "kurtosis": "distance from a uniform kurtosis, sum of sites",
}


def plot_learning(history: list[dict[str, Any]], objective: str, title: str, path: Path) -> None:
    """Draw training and held-out loss by step, from the lines of metrics.jsonl, as a PNG.

    Marked are the level of the start, the best held-out loss (whose rotations are kept), and steps
    where a diverged run was rolled back. Raises OSError where the file cannot be written.
    """
    training = [(line["step"], line["loss"]) for line in history if "loss" in line]
    held_out = [(line["step"], line["held_out"]) for line in history if "held_out" in line]
    rolled_back = [line["step"] for line in history if "message" in line]
    figure = Figure(figsize=(7, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    with mpl.rc_context({"font.size": 10, "text.color": INK, "axes.labelcolor": INK}):
        axes = figure.add_subplot()
    if held_out:
        start = held_out[0][1]
        axes.axhline(
            start, color=FAINT, linewidth=1.2, linestyle=(0, (4, 3)), label=f"start, {start:.4g}"
        )
    axes.plot(*_columns(training), color=TRAINING, linewidth=1.4, label="training batch")
    axes.plot(
        *_columns(held_out),
        color=HELD_OUT,
        linewidth=2,
        marker="o",
        markersize=4,
        label="held-out windows",
    )
    for number, step in enumerate(rolled_back):
        label = "rolled back" if number == 0 else None
        axes.axvline(step, color="#c2452d", linewidth=1, alpha=0.6, label=label)
    if held_out:
        step, loss = min(held_out, key=lambda point: point[1])
        axes.plot(
            [step],
            [loss],
            linestyle="none",
            marker="o",
            markersize=10,
            markerfacecolor="none",
            markeredgecolor=HELD_OUT,
            markeredgewidth=1.5,
            label=f"best, {loss:.4g} at step {step}",
        )
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.set_xlabel("step")
    axes.set_ylabel(UNITS.get(objective, objective))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    last = max(1, history[-1]["step"]) if history else 1
    axes.set_xlim(-0.03 * last, 1.03 * last)
    axes.margins(y=0.12)
    axes.grid(axis="y", color="#eceef1", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(color=FAINT, labelcolor=INK)
    axes.legend(frameon=False, fontsize=9)
    with whole_file(path) as partial:
        figure.savefig(partial, format="png")


def _columns(points: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [step for step, _ in points], [loss for _, loss in points]
