"""Settings that somebody or something has put together wrongly: a run, or one sentence."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from mutated import KEYS, VALUES, mutated
from runs import CHEAP, quiet

from qrot.cli import main
from qrot.errors import InputError
from qrot.evaluate.zeroshot import ZeroShot
from qrot.files.plain import parse_yaml
from qrot.grid import Grid
from qrot.learn.settings import Learn
from qrot.quantize.mixed import Mixed
from qrot.quantize.registry import WEIGHT_METHODS
from qrot.run import run as module
from qrot.run.config import RunConfig, resolved, to_yaml
from qrot.run.lock import LOCK, entered
from qrot.run.read import read_config, read_scheme, validate
from qrot.run.run import run
from qrot.scheme import Override, Scheme
from qrot.study.sweep import read_sweep
from qrot.text import Data

# Every key there is, with a value that it may have.
WHOLE = RunConfig(
    other=Data("files", "texts"),
    scheme=Scheme(Grid(4), overrides=(Override("*.down", activations=8),)),
    zeroshot=ZeroShot(("a.jsonl", "b.jsonl"), count=3),
)
CONFIGS = [
    resolved(replace(WHOLE, weights=record.settings())) for record in WEIGHT_METHODS.values()
]
CONFIGS.append(resolved(replace(WHOLE, scheme=Scheme(Grid(4)), mixed=Mixed())))
OLDER = {
    "weight_method": "quip_sharp",
    "gptq": {"damping": 0.01, "act_order": True},
    "quip": {"damping": 0.01, "seed": 0},
    "qat": {"steps": 30},
}


def check(read):
    """That it is a run which is the same once it is written and read, or one sentence."""
    try:
        config = read()
    except InputError as error:
        said = str(error)
        assert said
        assert "\n" not in said
        assert len(said) < 1_000
        return
    assert validate(parse_yaml(to_yaml(config))) == config


@given(mutated(*CONFIGS, OLDER))
@settings(max_examples=150, deadline=None)
def test_settings_are_a_run_or_one_sentence(found):
    check(lambda: validate(found) if isinstance(found, dict) else read_scheme(found))
    if isinstance(found, dict) and "scheme" in found:
        try:
            read_scheme(found["scheme"])
        except InputError as error:
            assert str(error).startswith(("scheme", "unknown key 'scheme."))  # noqa: PT017


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("configs") / "a.yaml"


@given(mutated(*CONFIGS, OLDER), st.data())
@settings(max_examples=100, deadline=None)
def test_a_file_is_a_run_or_one_sentence(file, found, data):
    text = yaml.safe_dump(found)
    place = data.draw(st.integers(0, len(text)))
    more = data.draw(st.sampled_from(["", "[", "}", "&a ", "*a", "<<: ", "\n", "- ", ": "]))
    file.write_text(text[:place] + more + text[place:], encoding="utf-8", errors="surrogatepass")
    check(lambda: read_config(file))


def keys_of(section, above=""):
    for key, value in section.items():
        yield above + key
        if isinstance(value, dict):
            yield from keys_of(value, f"{above}{key}.")


OVERRIDES = st.builds(
    "{}{}{}".format,
    st.sampled_from([key for config in CONFIGS for key in keys_of(config)]) | KEYS,
    st.sampled_from(["=", "=", "=", "", ".x=", "==", ".="]),
    st.one_of(VALUES.map(str), VALUES.map(repr), VALUES.map(yaml.safe_dump)),
)


@pytest.mark.filterwarnings("ignore:.* undoes ")
@given(st.lists(OVERRIDES, max_size=4))
@settings(max_examples=150, deadline=None)
def test_overrides_are_a_run_or_one_sentence(file, overrides):
    file.write_text("learn: {steps: 3}\n")
    check(lambda: read_config(file, overrides))


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["a." * 2_000 + "b=1"], "no key is as deep"),
        (["a" * 5_000 + "=1"], "a text of 5,000 characters; 4,096 are the most"),
        (["model=\udcff"], "unacceptable character #xdcff"),
        (["m\udcffdel=x"], "is not in UTF-8"),
        (['model="\\ud800"'], "half a character"),
        (['model="a\\0b"'], "a NUL in a text"),
        (["=1"], "an override has the form key.sub=value"),
        (["batch=9999999999"], "^batch: 9999999999 is above 4,294,967,295$"),
        (["batch=2000000"], "^batch: 2,000,000 is above 1,000,000$"),
        (["learn.draws=4000000000", "learn.start=hadamard"], "^learn.draws: 4,000,000,000 is"),
        (["learn.length=-3"], "^learn.length: -3 is below 2$"),
        (["learn.clip_norm=0.0"], "^learn.clip_norm: 0.0 is not positive$"),
        (["learn.clip_norm=.nan"], "^learn.clip_norm: nan is not finite$"),
        (["learn.learning_rate=.inf"], "^learn.learning_rate: inf is not finite$"),
        (["learn.learning_rate=1e999"], "^learn.learning_rate: inf is not finite$"),
        (["scheme.activations={bits: 4, threshold: .nan}"], "^scheme.activations.threshold: nan"),
        (["seeds=[0, 1180591620717411303424]"], "^seeds.1: 1180591620717411303424 is above 4,294"),
        (["learn_seeds=[-1]"], "seeds and learn_seeds: a seed is not negative"),
        ([f"seeds=[{10**80}]"], "^seeds.0: a number of more than 60 digits is above"),
        ([f"seeds=[{10**200}]"], "a number of more than 100 characters"),
        (["weights={method: qat, seed: 4294967296}"], "^weights.seed: 4294967296 is above"),
        (["weights={method: qat, steps: 1000000, batch: 100, length: 4096}"],
         "^weights.steps: 409,600,000,000 tokens to be written are too many$"),
        (["weights={method: awq, steps: 20000}"], "^weights.steps: 20,000 is above 10,000$"),
        (["scheme.overrides=[{match: a}, {match: '*', keys: 99}]"],
         "^scheme.overrides.1.keys bits: 99 is outside 2 to 16$"),
        (["rotations.down=0"], "^rotations.down: there are no blocks of 0$"),
        (["rotations={residual: -4}"], "^rotations.residual: there are no blocks of -4$"),
        (["model=''"], "^model: is empty$"),
        (["out=''"], "^out: is empty$"),
        (["methods=[saved]", "saved=''"], "^saved: is empty$"),
        (["out=" + "x" * 5_000], "^out: a text of 5,000 characters; 4,096 are the most$"),
        (["data.path=" + "/x" * 3_000], "^data.path: a text of 6,000 characters"),
        (["gptq={method: awq}", "weight_method=gptq"],
         "^gptq.method: weight_method names the method in this form$"),
        (["weight_method={a: [1]}"], "there is no "),
        (["weight_method=gptq", "gptq=[1]"], "^weights: expected a section with the key method"),
    ],
)  # fmt: skip
def test_settings_that_are_refused(file, overrides, sentence):
    file.write_text("")
    with pytest.raises(InputError, match=sentence):
        read_config(file, overrides)


def test_overrides_that_have_a_meaning(file):
    file.write_text("a: &g {bits: 4}\n".replace("a:", "scheme: {keys: &g {bits: 4}, values: *g} #"))
    config = read_config(file, ["scheme.keys.bits=3"])
    assert (config.scheme.keys.bits, config.scheme.values.bits) == (3, 4)
    config = read_config(file, ["learn={steps: 5}", "learn.batch=4", "out=a=b"])
    assert (config.learn.steps, config.learn.batch, config.out) == (5, 4, "a=b")


def test_an_override_that_undoes_another_is_warned_of(file):
    file.write_text("")
    with pytest.warns(UserWarning, match=r"^seeds=\[1\] undoes seeds=\[0\] before it$"):
        assert read_config(file, ["seeds=[0]", "batch=1", "seeds=[1]"]).seeds == (1,)
    with pytest.warns(UserWarning, match="^learn={} undoes learn.steps=1 before it$"):
        assert read_config(file, ["learn.steps=1", "learn={}"]).learn == Learn()
    with pytest.warns(UserWarning, match=r"^seeds=.* undoes seeds=\[3\] before it$"):
        read_sweep(file, ["seeds=[3]"], ["seeds=[0],[1]"])


def test_a_file_whose_name_is_no_text_needs_a_folder(tmp_path):
    file = tmp_path / os.fsdecode(b"caf\xe9.yaml")
    file.write_text("")
    with pytest.raises(InputError, match=r"out: 'runs/caf.udce9' is not in UTF-8"):
        read_config(file)
    assert read_config(file, ["out=runs/x"]).out == "runs/x"


def test_a_sweep_says_where_each_run_goes_once(file):
    file.write_text("model: absent\n")
    out = "\N{GRINNING FACE}"
    (one, two) = read_sweep(file, [f"out={out}"], ["seeds=[0],[1]"])
    assert [x for x in one.command if x.startswith("out=")] == [one.command[-1]]
    again = read_config(Path(one.command[4]), one.command[5:])
    assert again == one.config
    assert again.out.startswith(out)
    assert two.config.seeds == (1,)


@pytest.fixture
def no_work(monkeypatch):
    """Nothing is loaded before all that can be refused is."""

    def prepare(*_):
        raise AssertionError("work")

    monkeypatch.setattr(module, "prepare", prepare)


@pytest.mark.parametrize(
    ("out", "sentence"),
    [
        ("/", "^/: not empty and not a run folder; choose another with out=$"),
        (".", "^.: not empty and not a run folder; choose another with out=$"),
        ("file", "^out: file: cannot be a run folder"),
        ("file/x", "^out: .*cannot be written"),
        ("/proc/x", "^out: /proc/x: cannot be written"),
        ("/proc/x/y", "^out: .*cannot be written"),
        ("x" * 300, "^out: .*File name too long"),
        ("link", "^out: .*cannot be written"),
        ("x/" * 1_500, "^out: a path of 1500 folders in one another$"),
    ],
)
def test_folders_that_cannot_be_a_runs(config, no_work, monkeypatch, tmp_path, out, sentence):
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("/proc/x")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=sentence):
        run(replace(config, methods=CHEAP, out=out), quiet())
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_that_may_not_be_written(config, no_work, monkeypatch):
    folder = Path(config.out)
    folder.mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != folder)
    with pytest.raises(InputError, match=f"^out: {folder}: cannot be written"):
        run(replace(config, methods=CHEAP), quiet())
    assert not list(folder.iterdir())


def test_a_lock_that_is_a_link_destroys_nothing(config, tmp_path, no_work):
    folder, mine = Path(config.out), tmp_path / "mine"
    folder.mkdir()
    mine.write_text("mine")
    (folder / LOCK).symlink_to(mine)
    with pytest.raises(InputError, match="cannot be read"):
        run(replace(config, methods=CHEAP), quiet())
    with pytest.raises(OSError, match="symbolic links"), entered(folder):
        pass
    assert mine.read_text() == "mine"


@pytest.mark.parametrize(
    "overrides", [["batch=9999999999"], ["out=/proc/x"], ["seeds=[0", "batch=1"]]
)
def test_the_command_says_one_sentence(monkeypatch, capsys, tmp_path, overrides):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text("methods: [no_rotation]\n")
    monkeypatch.setattr("sys.argv", ["qrot", "run", "a.yaml", *overrides])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("qrot: ")
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a.yaml"]
