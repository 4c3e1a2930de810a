"""qrot's own PyTorch folder: all that was learned, on the grids that it was judged at."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import qrot
from qrot.export.fitted import FILE, Fitted
from qrot.export.huggingface import layer_tensors
from qrot.network import fuse_shifts, left_online
from qrot.model.params import Layers
from qrot.quantize.rtn import rtn_layers
from qrot.rotation.forms import Learned, Rotations
from qrot.rotation.store import save_rotations
from qrot.scheme import Scheme, grids_by_layer, layer_scheme

MODULE, ONLINE = "qrot_torch.py", "online.safetensors"
_SOURCE = Path(str(qrot.__file__)).with_name("torch.py")  # copied, not imported: it needs torch


def rounded_tensors(
    i: int, layer: Layers, scheme: Scheme, dtype: Any, values: Layers | None = None
) -> dict[str, Any]:
    """One fused layer (a stack of one) with the values of its rounded weights.

    values: the same layer, rounded; to nearest where it is None.
    """
    return layer_tensors(i, values or rtn_layers(layer, layer_scheme(scheme, i)), dtype)


def write_online(
    folder: Path, fitted: Fitted, online: Rotations, scheme: Scheme, *, beside: bool
) -> None:
    """Write what the weights do not hold, and the module that hooks it in.

    beside: whether shifts and clip ratios are among it.
    """
    config, learned = fitted.opened.config, fitted.learned
    shifts = fuse_shifts(learned.shifts, learned.rotations, config, learned.scales)
    state = Learned(online, shifts, learned.clips) if beside else Learned(online)
    save_rotations(folder / ONLINE, state, {**_about(fitted, scheme), "fused": True})
    shutil.copyfile(_SOURCE, folder / MODULE)


def write_pytorch(folder: Path, fitted: Fitted) -> None:
    """`write_online` with everything, and the rotations for `apply_rotations`."""
    online = left_online(fitted.learned.rotations)
    write_online(folder, fitted, online, fitted.scheme, beside=True)
    save_rotations(folder / FILE, fitted.learned, _about(fitted, fitted.scheme))


def _about(fitted: Fitted, scheme: Scheme) -> dict[str, Any]:
    grids = grids_by_layer(scheme, fitted.opened.config.num_hidden_layers)
    return {**fitted.metadata, "grids": grids}
