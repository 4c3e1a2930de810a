"""A LoRA as the folder that PEFT writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file

# The modules of a decoder layer by the projections' names in qrot.
MODULES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
EMBED, HEAD = "model.embed_tokens", "lm_head"


class Update(NamedTuple):
    """W + a b, with W [in, out]; of an embedding W is [vocab, hidden]."""

    a: Any
    b: Any


def write_adapter(folder: Path, updates: Mapping[str, Update], alpha: float | None = None) -> None:
    """Write adapter_config.json and adapter_model.safetensors.

    Args:
        folder: to write to.
        updates: by module, such as `model.layers.0.self_attn.q_proj`; ranks may differ.
        alpha: `lora_alpha`; None for each module's own rank, so that its update counts as it is.
    """
    ranks = {module: update.a.shape[1] for module, update in updates.items()}
    rank = max(ranks.values())
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "smollm2",
        "r": rank,
        "lora_alpha": rank if alpha is None else alpha,
        "rank_pattern": {m: r for m, r in ranks.items() if r != rank},
        "alpha_pattern": {m: r for m, r in ranks.items() if r != rank and alpha is None},
        "target_modules": sorted({module.rpartition(".")[2] for module in updates}),
    }
    tensors = {}
    for module, (a, b) in updates.items():
        kind = "lora_embedding_" if module == EMBED else "lora_"
        end = "" if module == EMBED else ".weight"
        for part, x in (("A", a), ("B", b)):
            name = f"base_model.model.{module}.{kind}{part}{end}"
            tensors[name] = np.ascontiguousarray(np.asarray(x).T, np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def per_layer(stacked: Mapping[str, Update], layers: int) -> dict[str, Update]:
    """Updates of stacked projections [layers, ...] by module."""
    return {
        f"model.layers.{i}.{MODULES[name]}": Update(a[i], b[i])
        for name, (a, b) in stacked.items()
        for i in range(layers)
    }
