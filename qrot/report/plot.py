"""The picture of how rotations were learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from qrot.files.whole import whole_file

INK, FAINT = "#2b2f36", "#b9bec7"
TRAINING, HELD_OUT, ROLLED_BACK = "#9db7dd", "#1f4e9c", "#c2452d"


def plot_learning(history: list[dict[str, Any]], unit: str, title: str, path: Path) -> None:
    """Draw training and held-out loss by step as a PNG.

    Marked are the level of the start, the best held-out loss (whose rotations are kept), and steps
    where a diverged run was rolled back.

    Args:
        history: the lines of metrics.jsonl.
        unit: of the loss, for the axis.
        title: of the picture.
        path: of the file.

    Raises:
        OSError: where it cannot be written.
    """
    figure = Figure(figsize=(7, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    with mpl.rc_context({"font.size": 10, "text.color": INK, "axes.labelcolor": INK}):
        axes = figure.add_subplot()
    _draw(axes, history)
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
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


def _draw(axes: Axes, history: list[dict[str, Any]]) -> None:
    """The lines and marks of a history."""
    training = [(line["step"], line["loss"]) for line in history if "loss" in line]
    held_out = [(line["step"], line["held_out"]) for line in history if "held_out" in line]
    rolled_back = [line["step"] for line in history if "message" in line]
    if held_out:
        start, dashed = held_out[0][1], (0, (4, 3))
        label = f"start, {start:.4g}"
        axes.axhline(start, color=FAINT, linewidth=1.2, linestyle=dashed, label=label)
    axes.plot(*_columns(training), color=TRAINING, linewidth=1.4, label="training batch")
    style = {"linewidth": 2, "marker": "o", "markersize": 4}
    axes.plot(*_columns(held_out), color=HELD_OUT, label="held-out windows", **style)
    for number, step in enumerate(rolled_back):
        label = "rolled back" if number == 0 else None
        axes.axvline(step, color=ROLLED_BACK, linewidth=1, alpha=0.6, label=label)
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


def _columns(points: list[tuple[int, float | int]]) -> tuple[list[int], list[float | int]]:
    return [step for step, _ in points], [loss for _, loss in points]
