"""What weights do not hold, in a file beside them, and the module that hooks it in."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import qrot
from qrot.export.source import FITTED, Source
from qrot.rotation.store import save_rotations
from qrot.rotation.transform import Online
from qrot.scheme import Scheme, grids_by_layer

MODULE, ONLINE = "qrot_torch.py", "online.safetensors"
_RUNTIME = Path(str(qrot.__file__)).parent / "export" / "runtime"  # it is copied, not imported


def write_online(folder: Path, source: Source, online: Online, scheme: Scheme) -> None:
    """Write what acts at run time, with its grids, and the module that hooks it in.

    Args:
        folder: of the weights.
        source: that they come from.
        online: what acts beside them.
        scheme: the grids of activations and cache that are to be hooked in.
    """
    save_rotations(folder / ONLINE, online, {**_about(source, scheme), "fused": True})
    shutil.copyfile(_RUNTIME / MODULE, folder / MODULE)


def write_transform(folder: Path, source: Source) -> None:
    """Write what was fitted, for `apply_rotations` of the module; nothing where it is not known."""
    if source.transform is not None:
        save_rotations(folder / FITTED, source.transform, _about(source, source.scheme))


def _about(source: Source, scheme: Scheme) -> dict[str, Any]:
    grids = grids_by_layer(scheme, source.opened.config.num_hidden_layers)
    return {**source.about, "grids": grids, "revision": source.opened.revision}
