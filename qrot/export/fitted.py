"""What is exported: rotations, the model they were fitted to, and the grids they were judged at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from qrot.errors import InputError, located
from qrot.evaluate.perplexity import spread_windows
from qrot.run.config import RunConfig, read_config, read_scheme
from qrot.text import read_texts
from qrot.progress import Stages
from qrot.network import fold_ends, fold_layers, fold_norms, fuse, fuse_layers, fuse_table
from qrot.model.io.load import Opened, open_model
from qrot.model.params import Layers, Params
from qrot.model.io.tokenizer import encode
from qrot.quantize.gptq import gptq
from qrot.rotation.forms import Learned, Rotations, Scales, Shifts, by_layer
from qrot.rotation.store import check_digest, load_rotations
from qrot.scheme import Scheme

FILE = "rotations.safetensors"
WEIGHTS = ("rtn", "gptq")


@dataclass(frozen=True)
class Fitted:
    """Rotations with their model, whose parameters are yet to be read."""

    opened: Opened
    learned: Learned
    scheme: Scheme
    metadata: dict[str, Any]  # of the rotation file, and where it was
    run: RunConfig  # that they come from; the default one for a file on its own


def read_fitted(source: Path, *, model: str | None = None) -> Fitted:
    """Open a run folder or a rotation file, and the model that its metadata name.

    model: where that model is now, if no longer under its name. Raises InputError where there are
    no rotations or several, and where the model is not the one that they were fitted to.
    """
    path = _rotation_file(source)
    learned, metadata = load_rotations(path)
    opened = open_model(model or metadata["model"])
    check_digest(path, metadata, opened.digest)
    with located(path):
        scheme = read_scheme(metadata.get("scheme", {}))
    return Fitted(opened, learned, scheme, {**metadata, "rotations": str(path)}, _run_of(path))


def _run_of(path: Path) -> RunConfig:
    for folder in path.resolve().parents[:2]:  # in the run's folder, or in one for each seed
        if (folder / "config.yaml").is_file():
            return read_config(folder / "config.yaml")
    return RunConfig()


def _rotation_file(source: Path) -> Path:
    if not source.is_dir():
        return source
    if (source / FILE).is_file():
        return source / FILE
    seeds = sorted(str(path) for path in source.glob(f"seed*/{FILE}"))
    if seeds:
        raise InputError(f"{source}: several seeds, export one of {', '.join(seeds)}")
    raise InputError(f"{source}: a run without learned rotations has none to export")


def fused_embed(fitted: Fitted, rotations: Rotations) -> Any:
    """The embedding [vocab, hidden], rotated; read anew."""
    return fuse_table(fitted.opened.read(range(0)).embed, rotations)


def fused_head(fitted: Fitted, rotations: Rotations) -> Any:
    """The head as PyTorch has it [vocab, hidden], with the last norm in it, rotated; read anew."""
    return fuse_table(fold_ends(fitted.opened.read(range(0))).head.T, rotations)


def fused_layers(fitted: Fitted, learned: Learned) -> Iterator[Layers]:
    """The layers one after the other, each a stack of one, read, folded and fused on demand."""
    config = fitted.opened.config
    rotations, scales = learned.rotations, learned.scales or Scales()
    for i in range(config.num_hidden_layers):
        own, factors = jax.tree.map(lambda x, i=i: x[i : i + 1], (by_layer(rotations), scales))
        layers = fold_layers(fitted.opened.read(range(i, i + 1), ends=False).layers)
        yield fuse_layers(layers, rotations.replace(**own), config, factors)


def fuse_whole(fitted: Fitted, learned: Learned) -> tuple[Params, Rotations, Shifts | None]:
    """The whole model with rotations in its weights, and what acts beside them."""
    model = fold_norms(fitted.opened.model(fitted.opened.read()))
    return fuse(model.params, learned.rotations, model.config, learned.shifts, learned.scales)


def by_gptq(
    fitted: Fitted, params: Params, online: Rotations, scheme: Scheme, stages: Stages
) -> Params:
    """A fused model's weights as GPTQ rounds them, calibrated on the run's text."""
    config, settings = fitted.opened.config, fitted.run.calibration
    tokens = encode(fitted.opened.tokenizer, read_texts(fitted.run.data).calibration)
    rows = spread_windows(tokens, settings.length, settings.windows)
    layers = config.num_hidden_layers
    with stages.stage("GPTQ", layers, seconds=0.1 * layers * settings.windows) as advance:
        return gptq(
            params,
            scheme,
            config,
            rows,
            rotations=online,
            settings=fitted.run.gptq,
            advance=advance,
        )


def uses_gptq(fitted: Fitted, asked: str | None = None) -> bool:
    """Whether GPTQ rounds: as asked for, or as in the run. Raises InputError for other methods."""
    method = asked or fitted.metadata.get("weight_method", "rtn")
    if method not in WEIGHTS:
        raise InputError(f"the run rounds weights by {method}, as no export does: say --weights")
    return method == "gptq"


def one_layer(params: Params, i: int) -> Layers:
    """One layer as a stack of one."""
    return jax.tree.map(lambda x: x[i : i + 1], params.layers)


def offline(learned: Learned) -> Learned:
    """Only what the weights can hold: R1, R2 and scales, no online rotation."""
    rotations = learned.rotations.replace(key=None, down=None)
    return Learned(rotations, scales=learned.scales)


def left_out(learned: Learned, *, scales: bool = True) -> str:
    """What a format without online rotations, shifts and clips loses; "" if nothing."""
    rotations = learned.rotations
    parts = {
        "R3": rotations.key,
        "R4": rotations.down,
        "shifts": learned.shifts,
        "clip ratios": learned.clips,
        "scales": None if scales else learned.scales,
    }
    return ", ".join(name for name, part in parts.items() if jax.tree.leaves(part))


def as_numpy(x: Any, dtype: Any) -> np.ndarray:
    """An array on the host, cast once, in one piece."""
    return np.ascontiguousarray(np.asarray(x).astype(dtype))
