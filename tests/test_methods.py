"""Methods, and ways to round weights, in whole runs of a tiny model."""

import io
import re
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console
from runs import CALIBRATION, CHEAP, quiet

from qrot.errors import InputError
from qrot.run import judge, weights
from qrot.run import qat as row_module
from qrot.run.combinations import refuse_combination, warn_of_combination
from qrot.run.mixed import bits_maps
from qrot.run.prepare import prepare
from qrot.run.results import markdown
from qrot.run.run import run
from qrot.progress import Stages
from qrot.grid import Grid
from qrot.quantize.qat import Qat
from qrot.quantize.awq import Awq
from qrot.quantize.mixed import Mixed
from qrot.quantize.slicegpt import SliceGpt
from qrot.quantize.smoothquant import SmoothQuant
from qrot.rotation.forms import Learned, Rotations, Shifts
from qrot.rotation.store import load_rotations
from qrot.scheme import Scheme, layer_scheme

QAT = Qat(steps=2, batch=2, length=8, learning_rate=1e-3)


def test_gptq_rounds_the_weights_of_every_row(config):
    methods = ("full_precision", "no_rotation", "random_hadamard")
    config = replace(config, methods=methods, seeds=(0,))
    plain = run(replace(config, out=config.out + "-plain"), quiet())["rows"]
    shown = io.StringIO()
    found = run(replace(config, weight_method="gptq", calibration=CALIBRATION), Console(file=shown))
    assert "random hadamard, seed 0: GPTQ" in shown.getvalue()
    full, *rows = found["rows"]
    assert full["nll"] == plain[0]["nll"]
    assert "weight_method" not in full
    for row, other in zip(rows, plain[1:], strict=True):
        assert row["weight_method"] == "gptq"
        assert 0 < row["weight_seconds"] < row["seconds"]
        assert row["nll"] != other["nll"]
        assert "weight_method" not in other
    text = markdown(found)
    assert "at W4A4KV4 (gptq weights) on" in text
    assert "Weights were rounded by gptq, " in text


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_mixed_bits_in_every_row(config, monkeypatch, method):
    schemes, judged = [], []

    def judged_logits(*arguments, scheme, **options):
        judged.append(scheme)
        return logits(*arguments, scheme=scheme, **options)

    def rounding(inputs, name, fused, scheme):
        schemes.append(scheme)
        return original(inputs, name, fused, scheme)

    logits, original = judge.judged_logits, weights.WEIGHT_METHODS[method]
    monkeypatch.setattr(judge, "judged_logits", judged_logits)
    monkeypatch.setitem(weights.WEIGHT_METHODS, method, rounding)
    mixed = Mixed(3.5, (2, 3, 4, 8), windows=3)
    config = replace(
        config,
        methods=("full_precision", "random_hadamard"),
        seeds=(0,),
        weight_method=method,
        calibration=CALIBRATION,
        mixed=mixed,
    )
    found = run(config, quiet())
    full, row = found["rows"]
    assert "mixed" not in full
    (scheme,), (drawn,), facts = schemes, bits_maps(found), row["mixed"]
    bits = {name: [int(b) for b in text.split()] for name, text in facts["bits"].items()}
    for i in range(3):
        grids = dict(layer_scheme(scheme, i).weights)
        assert {name: grid.bits for name, grid in grids.items()} == {
            name: column[i] for name, column in bits.items()
        }
    sizes = {"q": 48, "k": 24, "v": 24, "o": 48, "gate": 56, "up": 56, "down": 56}
    spent = sum(sizes[name] * sum(column) for name, column in bits.items()) / (312 * 3)
    assert facts["bits_per_weight"] == pytest.approx(spent)
    assert 3.4 < spent <= 3.5
    assert facts["with_scales"] > spent
    assert {b for column in bits.values() for b in column} <= set(mixed.choices)
    assert row["weights"] == 3.5
    shown = io.StringIO()
    Console(file=shown, width=200).print(drawn)
    assert all(facts["bits"][name].replace(" ", "") in shown.getvalue() for name in sizes)
    assert set(judged) == {Scheme(), config.scheme}  # one scan through all layers
    text = markdown(found)
    assert "at W3.5A4KV4" in text
    assert f"Weights have bits by projection and layer, {spent:.3f} on average" in text


