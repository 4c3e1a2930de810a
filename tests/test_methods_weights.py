"""Ways to round weights, in whole runs of a tiny model."""

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
from qrot.grid import Grid
from qrot.progress import Stages
from qrot.quantize.awq import Awq
from qrot.quantize.gptq import Gptq
from qrot.quantize.mixed import Mixed
from qrot.quantize.qat import Qat
from qrot.quantize.quip import Quip
from qrot.quantize.quip_sharp import QuipSharp
from qrot.quantize.registry import WEIGHT_METHODS
from qrot.quantize.rtn import Rtn
from qrot.report.bits import bits_maps
from qrot.report.results import markdown
from qrot.rotation.forms import Dense
from qrot.rotation.transform import Transform
from qrot.run import judge, own_text
from qrot.run.combinations import check_combinations
from qrot.run.prepare import prepare
from qrot.run.run import run
from qrot.scheme import Override, Scheme, layer_scheme
from qrot.sites import INPUTS

QAT = Qat(steps=2, batch=2, length=8, learning_rate=1e-3)


def test_gptq_rounds_the_weights_of_every_row(config):
    methods = ("full_precision", "no_rotation", "random_hadamard")
    config = replace(config, methods=methods, seeds=(0,))
    plain = run(replace(config, out=config.out + "-plain"), quiet())["rows"]
    shown = io.StringIO()
    found = run(replace(config, weights=Gptq(), calibration=CALIBRATION), Console(file=shown))
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


@pytest.fixture
def watched(monkeypatch):
    """(method) -> the networks that it is given to round, as they come."""

    def watch(method):
        given, record = [], WEIGHT_METHODS[method]

        def rounding(network, *rest, **options):
            given.append(network)
            return record.round(network, *rest, **options)

        monkeypatch.setitem(WEIGHT_METHODS, method, record._replace(round=rounding))
        return given

    return watch


@pytest.mark.parametrize("settings", [Rtn(), Gptq()], ids=lambda settings: settings.method)
def test_mixed_bits_in_every_row(config, monkeypatch, watched, settings):
    judged, logits = [], judge.judged_logits

    def judged_logits(network, *rest, **options):
        judged.append(network.scheme)
        return logits(network, *rest, **options)

    monkeypatch.setattr(judge, "judged_logits", judged_logits)
    networks = watched(settings.method)
    mixed = Mixed(3.5, (2, 3, 4, 8), windows=3)
    config = replace(
        config,
        methods=("full_precision", "random_hadamard"),
        seeds=(0,),
        weights=settings,
        calibration=CALIBRATION,
        mixed=mixed,
    )
    found = run(config, quiet())
    full, row = found["rows"]
    assert "mixed" not in full
    (network,), (drawn,), facts = networks, bits_maps(found), row["mixed"]
    bits = {name: [int(b) for b in text.split()] for name, text in facts["bits"].items()}
    for i in range(3):
        grids = layer_scheme(network.scheme, i).weights
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
    config = replace(config, methods=("learned",), weights=Gptq(), calibration=CALIBRATION)
    (row,) = run(config, quiet())["rows"]
    assert row["trained_weight_bits"] == 16
    saved = {"methods": ("saved",), "saved": str(Path(config.out) / row["rotations"])}
    (same,) = run(replace(config, out=config.out + "-saved", **saved), quiet())["rows"]
    assert same["nll"] == row["nll"]


def test_rotations_learned_for_rounded_weights_do_not_suit_gptq(config):
    learn = replace(config.learn, weight_bits=4)
    config = replace(
        config, methods=("learned",), learn=learn, weights=Gptq(), calibration=CALIBRATION
    )
    sentence = "learned with weights at 4 bits and is used with weights at 16 bits, or by a method"
    with pytest.warns(UserWarning, match=sentence):
        (row,) = run(config, quiet())["rows"]
    saved = {"methods": ("saved",), "saved": str(Path(config.out) / row["rotations"])}
    with pytest.warns(UserWarning, match=sentence):
        run(replace(config, out=config.out + "-saved", **saved), quiet())


def test_awq_rounds_the_weights_of_every_row(config):
    config = replace(config, scheme=Scheme(Grid(3)), methods=CHEAP, calibration=CALIBRATION)
    full, plain = run(replace(config, out=config.out + "-plain"), quiet())["rows"]
    shown = io.StringIO()
    same, row = run(replace(config, weights=Awq()), Console(file=shown))["rows"]
    assert "no rotation: AWQ" in shown.getvalue()
    assert same["nll"] == full["nll"]
    assert row["weight_method"] == "awq"
    assert row["nll"] < plain["nll"]


def test_awq_warns_of_rotations_and_refuses_shifts(config, variant):
    config = replace(config, weights=Awq(), calibration=CALIBRATION, seeds=(0,))
    sentence = "weights: awq .* random_hadamard makes all channels alike"
    quick = {"scheme": Scheme(Grid(3)), "weights": Awq(clip=False, steps=2)}
    with pytest.warns(UserWarning, match=sentence):
        (row,) = run(replace(config, methods=("random_hadamard",), **quick), quiet())["rows"]
    assert row["weight_method"] == "awq"
    shifted = replace(config, methods=("random_hadamard_shift",), out=config.out + "-shifted")
    with pytest.raises(InputError, match="awq scales the activations that the shifts of random_ha"):
        run(shifted, quiet())
    assert not Path(shifted.out).exists()
    network, rotated = variant("llama").network, Transform({"down": Dense(jnp.eye(4))})
    w16 = replace(config, scheme=Scheme())
    check_combinations(w16, network, {"random_hadamard": rotated})  # no weight is rounded
    check_combinations(config, network, {"saved": Transform()})  # scales alone
    with pytest.warns(UserWarning, match="saved makes all channels alike"):
        check_combinations(config, network, {"saved": rotated})
    shifts = {site: jnp.zeros((3, 4)) for site in INPUTS}
    with pytest.raises(InputError, match="the shifts of saved"):
        check_combinations(config, network, {"saved": Transform(shifts=shifts)})


