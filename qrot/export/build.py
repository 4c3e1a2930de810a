"""From a plan to what is exported: the network that was judged, or one that is built."""

from __future__ import annotations

import jax

from qrot.errors import InputError
from qrot.export.content import Content, streamed, whole
from qrot.export.format import Plan
from qrot.export.source import Source, calibration_rows, weight_method
from qrot.progress import Stages


def build(source: Source, plan: Plan, weights: str | None, stages: Stages) -> Content:
    """What a plan says.

    The judged network is in memory, and so is one whose weights a text rounds. All others are read,
    fused and rounded a layer at a time, when they are asked for.

    Args:
        source: that it is built from.
        plan: what it is to be.
        weights: the method that rounds them; the run's if None.
        stages: that progress is told to.
    """
    if plan.judged is not None:
        return plan.after(plan.before(whole(plan.judged)))
    content = plan.before(streamed(source.opened, plan.transform, plan.scheme))
    if not plan.scheme.rounds_weights:
        return content
    method, settings = weight_method(source, weights)
    if method.text == "none":
        return plan.after(content.changed(plan.nearest))
    with stages.stage("reading and fusing", seconds=15.0):
        network = jax.block_until_ready(content.network())
    method.check(network, settings)
    rows = calibration_rows(source)
    layers = network.config.num_hidden_layers
    with stages.stage(method.label, layers, seconds=0.1 * layers * len(rows)) as advance:
        network = jax.block_until_ready(method.round(network, rows, settings, advance=advance))
    return plan.after(whole(network))


def check_plan(source: Source, plan: Plan, weights: str | None, *, same_bits: bool = True) -> None:
    """Raise InputError where weights are to be rounded anew as they cannot be.

    Args:
        source: that it is built from.
        plan: what it is to be.
        weights: the method that rounds them; the run's if None.
        same_bits: whether the bits are those of the run.
    """
    method, _ = weight_method(source, weights)
    if plan.judged is not None or not plan.scheme.rounds_weights:
        return
    if source.network is None and source.about.get("mixed") and same_bits:
        raise InputError(
            "the run gave each projection its own bits, and kept no network: say --scheme, or "
            "--type for GGUF, or run it again with keep=best"
        )
    if method.text == "generated":
        raise InputError(
            f"{method.label} trains on text of its own, which is done in a run only: export a "
            "network that it kept (keep=best), in a format that can hold it, or say --weights"
        )


def difference(source: Source, plan: Plan, weights: str | None) -> str:
    """A sentence on what a plan has in place of what was judged."""
    method, _ = weight_method(source, weights)
    if plan.judged is not None:
        row, by = source.about.get("row"), weight_method(source)[0].label
        named = f" ({row})" if row else ""
        if plan.scheme == source.scheme:
            return f"It is the network that was judged{named}: weights by {by}, not rounded again."
        return (
            f"It has the weights of the network that was judged{named}, by {by} and not rounded "
            f"again, at {plan.scheme.name} in place of {source.scheme.name}."
        )
    parts = [f"without {plan.lost}"] if plan.lost else []
    if plan.scheme != source.scheme:
        rounded = plan.scheme.rounds_weights or plan.scheme.activations.on
        at = f"at {plan.scheme.name}" if rounded else "at full precision"
        parts.append(f"{at} in place of {source.scheme.name}")
    if plan.scheme.rounds_weights and (source.network is not None or method.text != "none"):
        parts.append(f"weights rounded anew by {method.label}")
    if not parts:
        return "It is the network that was judged, built once more."
    return f"It is not the network that was judged: {', '.join(parts)}."