def test_mixed_bits_that_leave_no_choice_are_one_number(config):
    config = replace(config, methods=("no_rotation",))
    (plain,) = run(config, quiet())["rows"]
    mixed = Mixed(4.0, (4,), windows=2)
    mixed = replace(config, out=config.out + "-mixed", mixed=mixed, calibration=CALIBRATION)
    (row,) = run(mixed, quiet())["rows"]
    assert row["nll"] == plain["nll"]


def test_rotations_for_gptq_are_learned_without_rounding_weights(config):
    config = replace(config, methods=("learned",), weight_method="gptq", calibration=CALIBRATION)
    (row,) = run(config, quiet())["rows"]
    assert row["trained_weight_bits"] == 16
    saved = {"methods": ("saved",), "saved": str(Path(config.out) / row["rotations"])}
    (same,) = run(replace(config, out=config.out + "-saved", **saved), quiet())["rows"]
    assert same["nll"] == row["nll"]


def test_rotations_learned_for_rounded_weights_do_not_suit_gptq(config):
    learn = replace(config.learn, weight_bits=4)
    config = replace(
        config, methods=("learned",), learn=learn, weight_method="gptq", calibration=CALIBRATION
    )
    sentence = "learned with weights at 4 bits and is used with weights that gptq rounds"
    with pytest.warns(UserWarning, match=sentence):
        (row,) = run(config, quiet())["rows"]
    saved = {"methods": ("saved",), "saved": str(Path(config.out) / row["rotations"])}
    with pytest.warns(UserWarning, match=sentence):
        run(replace(config, out=config.out + "-saved", **saved), quiet())


def test_scales_without_rotations(config):
    methods = ("no_rotation", "smoothquant", "equalised")
    config = replace(config, methods=methods, calibration=CALIBRATION)
    plain, smooth, equal = run(config, quiet())["rows"]
    assert len({row["nll"] for row in (plain, smooth, equal)}) == 3
    assert smooth["alpha"] == 0.5
    assert [row["seed"] for row in (smooth, equal)] == [None, None]
    for row in (smooth, equal):  # the file holds what was judged
        file = Path(config.out) / f"{row['method']}.safetensors"
        learned, metadata = load_rotations(file)
        assert learned.rotations == Rotations()
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


def test_awq_rounds_the_weights_of_every_row(config):
    config = replace(config, scheme=Scheme(Grid(3)), methods=CHEAP, calibration=CALIBRATION)
    full, plain = run(replace(config, out=config.out + "-plain"), quiet())["rows"]
    shown = io.StringIO()
    same, row = run(replace(config, weight_method="awq"), Console(file=shown))["rows"]
    assert "no rotation: AWQ" in shown.getvalue()
    assert same["nll"] == full["nll"]
    assert row["weight_method"] == "awq"
    assert row["nll"] < plain["nll"]


def test_awq_warns_of_rotations_and_refuses_shifts(config):
    config = replace(config, weight_method="awq", calibration=CALIBRATION, seeds=(0,))
    sentence = "weight_method: awq .* random_hadamard makes all channels alike"
    quick = {"scheme": Scheme(Grid(3)), "awq": Awq(clip=False, steps=2)}
    with pytest.warns(UserWarning, match=sentence):
        (row,) = run(replace(config, methods=("random_hadamard",), **quick), quiet())["rows"]
    assert row["weight_method"] == "awq"
    shifted = replace(config, methods=("random_hadamard_shift",), out=config.out + "-shifted")
    with pytest.raises(InputError, match="awq scales the activations that the shifts of random_ha"):
        run(shifted, quiet())
    assert not Path(shifted.out).exists()
    w16 = replace(config, scheme=Scheme(), methods=("random_hadamard",))
    warn_of_combination(w16, None)  # no weight is rounded: nothing to warn of
    saved = replace(config, methods=("saved",), saved="x")
    warn_of_combination(saved, Learned(Rotations()))  # scales alone
    with pytest.warns(UserWarning, match="saved makes all channels alike"):
        warn_of_combination(saved, Learned(Rotations(down=jnp.eye(4))))
    with pytest.raises(InputError, match="the shifts of saved"):
        refuse_combination(saved, Learned(Rotations(), Shifts()))
    mixed = replace(config, methods=("no_rotation",), weight_method="quip_sharp", mixed=Mixed())
    with pytest.raises(InputError, match="codebooks of 2, 3, 4 bits, none of 6"):
        refuse_combination(mixed, None)
    refuse_combination(replace(mixed, mixed=Mixed(choices=(2, 3, 4))), None)