def test_mixed_bits_need_codebooks(config, variant):
    mixed = replace(config, scheme=Scheme(Grid(4)), weights=QuipSharp(), mixed=Mixed())
    network = variant("llama").network
    with pytest.raises(InputError, match=r"mixed\.choices: quip_sharp has codebooks of 2, 3,"):
        check_combinations(mixed, network, {})
    check_combinations(replace(mixed, mixed=Mixed(choices=(2, 3, 4))), network, {})


W2 = Scheme(weights=Grid(2, clip="mse"))


@pytest.mark.parametrize(
    ("settings", "title"),
    [(Quip(seed=3), "QuIP"), (QuipSharp(seed=3), "QuIP#")],
    ids=["quip", "quip_sharp"],
)
def test_quip_in_a_run(config, settings, title):
    config = replace(config, methods=("full_precision", "random_hadamard"), seeds=(0,))
    config = replace(config, scheme=W2, weights=settings, calibration=CALIBRATION)
    shown = io.StringIO()
    found = run(config, Console(file=shown))
    assert f"random hadamard, seed 0: {title}: " in shown.getvalue()
    full, row = found["rows"]
    assert "sign_seed" not in full
    assert (row["weight_method"], row["sign_seed"]) == (settings.method, 3)
    assert row["nll"] != full["nll"]


@pytest.mark.parametrize(
    ("scheme", "sentence"),
    [
        (Scheme(Grid(5)), "scheme.weights.bits: quip_sharp has codebooks of 2, 3, 4 bits, and "
         "layers.0.q is to have 5"),
        (Scheme(Grid(2), overrides=(Override("layers.1.up", weights=8),)),
         "scheme.overrides: quip_sharp .*, and layers.1.up is to have 8"),
        (Scheme(Grid(2, granularity="group", group=8)), "scheme.weights.group: quip_sharp has one"),
    ],
)  # fmt: skip
def test_what_has_no_codebook_is_refused_before_anything_is_written(config, scheme, sentence):
    config = replace(config, methods=("no_rotation",), scheme=scheme, calibration=CALIBRATION)
    with pytest.raises(InputError, match=sentence):
        run(replace(config, weights=QuipSharp()), quiet())
    assert not Path(config.out).exists()


def test_qat_trains_the_weights_of_every_row_on_one_text(config, monkeypatch):
    config = replace(config, methods=("no_rotation", "random_hadamard_shift"), seeds=(0,))
    (plain,) = run(replace(config, out=config.out + "-rtn", methods=("no_rotation",)), quiet())[
        "rows"
    ]
    config, shown = replace(config, weights=QAT), io.StringIO()
    record, shifts = WEIGHT_METHODS["qat"], []

    def watched(network, *rest, **options):
        shifts.append(network.online.shifts)
        if len(shifts) == 1:
            raise KeyboardInterrupt
        # The second row costs another compilation, and what it is given says all.
        return record.round(network, *rest, **options) if len(shifts) == 2 else network

    with monkeypatch.context() as patch:
        patch.setitem(WEIGHT_METHODS, "qat", record._replace(round=watched))
        with pytest.raises(KeyboardInterrupt):
            run(config, Console(file=shown))
        (text,) = Path(config.out).glob("qat-text-*.npy")
        assert np.load(text).shape == (4, 8)
        found = run(config, Console(file=shown))
    assert shown.getvalue().count("writing text to train on") == 1
    assert re.search(r"no rotation: training: .* loss ", shown.getvalue())
    assert [set(x) for x in shifts] == [set(), set(), set(INPUTS)]
    assert "at W4A4KV4 (qat weights) on" in markdown(found)
    row, rotated = found["rows"]
    assert row["weight_method"] == rotated["weight_method"] == "qat"
    assert row["nll"] != plain["nll"]
    again = replace(config, out=config.out + "-again", methods=("no_rotation",))
    assert [same["nll"] for same in run(again, quiet())["rows"]] == [row["nll"]]


def test_qat_keeps_the_text_of_each_setting(config, tmp_path, monkeypatch):
    written = []

    def generate_text(network, *, count, length, seed, advance):
        written.append((count, length, seed))
        return np.full((count, length), seed, np.int32)

    monkeypatch.setattr(own_text, "generate_text", generate_text)
    config = replace(config, methods=("no_rotation",))
    with Stages(quiet()) as stages:
        inputs = prepare(config, tmp_path, stages)

    def text(qat=QAT, dtype="float32", digest="x"):
        model = inputs.model.replace(identity=replace(inputs.model.identity, more=[digest]))
        settings = replace(config, weights=qat, dtype=dtype)
        return own_text.own_text(replace(inputs, config=settings, model=model))

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
    good = text().astype("<i4")
    for wrong in (good[:-1], good.astype("f8"), good - 1, good + 97, good.astype(object)):
        for file in tmp_path.iterdir():
            np.save(file, wrong)
        with pytest.raises(InputError, match=r"npy: (damaged \(.*delete it|larger than)"):
            text()
    for file in tmp_path.iterdir():
        file.write_bytes(b"half")
    with pytest.raises(InputError, match=r"npy: damaged \(.*delete it"):
        text()
