import re
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
from looked import site_inputs
from models import write_variant
from orbax.checkpoint import v1 as ocp

from qrot.calibrate.capture import mean_inputs
from qrot.errors import InputError
from qrot.evaluate.losses import token_nll
from qrot.grid import Grid
from qrot.learn import loop
from qrot.learn.batches import Batches
from qrot.learn.history import load_history
from qrot.learn.loop import held_out_loss, learn, start_shifts
from qrot.learn.objectives.cross_entropy import cross_entropy
from qrot.learn.settings import Learn
from qrot.learn.starting_point import settings_of_start, starting_point, training_scheme
from qrot.learn.starts.directions import balancing
from qrot.learn.step import move, optimiser_state
from qrot.learn.stiefel import orthogonality_error
from qrot.model.forward import forward
from qrot.network import fold, fuse
from qrot.quantize.rtn import rtn
from qrot.rotation.forms import Blocks, Dense, orthogonal_parts
from qrot.rotation.random import RotationSites, random_rotations
from qrot.rotation.transform import Transform
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
def network(variant):
    return fold(variant("qwen2").network)


@pytest.fixture(scope="module")
def tokens(network):
    return np.random.default_rng(0).integers(0, network.config.vocab_size, 640, dtype=np.int32)


def run(network, tokens, settings, scheme, folder, **changes):
    folder.mkdir(exist_ok=True)
    options = {"sites": RotationSites(), "seed": 0, "folder": folder, **changes}
    return learn(network.replace(scheme=scheme), tokens, settings, **options)


def matrix(transform, name):
    """The one orthogonal matrix, or the stack of them, of a rotation."""
    (found,) = orthogonal_parts(transform.rotations[name]).values()
    return found


@pytest.mark.parametrize("shifts", [False, True])
@pytest.mark.parametrize("scheme", [W16A4, W4A4], ids=["w16", "w4"])
def test_the_trained_network_is_the_fused_one(network, tokens, scheme, shifts):
    rows = jnp.asarray(tokens[:64].reshape(2, 32))
    means = mean_inputs(network, np.asarray(rows)) if shifts else {}
    transform = Transform(random_rotations(network.config, 1), shifts=means)
    quantised = network.replace(scheme=scheme)
    trained = cross_entropy(transform, quantised, rows)
    nll = loop_nll(forward(rtn(fuse(quantised, transform)), rows), rows)
    plain = loop_nll(forward(network, rows), rows)
    assert abs(nll - plain) > 0.01  # the grids do something
    assert float(trained) == pytest.approx(nll, rel=1e-5)  # with this seed no value is on an edge


def loop_nll(logits, rows):
    logp = jax.nn.log_softmax(logits[:, :-1])
    return -float(jnp.take_along_axis(logp, rows[:, 1:, None], -1).mean())


@pytest.mark.parametrize("optimiser", ["cayley_sgd", "cayley_adam", "cayley_muon", "qr_adam"])
def test_learning_lowers_the_held_out_reconstruction_error(network, tokens, tmp_path, optimiser):
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
    learned = run(network, tokens, settings, scheme, tmp_path)
    history = load_history(tmp_path / "metrics.jsonl")
    held_out = [line["held_out"] for line in history if "held_out" in line]
    assert min(held_out) < 0.97 * held_out[0]
    assert orthogonality_error(matrix(learned, "residual")) < 1e-5
    assert orthogonality_error(matrix(learned, "value")) < 1e-5


def test_only_what_is_to_learn_moves(network, tokens, tmp_path):
    settings = replace(SHORT, learning_rate=0.02)
    learned = run(network, tokens, settings, W4A4, tmp_path)
    start = random_rotations(network.config, 0)
    for name in ("down", "key"):
        assert jnp.array_equal(learned.rotations[name].signs, start[name].signs)
    state_moved = load_history(tmp_path / "metrics.jsonl")
    assert len(state_moved) == settings.steps + 1
    assert learned.shifts
    assert all(((c >= 0.3) & (c <= 1)).all() for c in jax.tree.leaves(learned.clips))


def test_training_weights_at_16_bits_rounds_none(network):
    overrides = (Override("*.down", weights=8), Override("*.o", activations=8))
    scheme = replace(W4A4, overrides=overrides)
    settings = replace(SHORT, weight_bits=16)
    seen = training_scheme(network.replace(scheme=scheme), settings, RotationSites(), 0)
    assert not seen.rounds_weights
    assert seen.overrides == overrides[1:]
    assert replace(W16A4, overrides=overrides).rounds_weights


def test_a_searched_clip_is_one_ratio_in_training(network):
    scheme = replace(W4A4, weights=Grid(4, clip="mse"))
    seen = training_scheme(network.replace(scheme=scheme), SHORT, RotationSites(), 0)
    assert 0.4 < seen.weights.clip < 1
    assert replace(seen, weights=scheme.weights) == scheme


