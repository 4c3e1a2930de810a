"""Plain weights that transformers and all that reads such folders load, with nothing online."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax

from qrot.export.checkpoint import stored_dtype, write_checkpoint
from qrot.export.content import Content, acting, rounded_sites
from qrot.export.format import Format, Options, Plan, fitted, left_out, offline
from qrot.export.source import Source
from qrot.export.verify import load_plain
from qrot.model.params import Network
from qrot.scheme import Scheme

_LOADED = "`AutoModelForCausalLM.from_pretrained` loads it."


def check(source: Source, options: Options) -> Plan:
    """The judged network where only its weights are rounded; otherwise R1, R2 and scales in full
    precision."""
    dtype = options.dtype or stored_dtype(source.opened)
    network = source.network
    if network is not None and options.weights is None and _plain(network):
        lines = (
            f"The weights of the network that was judged, with the values that they have at "
            f"{network.scheme.name}. {_LOADED}",
        )
        return Plan(lines, network.scheme, dtype, judged=network, shard=options.shard)
    whole = fitted(source)
    lines = (
        "Full-precision weights with R1, R2 and scales in them; the network computes what it did "
        f"before, and is easier to quantise. {_LOADED}",
    )
    held = offline(whole)
    lost = left_out(whole, held)
    return Plan(lines, Scheme(), dtype, transform=held, lost=lost, shard=options.shard)


def _plain(network: Network) -> bool:
    """Whether weights alone are the network."""
    return not rounded_sites(network) and not jax.tree.leaves(acting(network))


def write(
    folder: Path, source: Source, plan: Plan, content: Content, advance: Callable[[int], None]
) -> None:
    """Write the folder; see `Format`."""
    write_checkpoint(
        folder, source.opened, content, dtype=plan.dtype, shard=plan.shard, advance=advance
    )


HUGGINGFACE = Format("huggingface", check, write, lambda folder, source: load_plain(folder))