def test_principal_directions_and_a_smaller_network(config):
    scheme = Scheme(Grid(4, clip="mse"))
    config = replace(config, methods=("full_precision", "slicegpt"), calibration=CALIBRATION)
    full, same = run(replace(config, scheme=Scheme()), quiet())["rows"]
    assert same["hidden_kept"] == 48
    assert same["nll"] == pytest.approx(full["nll"], rel=1e-5)
    config = replace(config, out=config.out + "-cut", slicegpt=SliceGpt(0.3), scheme=scheme)
    _, cut = run(replace(config, weight_method="gptq"), quiet())["rows"]
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


def test_qat_trains_the_weights_of_every_row_on_one_text(config, monkeypatch):
    config = replace(config, methods=("no_rotation", "random_hadamard_shift"), seeds=(0,), qat=QAT)
    (plain,) = run(replace(config, out=config.out + "-rtn", methods=("no_rotation",)), quiet())[
        "rows"
    ]
    config, shown = replace(config, weight_method="qat"), io.StringIO()
    original, beside = row_module.qat, []

    def watched(params, *rest, **options):
        beside.append(options["shifts"])
        if len(beside) == 1:
            raise KeyboardInterrupt
        # The second row costs another compilation, and what it is given says all.
        return original(params, *rest, **options) if len(beside) == 2 else params

    monkeypatch.setattr(row_module, "qat", watched)
    with pytest.raises(KeyboardInterrupt):
        run(config, Console(file=shown))
    (text,) = Path(config.out).glob("qat-text-*.npy")
    assert np.load(text).shape == (4, 8)
    found = run(config, Console(file=shown))
    assert shown.getvalue().count("writing text to train on") == 1
    assert re.search(r"no rotation: training: .* loss ", shown.getvalue())
    assert [x is None for x in beside] == [True, True, False]
    assert "at W4A4KV4 (qat weights) on" in markdown(found)
    row, turned = found["rows"]
    assert row["weight_method"] == turned["weight_method"] == "qat"
    assert row["nll"] != plain["nll"]
    monkeypatch.setattr(row_module, "qat", original)
    again = replace(config, out=config.out + "-again", methods=("no_rotation",))
    assert [same["nll"] for same in run(again, quiet())["rows"]] == [row["nll"]]


def test_qat_keeps_the_text_of_each_setting(config, tmp_path, monkeypatch):
    written = []

    def generate_text(params, model, *, count, length, seed, advance):
        written.append((count, length, seed))
        return np.full((count, length), seed, np.int32)

    monkeypatch.setattr(row_module, "generate_text", generate_text)
    config = replace(config, methods=("no_rotation",))
    with Stages(quiet()) as stages:
        inputs = prepare(config, tmp_path, stages)

    def text(qat=QAT, dtype="float32", digest="x"):
        model = inputs.model.replace(digest=digest)
        settings = replace(config, qat=qat, dtype=dtype)
        return row_module.own_text(replace(inputs, config=settings, model=model))

    for _ in range(2):
        np.testing.assert_array_equal(text(), np.zeros((4, 8)))
    text(replace(QAT, learning_rate=1.0))
    assert written == [(4, 8, 0)]
    text(replace(QAT, seed=1))
    text(replace(QAT, length=9))
    text(replace(QAT, steps=3))
    assert written[1:] == [(4, 8, 1), (4, 9, 0), (6, 8, 0)]
    text(dtype="bfloat16")
    text(digest="y")
    assert len(written) == 6
    assert len(list(tmp_path.iterdir())) == 6
    for file in tmp_path.iterdir():
        file.write_bytes(b"half")
    with pytest.raises(InputError, match=r"npy: damaged \(.*delete it"):
        text()
