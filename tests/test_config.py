import pytest
import yaml

from qrot.errors import InputError
from qrot.files.plain import first_difference
from qrot.grid import Grid
from qrot.quantize.gptq import Gptq
from qrot.quantize.qat import Qat
from qrot.quantize.rtn import Rtn
from qrot.rotation.random import RotationSites
from qrot.run.config import RunConfig, resolved, to_yaml
from qrot.run.read import PRESETS, applied, find_config, read_config, read_scheme
from qrot.run.read import validate as validated
from qrot.scheme import Override, Scheme


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "four.yaml"
    path.write_text(
        "model: smollm2\n"
        "scheme:\n"
        "  weights: {bits: 4, clip: mse}\n"
        "  overrides: [{match: '*.down', activations: 8}]\n"
        "rotations: {down: 64}\n"
        "learn: {steps: 3, learning_rate: 1e-3}\n"
    )
    return path


def test_a_file_is_read_whole(file):
    config = read_config(file)
    assert config.out == "runs/four"
    assert config.scheme == Scheme(
        weights=Grid(4, clip="mse"), overrides=(Override("*.down", activations=8),)
    )
    assert config.rotations.down == 64
    assert config.rotations.key is True
    assert config.learn.learning_rate == 0.001


def test_overrides_win_and_may_name_what_the_file_does_not(file):
    config = read_config(
        file,
        ["learn.learning_rate=1E-4", "seeds=[4, 5]", "data.source=files", "scheme.keys.bits=3"],
    )
    assert (config.learn.learning_rate, config.learn.steps) == (1e-4, 3)
    assert config.seeds == (4, 5)
    assert config.data.source == "files"
    assert (config.scheme.keys.bits, config.scheme.weights.bits) == (3, 4)


