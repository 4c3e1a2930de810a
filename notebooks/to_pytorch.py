# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # From rotation to a PyTorch model
#
# Rotations of a run (here of `learn_a_rotation`), written for PyTorch and opened there.

# %%
import shutil
from pathlib import Path

import numpy as np
import torch
import transformers
from rich.console import Console

from qrot.export.export import export
from qrot.export.format import Options
from qrot.export.runtime.qrot_torch import load as load_in_torch
from qrot.export.source import open_source
from qrot.export.verify import logits_in_qrot, logits_in_torch
from qrot.model.io.load import load
from qrot.network import fold, fuse
from qrot.progress import Stages

transformers.logging.set_verbosity_error()
source = open_source(Path("runs/notebook"))
transform = source.transform
assert transform is not None  # what rotations.safetensors has
print(sorted(transform.rotations), source.scheme.name, source.about["objective"])

# %% [markdown]
# ## The whole network
#
# `torch` is the format for all that was learned: weights with the rotations in them, and a module
# of one file that rounds activations, keys and values by hooks, as qrot does.

# %%
out = Path("runs/notebook_torch")
shutil.rmtree(out, ignore_errors=True)
with Stages(Console()) as stages:
    export(source, out, "torch", Options(), stages)
print(*sorted(path.name for path in out.iterdir()), sep="\n")

# %%
quantised = load_in_torch(str(out))
original = load("smollm2")
prompt = "Rotations make language models easy to"
ids = torch.tensor([original.tokenizer.encode(prompt).ids])
written = quantised.generate(
    ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False, pad_token_id=0
)
print(original.tokenizer.decode(written[0].tolist()))

# %% [markdown]
# ## Proof
#
# `--verify` on the command line, `check=True` here, runs both networks on 16 windows of text, in
# float64 where the last bit would decide between two levels, and does not keep an export that
# computes something else. Here is the same by hand on one window: qrot's logits against PyTorch's.

# %%
rows = np.asarray(ids, np.int32)
network = fuse(fold(original.network), transform).replace(scheme=source.scheme)
ours = logits_in_qrot(network, dtype="float64")(rows)
theirs = logits_in_torch(quantised, network.config, dtype="float64")(rows)
print(
    f"largest difference {np.abs(ours - theirs).max():.1e}, largest logit {np.abs(ours).max():.1f}"
)
