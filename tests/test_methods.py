"""Methods, in whole runs of a tiny model."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from runs import CALIBRATION, CHEAP, quiet

from qrot.errors import InputError
from qrot.grid import Grid
from qrot.learn.settings import Learn
from qrot.progress import Stages
from qrot.quantize.gptq import Gptq
from qrot.quantize.slicegpt import SliceGpt
from qrot.quantize.smoothquant import SmoothQuant
from qrot.rotation.store import load_rotations
from qrot.run import methods
from qrot.run.method import Method
from qrot.run.prepare import prepare
from qrot.run.run import run
from qrot.scheme import Scheme
from qrot.sites import INPUTS


def test_scales_without_rotations(config):
    methods = ("no_rotation", "smoothquant", "equalised")
    config = replace(config, methods=methods, calibration=CALIBRATION)
    plain, smooth, equal = run(config, quiet())["rows"]
    assert len({row["nll"] for row in (plain, smooth, equal)}) == 3
    assert smooth["alpha"] == 0.5
    assert [row["seed"] for row in (smooth, equal)] == [None, None]
    for row in (smooth, equal):  # the file holds what was judged
        file = Path(config.out) / f"{row['method']}.safetensors"
        transform, metadata = load_rotations(file)
        assert transform.rotations == {}
        assert metadata["scheme"]["weights"]["clip"] == "mse"
        saved = {"methods": ("saved",), "saved": str(file), "out": f"{config.out}-{row['method']}"}
        (same,) = run(replace(config, **saved), quiet())["rows"]
        assert same["nll"] == row["nll"]


def test_scales_do_not_change_what_is_not_rounded(config):
    search = SmoothQuant("search")
    methods = ("full_precision", "smoothquant", "equalised")
    config = replace(config, scheme=Scheme(), methods=methods, smoothquant=search)
    full, smooth, equal = run(replace(config, calibration=CALIBRATION), quiet())["rows"]
    assert smooth["alpha"] == 0.5
    for row in (smooth, equal):
        assert row["nll"] == pytest.approx(full["nll"], rel=1e-5)


def test_principal_directions_and_a_smaller_network(config):
    scheme = Scheme(Grid(4, clip="mse"))
    config = replace(config, methods=("full_precision", "slicegpt"), calibration=CALIBRATION)
    full, same = run(replace(config, scheme=Scheme()), quiet())["rows"]
    assert same["hidden_kept"] == 48
    assert same["nll"] == pytest.approx(full["nll"], rel=1e-5)
    config = replace(config, out=config.out + "-cut", slicegpt=SliceGpt(0.3), scheme=scheme)
    _, cut = run(replace(config, weights=Gptq()), quiet())["rows"]
    assert cut["hidden_kept"] == 32
    assert cut["nll"] != same["nll"]


def test_outlier_channels_in_a_run(config):
    config = replace(config, methods=CHEAP)
    found = {}
    for threshold in (0.0, 1e-6):
        scheme = Scheme(activations=Grid(3, threshold=threshold))
        out = f"{config.out}-{threshold}"
        found[threshold] = run(replace(config, scheme=scheme, out=out), quiet())["rows"]
    full, plain = (row["nll"] for row in found[0.0])
    assert found[1e-6][1]["nll"] == pytest.approx(full, rel=1e-6)  # every channel is an outlier
    assert plain != pytest.approx(full, rel=1e-4)


def test_a_hadamard_rotation_with_the_shifts_that_learning_starts_with(config, tmp_path):
    """Learned rows begin with them: a learning rate of next to nothing leaves them as they are."""
    learn = Learn(objective="cross_entropy", start="hadamard", steps=1, length=16, held_out=2)
    config = replace(config, methods=("random_hadamard_shift", "learned"), seeds=(0,), learn=learn)
    with Stages(quiet()) as stages:
        inputs = prepare(config, tmp_path, stages)
        shifted = methods.METHODS["random_hadamard_shift"].prepare(inputs, "x", 0).transform
        learned = methods.METHODS["learned"].prepare(inputs, "y", 0).transform
    assert set(shifted.shifts) == set(INPUTS)
    for site in INPUTS:
        np.testing.assert_array_equal(shifted.shifts[site], learned.shifts[site])


REVERSED = '''
import jax.numpy as jnp
import numpy as np

from qrot.rotation.forms import Dense
from qrot.rotation.transform import Transform
from qrot.run.method import Method, Prepared


def prepare(inputs, name, seed):
    """R1 turns the order of the channels around, with signs."""
    draw = np.random.default_rng(seed)
    signs = draw.choice([-1.0, 1.0], inputs.network.config.hidden_size)
    matrix = jnp.asarray(np.diag(signs)[::-1].copy(), jnp.float32)
    return Prepared(Transform({"residual": Dense(matrix)}), {"turned": True})


RECORD = Method("reversed", prepare, seeds="seeds")
'''


def test_a_new_method_is_one_file(config, tmp_path, monkeypatch):
    """The name of the method stands in its file alone."""
    package = tmp_path / "more"
    package.mkdir()
    (package / "reversed.py").write_text(REVERSED)
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(package)])
    record = methods.collect(methods.__name__, Method)["reversed"]
    monkeypatch.setitem(methods.METHODS, record.name, record)
    config = replace(config, methods=("full_precision", "reversed"), keep="all")
    full, first, second = run(config, quiet())["rows"]
    assert (first["seed"], second["seed"]) == (0, 1)
    assert first["turned"]
    assert first["nll"] != full["nll"]
    files = {file.name for file in (Path(config.out) / "networks").iterdir()}
    assert files == {"reversed-seed-0.safetensors", "reversed-seed-1.safetensors"}
    plain = replace(config, out=config.out + "-plain", scheme=Scheme())
    full, first, _ = run(plain, quiet())["rows"]
    assert first["nll"] == pytest.approx(full["nll"], rel=1e-5)
    with pytest.raises(InputError, match="there is no 'reversd'; did you mean 'reversed'"):
        run(replace(config, methods=("reversd",)), quiet())