def test_what_is_written_is_read_back(file):
    config = read_config(file, ["learn.learning_rate=1e-7"])
    assert validated(yaml.safe_load(to_yaml(config))) == config
    assert validated({}) == RunConfig()


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("scheme.weights.bit=4", "unknown key 'scheme.weights.bit', did you mean "
         "'scheme.weights.bits'?"),
        ("lern.steps=4", "unknown key 'lern', did you mean 'learn'?"),
        ("scheme.overrides=[{match: a, weigths: 8}]", "unknown key 'scheme.overrides.0.weigths', "
         "did you mean 'scheme.overrides.0.weights'?"),
        ("data.zzz=1", "unknown key 'data.zzz', expected one of source, path, calibration, "
         "evaluation, join"),
        ("scheme.weights.bits=four", "scheme.weights.bits: expected an integer, not 'four'"),
        ("scheme.weights.bits=4.0", "scheme.weights.bits: expected an integer, not 4.0"),
        ("scheme.weights.bits=true", "scheme.weights.bits: expected an integer, not True"),
        ("scheme.weights.clip=big",
         "scheme.weights.clip: expected a number or one of 'mse', 'four_over_six', not 'big'"),
        ("learn.steps='3'", "learn.steps: expected an integer, not '3'"),
        ("learn.shifts=1", "learn.shifts: expected true or false, not 1"),
        ("learn.objective=mse", "learn.objective: there is no 'mse'; expected one of "
         "cross_entropy, fisher, kl, kl_top, kurtosis, layer_reconstruction, reconstruction, whip"),
        ("other={sourc: files}", "unknown key 'other.sourc', did you mean 'other.source'?"),
        ("other={source: hub}", "other.source: expected one of 'pydoc', 'wikitext2', 'files', not "
         "'hub'"),
        ("learn={objective: whip}", "learn.scales: whip does not feel what a scale costs, only "
         "what it gains; use scales: false with it"),
        ("learn={objective: fisher, scales: true, accumulate: 2}", "learn.accumulate: fisher has "
         "no windows in its batches"),
        ("learn={batch: 3, accumulate: 2}", "learn.accumulate: 2 does not divide 3"),
        ("learn={draws: 2}", "learn.draws: fisher is not drawn at random"),
        ("methods=[saved]", "saved: a file of another run goes with the method 'saved' or a "
         "start of learning that is saved, only with them"),
        ("saved=x", "saved: a file of another run goes with the method 'saved' or a start of "
         "learning that is saved, only with them"),
        ("learn.start=saved", "saved: a file of another run goes with the method 'saved' or a "
         "start of learning that is saved, only with them"),
        ("learn.weight_bits=2026-01-01", "learn.weight_bits: expected an integer or null, not "
         "'2026-01-01'"),
        ("seeds=3", "seeds: expected a list, not 3"),
        ("seeds=[0, x]", "seeds.1: expected an integer, not 'x'"),
        ("scheme.keys=4", "scheme.keys: expected a section with keys bits, kind, granularity, "
         "group, clip, threshold, codebook, scale, not 4"),
        ("scheme.overrides=[{weights: 8}]", "scheme.overrides.0.match: this key is needed"),
        ("model=null", "model: expected a text or a section with keys base, adapters, combine, "
         "density, seed, not None"),
        ("model={bse: x}", "unknown key 'model.bse', did you mean 'model.base'?"),
        ("model={base: x}", "model.adapters: this key is needed"),
        ("model={base: x, adapters: []}", "model.adapters: names no adapter; give model the name "
         "of the base"),
        ("model={base: x, adapters: [3]}", "model.adapters.0: expected a text or a section with "
         "keys path, weight, not 3"),
        ("model={base: x, adapters: [{path: a, wight: 2}]}", "unknown key "
         "'model.adapters.0.wight', did you mean 'model.adapters.0.weight'?"),
        ("model={base: x, adapters: [a], combine: tie}", "model.combine: expected one of 'sum', "
         "'linear', 'ties', 'dare_linear', 'dare_ties', not 'tie', did you mean 'ties'?"),
        # Out of range: with the way to it, whichever dataclass complains.
        ("scheme.weights.bits=1", "scheme.weights.bits: 1 is outside 2 to 16 (16 leaves it alone)"),
        ("scheme.keys.bits=17", "scheme.keys.bits: 17 is outside 2 to 16 (16 leaves it alone)"),
        ("scheme.activations.clip=mse", "scheme.activations: clip 'mse' is a search over fixed "
         "numbers: weights only"),
        ("scheme.activations.threshold=-1", "scheme.activations.threshold: -1.0 is negative (0 is "
         "none)"),
        ("scheme.keys.threshold=6", "scheme.keys: a threshold keeps channels of activations: only "
         "theirs"),
        ("evaluate.length=1", "evaluate.length: a window of 1 tokens predicts nothing"),
        ("learn.steps=0", "learn.steps: 0 is not positive"),
        ("weights={method: awq, steps: 0}", "weights.steps: 0 is not positive"),
        ("smoothquant.alpha=1.5", "smoothquant.alpha: 1.5 is outside 0 to 1"),
        ("smoothquant.alpha=best", "smoothquant.alpha: expected a number or 'search', not "
         "'best'"),
        ("weights.method=gptw", "weights.method: there is no 'gptw'; did you mean 'gptq'?"),
        ("weights.method=3", "weights.method: there is no '3'; expected one of awq, gptq, qat, "
         "quip, quip_sharp, rtn"),
        ("weights={damping: 0.1}", "weights.method: this key is needed"),
        ("weights=gptq", "weights: expected a section with the key method, not 'gptq'"),
        ("weights=null", "weights: expected a section with the key method, not None"),
        ("weights={method: gptq, damping: big}", "weights.damping: expected a number, not 'big'"),
        ("weights={method: rtn, damping: 0.1}", "unknown key 'weights.damping', expected one of "
         "method"),
        ("weights={method: gptq, method: awq}", "weights={method: gptq, method: awq}: line 1: the "
         "key 'method' is there twice"),
        ("methods=[learnt]", "methods.0: there is no 'learnt'; did you mean 'learned'?"),
        ("methods=[3]", "methods.0: expected a text, not 3"),
        ("track=[tensorbored]", "track.0: there is no 'tensorbored'; did you mean 'tensorboard'?"),
        ("keep=worst", "keep: expected one of 'best', 'all', 'none', not 'worst'"),
        ("weights={method: quip, damping: 2.0}", "weights.damping: 2.0 is outside 0 to 1"),
        ("weights={method: quip, seed: -1}", "weights.seed: a seed is not negative"),
        ("weights={method: gptq, damping: 0.0}", "weights.damping: 0.0 is outside 0 to 1"),
        ("mixed.bits=9", "mixed.bits: 9 is outside the choices, 2 to 8"),
        ("mixed.bit=3", "unknown key 'mixed.bit', did you mean 'mixed.bits'?"),
        ("mixed={choices: [8, 4]}", "mixed.choices: [8, 4] are not rising numbers from 2 to 16"),
        ("weights={method: gptq, dampin: 3}", "unknown key 'weights.dampin', did you mean "
         "'weights.damping'?"),
        ("weights={method: qat, steps: 0}", "weights.steps: 0 is not positive"),
        ("methods=[]", "methods: [] is empty or names one twice"),
        ("seeds=[1, 1]", "seeds: [1, 1] is empty or names one twice"),
        ("seeds=[-1]", "seeds and learn_seeds: a seed is not negative"),
        # Not overrides at all.
        ("steps", "'steps': an override has the form key.sub=value"),
        ("learn..steps=1", "'learn..steps=1': an override has the form key.sub=value"),
        ("model.name=x", "model.name=x: model has no keys below it"),
        ("seeds=[1", "seeds=[1: not valid YAML (expected ',' or ']', but got '<stream end>', "
         "line 1)"),
    ],
)  # fmt: skip
def test_bad_settings_are_named_in_one_sentence(file, override, sentence):
    with pytest.raises(InputError) as error:
        read_config(file, [override])
    assert str(error.value) == sentence


