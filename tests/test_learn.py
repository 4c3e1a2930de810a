import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import write_variant

from qrot.errors import InputError
from qrot.grid import Grid
from qrot.learn import loop
from qrot.learn import start as start_module
from qrot.calibrate.capture import mean_shifts
from qrot.learn.end_to_end import cross_entropy
from qrot.learn.loop import learn, load_history
from qrot.learn.settings import Learn
from qrot.learn.start import balancing, fisher_settings, starting_point, training_scheme
from qrot.learn.stiefel import orthogonality_error
from qrot.model.forward import forward, forward_with_taps
from qrot.network import fold_norms, fuse
from qrot.quantize.rtn import rtn
from qrot.rotation.random import RotationSites, random_rotations
from qrot.rotation.forms import Learned
from qrot.scheme import Override, Scheme

A4 = Grid(4, "asymmetric")
W16A4 = Scheme(Grid(), A4, A4, A4)
W4A4 = Scheme(Grid(4), A4, A4, A4)
SHORT = Learn(
    objective="cross_entropy",
    start="hadamard",
    steps=6,
    batch=2,
    length=16,
    held_out=2,
    evaluate_every=2,
    checkpoint_every=2,
)


@pytest.fixture(scope="module")
def model(variant):
    return fold_norms(variant("qwen2"))


@pytest.fixture(scope="module")
def tokens(model):
    return np.random.default_rng(0).integers(0, model.config.vocab_size, 640, dtype=np.int32)


def run(model, tokens, settings, scheme, folder, **changes):
    folder.mkdir(exist_ok=True)
    return learn(
        model, tokens, settings, scheme, sites=RotationSites(), seed=0, folder=folder, **changes
    )


@pytest.mark.parametrize("shifts", [False, True])
@pytest.mark.parametrize("scheme", [W16A4, W4A4], ids=["w16", "w4"])
def test_the_trained_network_is_the_fused_one(model, tokens, scheme, shifts):
    rows = jnp.asarray(tokens[:64].reshape(2, 32))
    rotations = random_rotations(model.config, 0)
    means = mean_shifts(model, np.asarray(rows)) if shifts else None
    trained = cross_entropy(Learned(rotations, means), model.params, rows, model.config, scheme)
    params, online, moved = fuse(model.params, rotations, model.config, means)
    logits = forward(
        rtn(params, scheme), rows, model.config, rotations=online, scheme=scheme, shifts=moved
    )
    nll = loop_nll(logits, rows)
    plain = loop_nll(forward(model.params, rows, model.config), rows)
    assert abs(nll - plain) > 0.01  # the grids do something
    assert float(trained) == pytest.approx(nll, rel=1e-5)  # with this seed no value is on an edge


def loop_nll(logits, rows):
    logp = jax.nn.log_softmax(logits[:, :-1])
    return -float(jnp.take_along_axis(logp, rows[:, 1:, None], -1).mean())


@pytest.mark.parametrize("optimiser", ["cayley_sgd", "cayley_adam", "cayley_muon", "qr_adam"])
def test_learning_lowers_the_held_out_reconstruction_error(model, tokens, tmp_path, optimiser):
    rate = {"cayley_sgd": 20.0, "cayley_muon": 0.1}.get(optimiser, 0.02)
    settings = replace(
        SHORT,
        objective="reconstruction",
        optimiser=optimiser,
        learning_rate=rate,
        steps=30,
        batch=64,
        windows=38,
        shifts=False,
        scales=False,
        clips=False,
    )
    # Only the sites at which a rotation is learned.
    scheme = replace(W16A4, keys=Grid(), overrides=(Override("*.down", activations=16),))
    learned = run(model, tokens, settings, scheme, tmp_path)
    history = load_history(tmp_path / "metrics.jsonl")
    held_out = [line["held_out"] for line in history if "held_out" in line]
    assert min(held_out) < 0.97 * held_out[0]
    assert orthogonality_error(learned.rotations.residual) < 1e-5
    assert orthogonality_error(learned.rotations.value) < 1e-5


def test_only_what_is_to_learn_moves(model, tokens, tmp_path):
    settings = replace(SHORT, learning_rate=0.02)
    learned = run(model, tokens, settings, W4A4, tmp_path)
    start = random_rotations(model.config, 0)
    assert jnp.array_equal(learned.rotations.down.signs, start.down.signs)
    assert jnp.array_equal(learned.rotations.key.signs, start.key.signs)
    state_moved = load_history(tmp_path / "metrics.jsonl")
    assert len(state_moved) == settings.steps + 1
    assert learned.shifts is not None
    assert all(((c >= 0.3) & (c <= 1)).all() for c in jax.tree.leaves(learned.clips))


def test_training_weights_at_16_bits_rounds_none(model):
    overrides = (Override("*.down", weights=8), Override("*.o", activations=8))
    scheme = replace(W4A4, overrides=overrides)
    settings = replace(SHORT, weight_bits=16)
    seen = training_scheme(model, scheme, settings, RotationSites(), 0)
    assert not seen.rounds_weights
    assert seen.overrides == overrides[1:]
    assert replace(W16A4, overrides=overrides).rounds_weights


