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

MODULE, ONLINE = "qrot_torch.py", "qrot/online.safetensors"
# In the names of the weights, so that a loader that knows nothing of what is online does not find
# them: transformers has this for several sets of weights in one folder.
_VARIANT = "online"
_RUNTIME = Path(str(qrot.__file__)).parent / "export" / "runtime"  # it is copied, not imported


def write_online(folder: Path, source: Source, online: Online, scheme: Scheme) -> None:
    """Write what acts at run time, with its grids, and the module that hooks it in.

    Args:
        folder: with the weights, which only that module finds from now on.
        source: that they come from.
        online: what acts beside them.
        scheme: the grids of activations and cache that are to be hooked in.
    """
    for name, end in (("model", "safetensors"), ("model.safetensors.index", "json")):
        if (path := folder / f"{name}.{end}").is_file():
            path.rename(folder / f"{name}.{_VARIANT}.{end}")
    (folder / ONLINE).parent.mkdir()  # where none that reads all *.safetensors comes
    save_rotations(folder / ONLINE, online, {**_about(source, scheme), "fused": True})
    shutil.copyfile(_RUNTIME / MODULE, folder / MODULE)


def for_module_only(config: dict[str, Any]) -> dict[str, Any]:
    """config.json for weights that are wrong without the module: that of a model which no other
    program knows, with the one that the module makes of it inside.

    Args:
        config: what config.json would be of the weights alone.
    """
    own = {"model_type": "qrot_torch", "architectures": ["QrotForCausalLM"]}
    return {**own, "rotated_model": config}


def write_transform(folder: Path, source: Source) -> None:
    """Write what was fitted, for `apply_rotations` of the module; nothing where it is not known."""
    if source.transform is not None:
        save_rotations(folder / FITTED, source.transform, _about(source, source.scheme))


def _about(source: Source, scheme: Scheme) -> dict[str, Any]:
    grids = grids_by_layer(scheme, source.opened.config.num_hidden_layers)
    return {**source.about, "grids": grids, "revision": source.opened.revision}
