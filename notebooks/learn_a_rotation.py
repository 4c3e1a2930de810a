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
# # Learn a rotation in five minutes
#
# A random rotation helps; a learned one helps more. `fisher` is the objective that needs no label
# and never runs the quantised network: it captures, once, what each site reads and how much the
# loss would rise with a change there, and makes what rounding will cost small.

# %%
import json
from pathlib import Path

import matplotlib.pyplot as plt
from rich.console import Console

from qrot.evaluate.perplexity import Windows
from qrot.grid import Grid
from qrot.learn.settings import Learn
from qrot.report.results import table, title
from qrot.report.run import write_report
from qrot.run.config import RunConfig
from qrot.run.run import run
from qrot.scheme import Scheme

# %% [markdown]
# A run is a configuration; the same could stand in a YAML file and be given to `qrot run`. Here
# activations, keys and values have 4 bits, weights are left alone, and the text is the reference
# manual that ships with Python.

# %%
a4 = Grid(bits=4, kind="asymmetric")
config = RunConfig(
    model="smollm2",
    out="runs/notebook",
    scheme=Scheme(activations=a4, keys=a4, values=a4),
    methods=("full_precision", "random_hadamard", "random_hadamard_shift", "learned"),
    seeds=(0,),
    learn=Learn(
        objective="fisher", start="balanced", steps=60, batch=64, held_out=2,
        evaluate_every=10, checkpoint_every=60,
    ),
    evaluate=Windows(length=512, count=4),
)  # fmt: skip
results = run(config, Console())

# %%
console = Console(width=90)
console.print(title(results), table(results), sep="\n", highlight=False)

# %% [markdown]
# "Gap closed" is the share of the random rotation's loss that is gone. Four windows and one seed
# say little more than that it works: `experiments/` has the tables to believe.

# %%
lines = Path("runs/notebook/metrics.jsonl").read_text().splitlines()
history = [json.loads(line) for line in lines]
held_out = [(step["step"], step["held_out"]) for step in history if "held_out" in step]
figure, axis = plt.subplots(figsize=(6, 3), layout="constrained")
axis.plot(*zip(*held_out, strict=True), "o-")
axis.set(xlabel="step", ylabel="nats that rounding will cost", title="On held-out windows", ylim=0)

# %%
write_report(Path(config.out))  # as `qrot run` does at its end

# %% [markdown]
# Everything is in `runs/notebook`: the rotations, the settings, the numbers, and `report.html`.
# The next notebook takes them to PyTorch.