def test_of_several_faults_one_is_named(file):
    with pytest.raises(InputError, match="unknown key 'lern'"):
        read_config(file, ["seeds=3", "lern=1"])
    with pytest.raises(InputError, match=r"scheme\.weights\.bits: 1 is outside"):
        read_config(file, ["seeds=3", "lern=1", "scheme.weights.bits=1", "data.source=3"])


@pytest.mark.parametrize(
    ("older", "settings"),
    [
        ("weight_method: gptq\ngptq: {damping: 0.05}\n", Gptq(damping=0.05)),
        ("weight_method: gptq\n", Gptq()),
        ("weight_method: qat\ngptq: {damping: 0.05}\nqat: {steps: 3}\n", Qat(steps=3)),
        ("gptq: {damping: 0.05}\n", Rtn()),  # rtn was what rounded where nothing was named
    ],
)
def test_the_older_form_of_the_weights_is_translated(tmp_path, older, settings):
    path = tmp_path / "older.yaml"
    path.write_text(older)
    assert read_config(path).weights == settings


def test_quip_sharp_had_the_section_of_quip(tmp_path):
    path = tmp_path / "older.yaml"
    path.write_text("weight_method: quip_sharp\nquip: {damping: 0.02, seed: 3}\n")
    weights = resolved(read_config(path))["weights"]
    assert weights == {"method": "quip_sharp", "damping": 0.02, "seed": 3}


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("gptq.damping=0.1", "gptq: the section weights has its settings now; write "
         "weights.damping"),
        ("weight_method=awq", "weight_method: the section weights names it now; write "
         "weights.method=awq"),
    ],
)  # fmt: skip
def test_both_forms_of_the_weights_at_once_are_refused(override, sentence):
    with pytest.raises(InputError) as error:
        read_config(find_config("quarot"), [override])
    assert str(error.value) == sentence


