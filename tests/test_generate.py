"""`qrot generate` from the command line to the tokens, on a tiny model."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
from rich.console import Console

from qrot import cli
from qrot.errors import InputError
from qrot.generate import memory, open_network, scheme_named, written
from qrot.grid import Grid
from qrot.model.forward import forward
from qrot.model.params import PackedLinear
from qrot.progress import Stages
from qrot.quantize.keep import load_network, save_network
from qrot.quantize.rtn import rtn
from qrot.run.run import run
from qrot.scheme import Scheme

pytestmark = pytest.mark.usefixtures("quick_compile")
PROMPT = np.array([5, 17, 3], np.int32)


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    """A run folder with learned rotations."""
    config = runs.tiny_config(tiny, tmp_path_factory.mktemp("run") / "run")
    config = replace(config, methods=("learned",), calibration=runs.CALIBRATION)
    run(config, runs.quiet())
    return Path(config.out)


def opened(source, **options):
    """The network of a source."""
    with Stages(Console(quiet=True)) as stages:
        return open_network(str(source), stages, **options)[1]


def invoke(monkeypatch, capsys, *arguments):
    """(exit code, stdout, stderr) of the command line."""
    monkeypatch.setattr("sys.argv", ["qrot", "generate", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return stopped.value.code or 0, *capsys.readouterr()


@pytest.mark.parametrize("weights", [None, "rtn", "gptq"])
def test_a_run_writes_what_its_network_would(folder, weights):
    """Greedy tokens are those of one forward pass over all that was written."""
    network = opened(folder, weights=weights)
    assert isinstance(network.params.layers.q, PackedLinear)
    tokens = list(written(network, PROMPT, steps=8))
    everything = jnp.asarray([*PROMPT, *tokens])[None]
    logits = jax.jit(forward)(network, everything)
    likeliest = np.asarray(logits[0].argmax(-1))
    np.testing.assert_array_equal(likeliest[len(PROMPT) - 1 : -1], tokens)


def test_a_run_starts_from_the_network_that_it_kept(folder, monkeypatch, tmp_path):
    """Nothing is read, fused or rounded anew, and the integers are those that were judged."""
    monkeypatch.setattr("qrot.generate.build", None)
    network, (kept, _) = opened(folder), load_network(folder / "network.safetensors")
    assert network.scheme == kept.scheme
    scale = kept.params.layers.down.scale
    np.testing.assert_array_equal(network.params.layers.down.scale, scale)
    # Values that are no integers write, too.
    plain = rtn(kept.replace(scheme=Scheme(Grid(4))))
    linear = plain.params.layers.q.replace(scale=None)
    layers = plain.params.layers.replace(q=linear)
    file = tmp_path / "network.safetensors"
    about = load_network(folder / "network.safetensors")[1]
    save_network(file, plain.replace(params=plain.params.replace(layers=layers)), about)
    network = opened(file)
    assert not isinstance(network.params.layers.q, PackedLinear)
    assert len(list(written(network, PROMPT, steps=2))) == 2


def test_a_text_ends_with_any_of_the_tokens_that_end_one(folder):
    network = opened(folder)
    tokens = list(written(network, PROMPT, steps=8))
    last = tokens[3]
    expected = tokens[: tokens.index(last) + 1]
    for ends in ((last,), (96 if last != 96 else 95, last)):
        network = network.replace(config=replace(network.config, eos_token_ids=ends))
        assert list(written(network, PROMPT, steps=8)) == expected


def test_a_model_writes_at_any_bits(tiny):
    plain = opened(tiny / "model")
    assert plain.scheme == Scheme()
    assert not isinstance(plain.params.layers.q, PackedLinear)
    rotated = opened(tiny / "model", scheme=scheme_named("W8A16"))
    assert isinstance(rotated.params.layers.q, PackedLinear)
    first, second = (list(written(w, PROMPT, steps=6)) for w in (plain, rotated))
    assert len(first) == len(second) == 6
    assert first[0] == second[0]  # at 8 bits


def test_what_is_drawn_follows_seed_and_temperature(tiny):
    network = opened(tiny / "model")

    def drawn(**options):
        return list(written(network, PROMPT, steps=12, **options))

    assert drawn(temperature=1.0, seed=1) == drawn(temperature=1.0, seed=1)
    assert drawn(temperature=1.0, seed=1) != drawn(temperature=1.0, seed=2)
    assert drawn(temperature=1.0, top_k=1, seed=1) == drawn() != drawn(temperature=5.0)


def test_memory_is_what_the_bits_say(folder):
    # hidden 48, head_dim 12, 2 kv heads, 3 layers; a zero point a head besides scales
    words = memory(opened(folder))
    assert f"cache {3 * 2 * 2 * (12 // 2 + 4 + 1)} bytes a token" in words


def test_the_command_line(folder, monkeypatch, capsys):
    code, out, err = invoke(monkeypatch, capsys, folder, "w5 w17 w3", "--tokens", "4")
    assert code == 0
    assert out.startswith("w5 w17 w3 w")
    assert len(out.split()) == 7
    assert "W4A4KV4: 3 tokens of prompt" in err
    assert "bytes a weight with scales" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nowhere", "w1"), "there is no model 'nowhere'"),
        (("RUN", ""), "the prompt is empty"),
        (("RUN", "w1", "--tokens", "9999"), "take a smaller --tokens"),
        (("RUN", "w1", "--scheme", "4bit"), "no name such as W4A4KV4"),
        (("RUN", "w1", "--weights", "awk"), "there is no 'awk'; did you mean 'awq'?"),
        (("RUN", "w1", "--row", "other"), "--row: there is no 'other'"),
        (("MODEL", "w1", "--weights", "gptq"), "only a run has a text"),
        (("MODEL", "w1", "--row", "other"), "only a run has rows"),
    ],
)
def test_bad_input_is_one_sentence(folder, tiny, monkeypatch, capsys, arguments, words):
    given = [{"RUN": folder, "MODEL": tiny / "model"}.get(a, a) for a in arguments]
    code, out, err = invoke(monkeypatch, capsys, *given)
    assert code == 2
    assert words in err
    assert "Traceback" not in out + err


def test_names_of_schemes():
    a4 = Grid(4, "asymmetric")
    assert scheme_named("W4A4KV4") == Scheme(Grid(4, clip="mse"), a4, a4, a4)
    assert scheme_named("W4A16") == Scheme(Grid(4, clip="mse"), *[Grid(16, "asymmetric")] * 3)
    with pytest.raises(InputError, match="bits: 1 is outside"):
        scheme_named("W1A16")