def test_a_searched_clip_is_one_ratio_in_training(model):
    scheme = replace(W4A4, weights=Grid(4, clip="mse"))
    seen = training_scheme(model, scheme, SHORT, RotationSites(), 0)
    assert 0.4 < seen.weights.clip < 1
    assert replace(seen, weights=scheme.weights) == scheme


def test_first_tokens_do_not_decide_a_shift(model, tokens):
    rows = tokens[:64].reshape(2, 32)
    site = forward_with_taps(model.params, jnp.asarray(rows), model.config, taps=jnp.arange(64))[1][
        "qkv"
    ]
    expected = np.asarray(site).reshape(-1, 2, 32, site.shape[-1])[:, :, 1:].mean((1, 2))
    np.testing.assert_allclose(mean_shifts(model, rows).qkv, expected, atol=1e-5)


def test_a_finished_run_is_not_run_again(model, tokens, tmp_path):
    first = run(model, tokens, SHORT, W16A4, tmp_path)
    called = []
    second = run(model, tokens, SHORT, W16A4, tmp_path, progress=lambda *_: called.append(1))
    assert not called
    assert jax.tree.all(jax.tree.map(jnp.array_equal, first, second))


SCRIPT = """
    import sys
    from pathlib import Path
    import numpy as np
    from qrot.learn.loop import learn
    from qrot.network import fold_norms
    from qrot.model.io.load import load
    from qrot.rotation.random import RotationSites
    sys.path.insert(0, sys.argv[3])
    from test_learn import SHORT, W4A4
    model = fold_norms(load(sys.argv[1]))
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, 640, dtype=np.int32)
    learned = learn(model, tokens, SHORT, W4A4, sites=RotationSites(), seed=0,
                    folder=Path(sys.argv[2]), progress=lambda step, *_: print(step, flush=True))
    np.savez(Path(sys.argv[2]) / "result.npz", r1=learned.rotations.residual,
             r2=learned.rotations.value)
"""


