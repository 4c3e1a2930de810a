"""How far a change reaches: a site and a layer of another kind, each tried in a copy of qrot.

Objectives, methods, ways to round weights and formats are in test_docs.py: one file each.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import models
import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"

# file: (lines as they are, lines that take their place), ...
SITE = {
    "sites.py": [
        (
            '    Site("gate_up", _hidden,',
            '    Site("silu", _intermediate, "activations"),\n    Site("gate_up", _hidden,',
        )
    ],
    "model/layer.py": [
        (
            '    x = jax.nn.silu(project("gate", x)) * project("up", x)\n',
            '    gate = sites.round_trip("silu", seen("silu", jax.nn.silu(project("gate", x))))\n'
            '    x = gate * project("up", x)\n',
        )
    ],
}
# Granite's: what a layer adds to the residual stream is multiplied by a constant.
LAYER = {
    "model/config.py": [
        (
            "    tie_word_embeddings: bool = False\n",
            "    tie_word_embeddings: bool = False\n    residual_multiplier: float = 1.0\n",
        )
    ],
    "model/layer.py": [
        (
            '    h = h + project("o",',
            '    h = h + config.residual_multiplier * project("o",',
        ),
        (
            '    return h + project("down", x)\n',
            '    return h + config.residual_multiplier * project("down", x)\n',
        ),
    ],
    "model/io/config_json.py": [
        (
            "        tie_word_embeddings=",
            '        residual_multiplier=take_number(left, "residual_multiplier", 1.0),\n'
            "        tie_word_embeddings=",
        ),
    ],
}
COMMON = """
import sys
import jax, jax.numpy as jnp, numpy as np
from qrot.calibrate.capture import capture
from qrot.grid import Grid
from qrot.learn.objectives import OBJECTIVES
from qrot.model.io.load import load
from qrot.network import fold, fuse, logits
from qrot.quantize.registry import WEIGHT_METHODS
from qrot.rotation.random import random_rotations
from qrot.rotation.transform import Transform
from qrot.scheme import Override, Scheme
from qrot.sites import SITES

rows = np.random.default_rng(0).integers(0, 90, (4, 12), np.int32)
tokens = jnp.asarray(rows[:2])
a4 = Grid(4, "asymmetric")
scheme = Scheme(Grid(4), a4, a4, a4)
network = fold(load(sys.argv[1]).network)
count = network.config.num_hidden_layers
transform = Transform(
    random_rotations(network.config, 0), clips={s: jnp.full(count, 0.9) for s in SITES}
)
fused = fuse(network, transform)

def apart(a, b):
    return float(jnp.abs(a - b).max() / jnp.abs(b).max())

assert apart(logits(fused, tokens), logits(network, tokens)) < 1e-5

def everything_works(network, fused):
    for name in ("cross_entropy", "layer_reconstruction"):
        record = OBJECTIVES[name]
        batch = tokens
        if record.batch == "hidden":
            from qrot.calibrate.capture import capture_hidden
            batch = jnp.asarray(capture_hidden(network, rows))
        gradient = jax.grad(record.loss)(transform, network.replace(scheme=scheme), batch)
        assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(gradient))
    for name in ("rtn", "gptq"):
        method = WEIGHT_METHODS[name]
        rounded = method.round(fused.replace(scheme=scheme), rows, method.settings())
        assert bool(jnp.isfinite(logits(rounded, tokens)).all())
"""
SITE_SCRIPT = """
others = Scheme(activations=a4, overrides=(Override("*.silu", activations=16),))
assert "silu" in SITES
with_site = logits(fused.replace(scheme=Scheme(activations=a4)), tokens)
without = logits(fused.replace(scheme=others), tokens)
assert apart(with_site, without) > 1e-3
acting = network.replace(online=transform, scheme=Scheme(activations=a4))
assert apart(logits(acting, tokens), with_site) < 1e-3
captured, _ = capture(network, rows, vectors=4, seed=0, gradients=True)
assert captured.inputs["silu"].shape == (count, 16, network.config.intermediate_size)
gradient = jax.grad(OBJECTIVES["fisher"].loss)(
    transform, network.replace(scheme=scheme), jax.tree.map(jnp.asarray, captured)
)
assert bool((gradient.clips["silu"] != 0).all())
everything_works(network, fused)
"""
LAYER_SCRIPT = """
layers = network.params.layers
scaled = {n: layers.linear(n).replace(weight=0.25 * layers.linear(n).weight) for n in ("o", "down")}
plain = network.params.replace(layers=layers.replace(**scaled))
import dataclasses
config = dataclasses.replace(network.config, residual_multiplier=1.0)
assert network.config.residual_multiplier == 0.25
same = network.replace(params=plain, config=config)
assert apart(logits(network, tokens), logits(same, tokens)) < 1e-5
everything_works(network, fused)
"""


def changed(folder: Path, edits) -> tuple[int, int]:
    """A copy of qrot with edits; (files, lines added or changed)."""
    shutil.copytree(ROOT / "qrot", folder / "qrot", ignore=shutil.ignore_patterns("__pycache__"))
    lines = 0
    for name, pairs in edits.items():
        file = folder / "qrot" / name
        text = file.read_text()
        for old, new in pairs:
            assert text.count(old) == 1, f"{name} has not these lines:\n{old}"
            text = text.replace(old, new)
            kept = set(old.splitlines())
            lines += max(1, sum(line not in kept for line in new.splitlines()))
        file.write_text(text)
    return len(edits), lines


@pytest.mark.parametrize(
    ("what", "edits", "script", "changes"),
    [
        ("a site", SITE, SITE_SCRIPT, {}),
        ("a layer of another kind", LAYER, LAYER_SCRIPT, {"residual_multiplier": 0.25}),
    ],
)
def test_a_change_reaches_no_further_than_the_page_says(tmp_path, what, edits, script, changes):
    files, lines = changed(tmp_path, edits)
    said = re.search(rf"^\| {what} \|.*\| (\d+) \| (\d+) \|$", PAGE.read_text(), re.MULTILINE)
    assert said
    assert (files, lines) == (int(said[1]), int(said[2]))
    models.write_folder(tmp_path / "model", "llama", **changes)
    (tmp_path / "try.py").write_text(COMMON + script)
    ran = subprocess.run(
        [sys.executable, str(tmp_path / "try.py"), str(tmp_path / "model")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
