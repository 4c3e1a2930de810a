"""The pages in docs/ say what is so: commands, settings, and code that a reader is to copy."""

import ast
import importlib.util
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import MISSING, fields, is_dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typer.main
import yaml
from runs import CALIBRATION

import qrot
from qrot.cli import app
from qrot.grid import Grid
from qrot.hadamard.factors import hadamard_factors
from qrot.network import fold
from qrot.quantize.keep import load_network
from qrot.quantize.registry import WEIGHT_METHODS
from qrot.quantize.rtn import weight_scale_and_zero
from qrot.rotation.random import RotationSites, random_rotations
from qrot.rotation.transform import Transform
from qrot.run.config import RunConfig, WeightSettings, to_yaml
from qrot.run.read import find_config, read_config
from qrot.study.sweep import read_sweep

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
LARGE = {  # hidden_size, intermediate_size, head_dim of their config.json
    "llama2_7b": (4096, 11008, 128),
    "llama3_8b": (4096, 14336, 128),
    "llama3.2_1b": (2048, 8192, 64),
    "mistral_7b": (4096, 14336, 128),
    "qwen2.5_7b": (3584, 18944, 128),
    "qwen3_8b": (4096, 12288, 128),
}


def blocks(page: Path) -> list[tuple[str, str]]:
    """(what stands behind the fence, the lines) of each block of code."""
    return re.findall(r"^```([^\n]*)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def commands() -> list[tuple[str, list[str]]]:
    """(page, words after qrot) of every qrot command on the pages."""
    found = []
    for page in PAGES:
        for kind, text in blocks(page):
            for line in text.replace("\\\n", " ").splitlines() if not kind else []:
                words = shlex.split(line, comments=True)
                words = words[1:] if words and "=" in words[0] else words
                if words[:1] == ["qrot"]:
                    found.append((page.name, words[1:]))
    return found


@pytest.mark.parametrize(("page", "words"), commands(), ids=lambda x: str(x)[:60])
def test_commands_are_there_and_their_settings_are_read(page, words, monkeypatch):
    monkeypatch.chdir(ROOT)
    command = typer.main.get_command(app)
    while hasattr(command, "commands"):
        command, words = command.commands[words[0]], words[1:]  # pyright: ignore
    given = command.make_context("qrot", list(words)).params  # refuses what it does not know
    if {"overrides", "config"} <= given.keys() and given["config"] != "CONFIG":
        overrides = [plain(word) for word in given["overrides"] or []]
        read_sweep(find_config(given["config"]), overrides, given["sweep"] or [])


def plain(override: str) -> str:
    """With what own-method.md adds, which `test_methods_of_the_page_run` runs, by known names."""
    known = {"tail": "kl", "random_householder": "random_orthogonal", "stochastic": "quip"}
    return re.sub("|".join(known), lambda name: known[name[0]], override)


def test_commands_are_found():
    pages = {page for page, _ in commands()}
    assert {"tutorial.md", "own-method.md", "accelerators.md", "export.md", "gptq.md"} <= pages


# settings.md


@pytest.fixture(scope="module")
def hook():
    spec = importlib.util.spec_from_file_location("settings", DOCS / "hooks" / "settings.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def defaults(kind, path="", seen=None):
    """(key, default) of every key of a section and of those below it, out of the real classes."""
    seen = set() if seen is None else seen
    if kind in seen:
        return
    seen.add(kind)
    below = []
    for field in fields(kind):
        key, hint = f"{path}{field.name}", get_type_hints(kind, include_extras=True)[field.name]
        default = None if field.default_factory is not MISSING else field.default
        yield key, "needed" if default is MISSING else default
        if hint == WeightSettings:
            below += [(method.settings, f"{key}.") for method in WEIGHT_METHODS.values()]
        below += [(k, f"{key}.") for k in within(hint) if is_dataclass(k)]
    for hint, prefix in below:
        yield from defaults(hint, prefix, seen)


def within(hint):
    """A type, and those that it is made of."""
    yield hint
    for inner in get_args(hint):
        yield from within(inner)


def test_the_settings_page_has_every_key_with_its_default(hook):
    text = "\n".join(hook.sections(hook.read(Path(qrot.__file__).parent), "RunConfig"))
    found = re.findall(r"^\| `([\w.]+)` \|.*\| ([^|]*) \|$", text, re.MULTILINE)
    # Sections of weights have keys of one name, the last of which counts on either side.
    own = {"weights.method", "weights.seed", "weights.damping", "weights.steps"}
    rows = {key: default for key, default in found if key not in own}
    assert own <= {key for key, _ in found}
    expected = {key: default for key, default in defaults(RunConfig) if key not in own}
    assert rows.keys() == expected.keys()
    assert len(rows) > 90
    for key, default in expected.items():
        if rows[key] == "as there":
            assert default is None or default == Grid(granularity=default.granularity)
        elif rows[key] == "needed":
            assert default == "needed"
        else:
            shown = yaml.safe_load(rows[key].strip("`"))
            shown = float(shown) if isinstance(default, float) else shown
            assert shown == (list(default) if isinstance(default, tuple) else default), key
    assert RunConfig().methods[0] in rows["methods"]
    assert "- `damping`: what is added" in text
    assert "## weights: {method: gptq}" in text
    assert "runs/&lt;name of the config file>" in text


def test_the_settings_page_is_made_of_it(hook):
    config = SimpleNamespace(config_file_path=str(ROOT / "mkdocs.yml"))
    page = (DOCS / "settings.md").read_text()
    made = hook.on_page_markdown(page, config)
    assert hook.MARK in page
    assert "`learn.objective` | `cross_entropy`, `fisher`, `kl`, `kl_top`," in made
    assert hook.on_page_markdown("# another", config) == "# another"


def test_docstrings_become_lists(hook):
    text = "What.\n\nAttributes:\n    keys: of the\n        cache <x>.\n    first: one."
    made = "What.\n\n- `keys`: of the\n    cache &lt;x>.\n- `first`: one."
    assert hook.itemised(text) == made


# own-method.md


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A copy of qrot with what the page says in it."""
    folder = tmp_path_factory.mktemp("own")
    shutil.copytree(ROOT / "qrot", folder / "qrot", ignore=shutil.ignore_patterns("__pycache__"))
    for kind, text in blocks(DOCS / "own-method.md"):
        if named := re.fullmatch(r'python title="(.*)"', kind):
            assert not (folder / named[1]).exists()
            (folder / named[1]).write_text(text)
    return folder


def loaded(own: Path, file: str):
    """A module of the copy on its own; what it imports is the real qrot."""
    spec = importlib.util.spec_from_file_location(f"own_{Path(file).stem}", own / "qrot" / file)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for their annotations
    spec.loader.exec_module(module)
    return module


def test_methods_of_the_page_run(own, config):
    config = replace(
        config,
        methods=("full_precision", "learned"),
        seeds=(0,),
        calibration=CALIBRATION,
        learn=replace(config.learn, steps=2),
    )
    settings = yaml.safe_load(to_yaml(config))
    settings["methods"].insert(1, "random_householder")
    settings["learn"]["objective"] = "tail"
    settings["weights"] = {"method": "stochastic", "seed": 1}
    (own / "own.yaml").write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "qrot.cli", "run", str(own / "own.yaml")]
    environment = {
        **os.environ,
        "PYTHONPATH": str(own),
        "PYTHONWARNINGS": "error",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # a tiny model takes longer to compile than to run
    }
    ran = subprocess.run(command, cwd=own, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    rows = json.loads((Path(config.out) / "results.json").read_text())["rows"]
    full, reflected, learned = rows
    assert (reflected["method"], reflected["seed"]) == ("random_householder", 0)
    assert reflected["reflections"] == 8
    assert reflected["weight_method"] == learned["weight_method"] == "stochastic"
    assert learned["objective"] == "tail"
    for row in (reflected, learned):
        assert math.isfinite(row["nll"])
        assert row["nll"] != full["nll"]
    export = [*command[:3], "export", config.out, "--format", "npz", "--out", str(own / "values")]
    ran = subprocess.run(export, cwd=own, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    network, about = load_network(Path(config.out) / "network.safetensors")
    assert about["weights"] == {"method": "stochastic", "seed": 1}
    written = np.load(own / "values" / "weights.npz")["2.down"]
    np.testing.assert_array_equal(written, network.params.layers.down.weight[2])


def test_the_objective_is_the_loss_of_the_worst_tenth(own, variant):
    network = fold(variant("llama").network)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 97, (2, 21)), jnp.int32)
    transform = Transform(random_rotations(network.config, 0, sites=RotationSites(down=False)))
    module = loaded(own, "learn/objectives/tail.py")
    log_p = jax.nn.log_softmax(module.quantised_logits(transform, network, tokens))[:, :-1]
    nll = -np.take_along_axis(np.asarray(log_p), np.asarray(tokens)[:, 1:, None], axis=-1)
    expected = np.sort(nll.ravel())[-4:].mean()  # of 40
    assert float(module.tail(transform, network, tokens)) == pytest.approx(expected, rel=1e-5)


def test_the_reflections_are_a_rotation(own, variant, config):
    inputs = SimpleNamespace(network=variant("llama").network, config=config)
    module = loaded(own, "run/methods/householder.py")
    first, again, other = (
        module.random_householder(inputs, "", seed).transform.rotations["residual"].dense()
        for seed in (0, 0, 1)
    )
    np.testing.assert_allclose(first @ first.T, np.eye(48), atol=1e-6)
    assert np.linalg.matrix_rank(first - np.eye(48), tol=1e-3) == 8
    assert (first == again).all()
    assert (first != other).any()


@pytest.mark.parametrize("kind", ["symmetric", "asymmetric"])
def test_stochastic_rounding_is_right_on_average(own, variant, kind):
    params = variant("llama").network.params
    module = loaded(own, "quantize/stochastic.py")
    weight, grid = params.layers.up.weight[1], Grid(4, kind)
    scale, _ = weight_scale_and_zero(weight, grid)
    keys = jax.random.split(jax.random.key(0), 40)
    draws = [module._round(weight, grid, key)[0] for key in keys]
    steps = np.asarray(jnp.stack(draws) / scale)
    np.testing.assert_allclose(steps, np.round(steps), atol=1e-4)
    off = steps - np.asarray(weight / scale)
    assert np.abs(off).max() < 1 + 1e-4
    assert abs(off.mean()) < 0.01  # of a step; rounding down would be half of one off


# configs


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_configs_are_read_and_say_how_to_run_them(file):
    config = read_config(file)
    assert config.out == f"runs/{file.stem}"
    assert f"qrot run configs/{file.name}" in file.read_text()


@pytest.mark.parametrize("name", LARGE)
def test_large_models_have_hadamard_matrices_and_the_published_protocol(name):
    for size in LARGE[name]:
        assert math.prod(hadamard_factors(size)) == size
    config = read_config(ROOT / "configs" / f"{name}.yaml")
    assert config.scheme.name == "W4A4KV4"
    assert (config.evaluate.length, config.evaluate.count, config.evaluate.bos) == (2048, None, 0)
    assert (config.data.source, config.data.join) == ("wikitext2", "rows")
    assert (config.weight_method.name, config.trained_weight_bits) == ("gptq", 16)
    head = (ROOT / "configs" / f"{name}.yaml").read_text().split("\nmodel: ")[0]
    assert "NOT RUN HERE" in head
    assert "Cost, estimated: " in head
    assert "Published" in head


def test_the_code_in_the_pages_is_python():
    for page in PAGES:
        for kind, text in blocks(page):
            if kind.startswith("python"):
                ast.parse(text)