@pytest.mark.parametrize("faulty", ["gptw", "[gptq]"])
def test_faults_in_the_older_form_are_named_in_the_form_of_today(file, faulty):
    with pytest.raises(InputError, match=r"weights\.method: there is no "):
        read_config(file, [f"weight_method={faulty}"])
    with pytest.raises(InputError, match=r"unknown key 'weights.dampin', did you mean 'weights\."):
        read_config(file, ["weight_method=gptq", "gptq.dampin=1"])


def test_a_key_that_is_there_twice_is_refused(file):
    file.write_text(file.read_text() + "rotations: {key: false}\n")
    with pytest.raises(InputError, match=r"four\.yaml: line 7: the key 'rotations' is there twice"):
        read_config(file)


@pytest.mark.parametrize("content", [b"- a\n- b\n", b"a: [\n", b"\xff\xfe\x00", b"text"])
def test_files_that_are_no_configs(tmp_path, content):
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"bad\.yaml"):
        read_config(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"absent\.yaml: cannot be read"):
        read_config(tmp_path / "absent.yaml")


PUBLISHED = ("llm_int8", "quarot", "spinquant_had", "spinquant_no_had")


def test_presets_are_the_published_settings():
    configs = {name: read_config(find_config(name)) for name in PUBLISHED}
    assert {path.stem for path in PRESETS.glob("*.yaml")} == set(PUBLISHED)
    int8, quarot, had, no_had = configs.values()
    assert quarot.scheme.activations == Grid(4, "symmetric", "token", clip=0.9)
    assert quarot.scheme.keys == quarot.scheme.values == Grid(4, "asymmetric", "head", clip=0.95)
    assert quarot.calibrates
    assert had.scheme.name == "W4A4KV4"
    assert had.trained_weight_bits == no_had.trained_weight_bits == 16
    assert (had.learn.optimiser, had.learn.learning_rate) == ("cayley_sgd", 1.5)
    assert had.rotations == RotationSites()
    assert no_had.rotations == RotationSites(key=False, down=False)
    assert int8.scheme.activations.threshold == 6.0
    for name, config in configs.items():
        assert config.out == f"runs/{name}"
        assert all(vars(config.scheme)[role].on for role in ("weights", "activations"))


def test_settings_that_do_not_count_are_not_shown():
    shown = yaml.safe_load(applied(read_config(find_config("quarot"))))
    assert shown["weights"] == {"method": "gptq", "damping": 0.01, "act_order": False}
    assert shown["scheme"]["activations"]["clip"] == 0.9
    assert not {"learn", "slicegpt"} & shown.keys()
    assert "learn" in yaml.safe_load(applied(read_config(find_config("spinquant_had"))))


def test_a_damaged_scheme_of_a_rotation_file_is_one_sentence():
    assert read_scheme({"keys": {"bits": 4}}) == Scheme(keys=Grid(4))
    with pytest.raises(InputError, match=r"scheme.keys.bits: expected an integer, not 'four'"):
        read_scheme({"keys": {"bits": "four"}})
    with pytest.raises(InputError, match="scheme: expected"):
        read_scheme("W4A4")


def test_what_is_neither_file_nor_preset():
    with pytest.raises(InputError, match="quarott: no such file and no such preset; did you mean"):
        find_config("quarott")
    with pytest.raises(InputError, match="presets: llm_int8, quarot, "):
        find_config("zzz")


def test_first_difference_is_a_dotted_key(file):
    old = resolved(read_config(file))
    assert first_difference(old, resolved(read_config(file))) is None
    for key, value in {"scheme.keys.bits": 3, "seeds": [7], "learn.steps": 9}.items():
        new = resolved(read_config(file, [f"{key}={value}"]))
        assert first_difference(old, new) == key
    assert first_difference(old, {**old, "new": 1}) == "new"
    assert first_difference({**old, "gone": 1}, old) == "gone"