def test_first_tokens_do_not_decide_a_shift(network, tokens):
    rows = tokens[:64].reshape(2, 32)
    site = site_inputs(network, jnp.asarray(rows))[1]["qkv"]
    expected = np.asarray(site).reshape(-1, 2, 32, site.shape[-1])[:, :, 1:].mean((1, 2))
    np.testing.assert_allclose(mean_inputs(network, rows)["qkv"], expected, atol=1e-5)


def test_a_finished_run_is_not_run_again(network, tokens, tmp_path):
    first = run(network, tokens, SHORT, W16A4, tmp_path)
    called = []
    second = run(network, tokens, SHORT, W16A4, tmp_path, progress=lambda *_: called.append(1))
    assert not called
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert jnp.array_equal(a, b)


SCRIPT = """
    import sys
    from pathlib import Path
    import numpy as np
    from qrot.learn.loop import learn
    from qrot.network import fold
    from qrot.model.io.load import load
    from qrot.rotation.random import RotationSites
    sys.path.insert(0, sys.argv[3])
    from test_learn import SHORT, W4A4
    network = fold(load(sys.argv[1]).network).replace(scheme=W4A4)
    tokens = np.random.default_rng(0).integers(0, network.config.vocab_size, 640, dtype=np.int32)
    learned = learn(network, tokens, SHORT, sites=RotationSites(), seed=0,
                    folder=Path(sys.argv[2]), progress=lambda step, *_: print(step, flush=True))
    np.savez(Path(sys.argv[2]) / "result.npz", r1=learned.rotations["residual"].matrix,
             r2=learned.rotations["value"].matrix)
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


def test_divergence_is_rolled_back(network, tokens, tmp_path):
    # Whatever the held-out loss is, it is too much.
    run(network, tokens, replace(SHORT, divergence=1e-9), W16A4, tmp_path)
    history = load_history(tmp_path / "metrics.jsonl")
    messages = [line["step"] for line in history if "message" in line]
    assert messages == [2, 4, 6]
    rates = {line["step"]: line["learning_rate"] for line in history if line["step"]}
    assert rates[3] < 0.6 * rates[2]


def test_a_loss_that_is_not_finite_is_rolled_back(network, tokens, tmp_path, monkeypatch):
    original = loop.update

    def poisoned(*arguments):
        learned, state, loss, norm = original(*arguments)
        return learned, state, loss * jnp.nan, norm

    monkeypatch.setattr(loop, "update", poisoned)
    learned = run(network, tokens, replace(SHORT, steps=2), W16A4, tmp_path)
    start = random_rotations(network.config, 0)
    assert jnp.array_equal(matrix(learned, "residual"), start["residual"].matrix)


def test_too_short_a_text_is_refused(network, tokens, tmp_path):
    with pytest.raises(InputError, match="held out"):
        run(network, tokens[:32], SHORT, W16A4, tmp_path)


@pytest.mark.parametrize("start", ["orthogonal", "identity", "pca", "balanced"])
def test_every_start_is_orthogonal(network, tokens, tmp_path, start):
    settings = replace(SHORT, start=start, steps=1)
    learned = run(network, tokens, settings, W16A4, tmp_path)
    assert orthogonality_error(matrix(learned, "residual")) < 1e-5
    assert orthogonality_error(matrix(learned, "value")) < 1e-5


def test_a_start_can_be_learned_first(network, tokens, tmp_path, monkeypatch):
    told = []
    settings = replace(SHORT, start="fisher", fisher_steps=4, steps=2)
    monkeypatch.setattr(loop, "mean_inputs", None)  # the start has shifts of its own
    run(network, tokens, settings, W4A4, tmp_path, progress=lambda *said: told.append(said[:2]))
    assert told == [(i, 6) for i in range(1, 7)]
    first = load_history(tmp_path / "start" / "metrics.jsonl")
    assert first[-1]["held_out"] < first[0]["held_out"]
    # What is done is not done again, nor captured again.
    monkeypatch.setattr(loop, "capture", None)
    run(network, tokens, settings, W4A4, tmp_path)


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


def test_the_best_of_several_draws_is_where_it_starts(network, tokens, tmp_path):
    losses = []
    for draws in (1, 5):
        folder = tmp_path / str(draws)
        run(network, tokens, replace(SHORT, draws=draws, steps=1), W16A4, folder)
        losses.append(load_history(folder / "metrics.jsonl")[0]["held_out"])
    assert losses[1] < losses[0]


def test_all_that_can_be_learned_moves_and_stays_orthogonal(network, tokens, tmp_path):
    sites = RotationSites(down=4)
    settings = replace(SHORT, value_heads=True, online=("key", "down"), learning_rate=0.02)
    learned = run(network, tokens, settings, W4A4, tmp_path / "blocks", sites=sites)
    rotations, config = learned.rotations, network.config
    heads, hd = config.num_key_value_heads, config.head_dim
    for name in ("value", "key"):
        assert isinstance(rotations[name], Dense)
        assert rotations[name].matrix.shape == (3, heads, hd, hd)
    assert isinstance(rotations["down"], Blocks)
    assert rotations["down"].blocks.shape == (3, config.intermediate_size // 4, 4, 4)
    whole = run(network, tokens, settings, W4A4, tmp_path / "kronecker").rotations["down"]
    quantised, plain = network.replace(scheme=W4A4), replace(settings, shifts=False)
    start = starting_point(quantised, plain, RotationSites(), 0, {}).rotations["down"]
    assert jnp.array_equal(whole.signs, start.signs)
    for name in ("left", "right"):
        assert not jnp.array_equal(getattr(whole, name), getattr(start, name))
    for rotation in (*rotations.values(), whole):
        for part in orthogonal_parts(rotation).values():
            assert orthogonality_error(part) < 1e-5
    assert all((jnp.abs(log) > 0).any() for log in learned.scales.values())


@pytest.mark.parametrize("change", [{"accumulate": 2}, {"remat": True}])
def test_saving_memory_changes_no_step(network, tokens, tmp_path, change):
    settings = replace(SHORT, steps=1, evaluate_every=1)
    plain = run(network, tokens, settings, W4A4, tmp_path / "plain")
    saving = run(network, tokens, replace(settings, **change), W4A4, tmp_path / "saving")
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(saving), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-3)
    one, two = (load_history(tmp_path / n / "metrics.jsonl")[1] for n in ("plain", "saving"))
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-3)


def test_narrow_arithmetic_leaves_the_rotations_wide(network, tokens, tmp_path):
    learned = run(network, tokens, replace(SHORT, compute_dtype="bfloat16"), W4A4, tmp_path)
    assert {x.dtype for x in jax.tree.leaves(learned)} == {jnp.dtype("float32")}
    assert orthogonality_error(matrix(learned, "residual")) < 1e-5
    losses = [line["loss"] for line in load_history(tmp_path / "metrics.jsonl")[1:]]
    assert np.isfinite(losses).all()


@pytest.mark.parametrize("objective", ["kl", "layer_reconstruction", "fisher", "whip"])
def test_each_kind_of_batch_is_learned_from(network, tokens, tmp_path, objective):
    scales = objective != "whip"
    settings = replace(SHORT, objective=objective, scales=scales, steps=8, batch=16, windows=16)
    run(network, tokens, settings, W16A4, tmp_path)
    held_out = [line.get("held_out") for line in load_history(tmp_path / "metrics.jsonl")]
    assert min(x for x in held_out[1:] if x) < held_out[0]


def test_a_start_that_computes_r1_needs_it_whole(network, tokens, tmp_path):
    sites = RotationSites(residual=False)
    settings = replace(SHORT, start="balanced", steps=1)
    with pytest.raises(InputError, match="balanced needs rotations"):
        run(network, tokens, settings, W16A4, tmp_path, sites=sites)
    fisher = replace(settings, start="fisher")
    assert settings_of_start(fisher, sites).start == "hadamard"
    assert settings_of_start(fisher, RotationSites()).start == "balanced"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"objective": "fischer"},
            "learn.objective: there is no 'fischer'; did you mean 'fisher'?",
        ),
        (
            {"optimiser": "muon"},
            "learn.optimiser: there is no 'muon'; expected one of cayley_sgd, ",
        ),
        ({"start": "blanced"}, "learn.start: there is no 'blanced'; did you mean 'balanced'?"),
        ({"schedule": "step"}, "learn.schedule: there is no 'step'; expected one of constant, "),
        ({"online": ("value",)}, "learn.online: there is no 'value'; expected one of key, down"),
        ({"vectors": 1}, "learn.vectors: 1 is below 2"),
        ({"clip_floor": 0.0}, "learn.clip_floor: 0.0 is outside 0 to 1"),
        ({"clip_rate": 0.0}, "learn.clip_rate: 0.0 is not positive"),
    ],
)
def test_settings_that_there_are_none_of(changes, message):
    with pytest.raises(InputError, match=re.escape(message)):
        Learn(**changes)


def test_scales_and_clip_ratios_have_rates_and_a_floor_of_their_own():
    settings = replace(SHORT, scale_rate=0.02, clip_rate=0.1, clip_floor=0.85, learning_rate=0.5)
    transform = Transform(
        {"residual": Dense(jnp.eye(4))},
        {"qkv": jnp.zeros((2, 4))},
        {"qkv": jnp.zeros((2, 4))},
        {"qkv": jnp.array([1.0, 0.9])},
    )
    gradient = jax.tree.map(jnp.ones_like, transform)
    state = optimiser_state(transform, settings)
    # Half of the first step's rate, and Adam's first step is the rate.
    moved, _ = move(transform, gradient, state, 0.25, settings)
    np.testing.assert_allclose(moved.scales["qkv"], -0.01, rtol=1e-4)
    np.testing.assert_allclose(moved.clips["qkv"], [0.95, 0.85], rtol=1e-4)
    assert jnp.array_equal(moved.shifts["qkv"], transform.shifts["qkv"])


# Windows


def test_fewer_windows_than_parts_of_a_batch_are_refused(network, tokens, tmp_path):
    settings = replace(SHORT, batch=4, accumulate=4)
    with pytest.raises(InputError, match=r"learn\.accumulate: 4 parts need as many windows"):
        run(network, tokens[: 5 * 16], settings, W16A4, tmp_path)


def test_held_out_windows_count_alike(network):
    """Whatever the batch that they are in: five windows in batches of two, two and one."""
    draw = np.random.default_rng(0)
    rows = jnp.asarray(draw.integers(0, network.config.vocab_size, (5, 16), dtype=np.int32))
    transform = Transform(random_rotations(network.config, 0))
    parts = [(rows[:2], 2), (rows[2:4], 2), (rows[4:], 1)]
    batches = Batches(lambda step: rows, parts)
    found = held_out_loss(transform, network.replace(scheme=W16A4), batches, SHORT)
    quantised = network.replace(scheme=W16A4, online=transform)
    each = token_nll(forward(quantised, rows), rows).mean(-1)
    assert found == pytest.approx(float(each.mean()), rel=1e-5)
    uneven = np.mean([float(each[a:b].mean()) for a, b in ((0, 2), (2, 4), (4, 5))])
    assert abs(uneven - found) > 1e-3


@pytest.mark.parametrize(
    "changes",
    [{}, {"start": "pca"}, {"objective": "fisher"}, {"start": "fisher", "fisher_steps": 1}],
    ids=["tokens", "pca", "captured", "fisher"],
)
def test_start_shifts_are_those_that_learning_starts_with(network, tokens, tmp_path, changes):
    settings = replace(SHORT, steps=1, **changes)
    learned = run(network, tokens, settings, W16A4, tmp_path)
    shifts = start_shifts(network, tokens, replace(settings, shifts=False))
    assert shifts.keys() == learned.shifts.keys()
    for site, mu in shifts.items():
        np.testing.assert_array_equal(learned.shifts[site], mu)


# Checkpoints


@pytest.mark.parametrize(
    "changes",
    [
        {"settings": replace(SHORT, clip_floor=0.2)},
        {"scheme": W4A4},
        {"sites": RotationSites(key=False)},
        {"tokens": np.zeros(640, np.int32)},
    ],
    ids=["settings", "scheme", "sites", "text"],
)
def test_checkpoints_of_something_else_are_refused(network, tokens, tmp_path, changes):
    settings = replace(SHORT, steps=2)
    run(network, tokens, settings, W16A4, tmp_path)
    other = {"settings": settings, "scheme": W16A4, "tokens": tokens, **changes}
    sites = {"sites": other["sites"]} if "sites" in other else {}
    with pytest.raises(InputError, match=r"checkpoint: these checkpoints are of other settings"):
        run(network, other["tokens"], other["settings"], other["scheme"], tmp_path, **sites)


def test_checkpoints_of_an_older_qrot_are_refused(network, tokens, tmp_path):
    """They were leaves by number, and said nothing of what they belong to."""
    with ocp.training.Checkpointer(str((tmp_path / "checkpoint").absolute())) as checkpointer:
        checkpointer.save(2, {str(i): np.zeros(3) for i in range(4)})
    with pytest.raises(InputError, match=r"checkpoint: these checkpoints are of an older qrot"):
        run(network, tokens, SHORT, W16A4, tmp_path)


def test_checkpoints_know_their_fields_by_name(network, tokens, tmp_path):
    """What was saved under one name does not come back under another."""
    run(network, tokens, replace(SHORT, steps=2), W16A4, tmp_path)
    with ocp.training.Checkpointer(str((tmp_path / "checkpoint").absolute())) as checkpointer:
        saved = checkpointer.load(2)
    assert set(saved) == set(loop.State.__dataclass_fields__)
    assert saved["step"] == 2
    for name in ("transform", "best"):
        assert saved[name]["rotations.residual.matrix"].shape == (48, 48)
        assert {part.split(".")[0] for part in saved[name]} == set(Transform.__dataclass_fields__)