def test_a_killed_run_goes_on_to_the_same_result(tmp_path):
    write_variant(tmp_path / "model", "qwen2")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path / "model")]
    here = str(Path(__file__).parent)
    subprocess.run([*command, str(whole), here], check=True, capture_output=True)

    process = subprocess.Popen([*command, str(killed), here], stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.strip() == "3":  # one step past the checkpoint of step 2
            process.send_signal(signal.SIGKILL)
            break
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL
    assert not (killed / "result.npz").exists()
    time.sleep(0.1)
    resumed = subprocess.run(
        [*command, str(killed), here], check=True, capture_output=True, text=True
    )
    assert resumed.stdout.split()[0] in ("3", "4", "5")  # not from the start
    a, b = np.load(whole / "result.npz"), np.load(killed / "result.npz")
    np.testing.assert_array_equal(a["r1"], b["r1"])
    np.testing.assert_array_equal(a["r2"], b["r2"])
    lines = [load_history(f / "metrics.jsonl") for f in (whole, killed)]
    for x, y in zip(*lines, strict=True):
        x.pop("seconds", None), y.pop("seconds", None)
        assert x == y


def test_divergence_is_rolled_back(model, tokens, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "DIVERGED", 0.0)  # whatever the held-out loss is, it is too much
    run(model, tokens, SHORT, W16A4, tmp_path)
    history = load_history(tmp_path / "metrics.jsonl")
    messages = [line["step"] for line in history if "message" in line]
    assert messages == [2, 4, 6]
    rates = {line["step"]: line["learning_rate"] for line in history if line["step"]}
    assert rates[3] < 0.6 * rates[2]


def test_a_loss_that_is_not_finite_is_rolled_back(model, tokens, tmp_path, monkeypatch):
    original = loop.update

    def poisoned(learned, state, params, batch, *rest):
        learned, state, loss, norm = original(learned, state, params, batch, *rest)
        return learned, state, loss * jnp.nan, norm

    monkeypatch.setattr(loop, "update", poisoned)
    learned = run(model, tokens, replace(SHORT, steps=2), W16A4, tmp_path)
    start = random_rotations(model.config, 0)
    assert jnp.array_equal(learned.rotations.residual, start.residual)


def test_too_short_a_text_is_refused(model, tokens, tmp_path):
    with pytest.raises(InputError, match="held out"):
        run(model, tokens[:32], SHORT, W16A4, tmp_path)


@pytest.mark.parametrize("start", ["orthogonal", "identity", "pca", "balanced"])
def test_every_start_is_orthogonal(model, tokens, tmp_path, start):
    settings = replace(SHORT, start=start, steps=1)
    learned = run(model, tokens, settings, W16A4, tmp_path)
    assert orthogonality_error(learned.rotations.residual) < 1e-5
    assert orthogonality_error(learned.rotations.value) < 1e-5


def test_a_start_can_be_learned_first(model, tokens, tmp_path, monkeypatch):
    for place in (loop, start_module):
        monkeypatch.setattr(place, "FISHER_STEPS", 4)
    told = []
    settings = replace(SHORT, start="fisher", steps=2)
    run(model, tokens, settings, W4A4, tmp_path, progress=lambda *said: told.append(said[:2]))
    assert told == [(i, 6) for i in range(1, 7)]
    first = load_history(tmp_path / "start" / "metrics.jsonl")
    assert first[-1]["held_out"] < first[0]["held_out"]
    # What is done is not done again, nor captured again.
    monkeypatch.setattr(loop, "capture", None)
    monkeypatch.setattr(loop, "mean_shifts", None)
    run(model, tokens, settings, W4A4, tmp_path)


def test_balancing_meets_in_the_middle():
    draw = np.random.default_rng(0)
    size, felt = (x @ x.T for x in draw.normal(size=(2, 12, 20)))
    mean = balancing(size, felt)
    np.testing.assert_allclose(mean @ size @ mean, felt, rtol=1e-6, atol=1e-6)

    def cost(square):  # of rounding x A, A A^T = square
        return np.trace(size @ square) * np.trace(felt @ np.linalg.inv(square))

    other = draw.normal(size=(12, 12)) * 0.05
    for near in (mean + other @ other.T, np.eye(12), np.diag(np.diag(mean))):
        assert cost(near) > cost(mean) * (1 + 1e-6)


def test_the_best_of_several_draws_is_where_it_starts(model, tokens, tmp_path):
    losses = []
    for draws in (1, 5):
        folder = tmp_path / str(draws)
        run(model, tokens, replace(SHORT, draws=draws, steps=1), W16A4, folder)
        losses.append(load_history(folder / "metrics.jsonl")[0]["held_out"])
    assert losses[1] < losses[0]


def test_all_that_can_be_learned_moves_and_stays_orthogonal(model, tokens, tmp_path):
    sites = RotationSites(down=4)
    settings = replace(SHORT, value_heads=True, online=("key", "down"), learning_rate=0.02)
    folder = tmp_path / "blocks"
    folder.mkdir()
    learned = learn(model, tokens, settings, W4A4, sites=sites, seed=0, folder=folder)
    rotations, config = learned.rotations, model.config
    heads, hd = config.num_key_value_heads, config.head_dim
    assert rotations.value.shape == rotations.key.shape == (3, heads, 1, hd, hd)
    assert rotations.down.shape == (3, config.intermediate_size // 4, 4, 4)
    whole = run(model, tokens, settings, W4A4, tmp_path / "kronecker").rotations
    start = starting_point(model, settings, W4A4, RotationSites(), 0, None, None).rotations
    assert jnp.array_equal(whole.down.signs, start.down.signs)
    for name in ("left", "right"):
        assert not jnp.array_equal(getattr(whole.down, name), getattr(start.down, name))
    for matrix in (*jax.tree.leaves(rotations), whole.down.left, whole.down.right):
        assert orthogonality_error(matrix) < 1e-5
    assert all((jnp.abs(log) > 0).any() for log in jax.tree.leaves(learned.scales))


@pytest.mark.parametrize("change", [{"accumulate": 2}, {"remat": True}])
def test_saving_memory_changes_no_step(model, tokens, tmp_path, change):
    settings = replace(SHORT, steps=1, evaluate_every=1)
    plain = run(model, tokens, settings, W4A4, tmp_path / "plain")
    saving = run(model, tokens, replace(settings, **change), W4A4, tmp_path / "saving")
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(saving), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-3)
    one, two = (load_history(tmp_path / n / "metrics.jsonl")[1] for n in ("plain", "saving"))
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-3)


def test_narrow_arithmetic_leaves_the_rotations_wide(model, tokens, tmp_path):
    learned = run(model, tokens, replace(SHORT, compute_dtype="bfloat16"), W4A4, tmp_path)
    assert {x.dtype for x in jax.tree.leaves(learned)} == {jnp.dtype("float32")}
    assert orthogonality_error(learned.rotations.residual) < 1e-5
    losses = [line["loss"] for line in load_history(tmp_path / "metrics.jsonl")[1:]]
    assert np.isfinite(losses).all()


@pytest.mark.parametrize("objective", ["kl", "layer_reconstruction", "fisher", "whip"])
def test_each_kind_of_batch_is_learned_from(model, tokens, tmp_path, objective):
    scales = objective != "whip"
    settings = replace(SHORT, objective=objective, scales=scales, steps=8, batch=16, windows=16)
    run(model, tokens, settings, W16A4, tmp_path)
    held_out = [line.get("held_out") for line in load_history(tmp_path / "metrics.jsonl")]
    assert min(x for x in held_out[1:] if x) < held_out[0]


def test_a_start_that_computes_r1_needs_it_whole(model, tokens, tmp_path):
    sites = RotationSites(residual=False)
    settings = replace(SHORT, start="balanced", steps=1)
    with pytest.raises(InputError, match="balanced needs rotations"):
        learn(model, tokens, settings, W16A4, sites=sites, seed=0, folder=tmp_path)
    assert fisher_settings(settings, sites).start == "hadamard"
