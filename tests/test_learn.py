from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learning import SHORT, W4A4, W16A4, matrix, run
from looked import site_inputs

from qrot.calibrate.capture import mean_inputs
from qrot.errors import InputError
from qrot.evaluate.losses import token_nll
from qrot.grid import Grid
from qrot.learn import loop
from qrot.learn.batches import Batches
from qrot.learn.history import load_history
from qrot.learn.loop import held_out_loss, start_shifts
from qrot.learn.objectives.cross_entropy import cross_entropy
from qrot.learn.starting_point import settings_of_start, starting_point
from qrot.learn.starts.directions import balancing
from qrot.learn.stiefel import orthogonality_error
from qrot.model.forward import forward
from qrot.network import fold, fuse
from qrot.quantize.rtn import rtn
from qrot.rotation.forms import Blocks, Dense, orthogonal_parts, reorthonormalised
from qrot.rotation.random import RotationSites, random_rotations
from qrot.rotation.transform import Transform, map_rotations
from qrot.scheme import Override


@pytest.fixture(scope="module")
def network(variant):
    return fold(variant("qwen2").network)


@pytest.fixture(scope="module")
def tokens(network):
    return np.random.default_rng(0).integers(0, network.config.vocab_size, 640, dtype=np.int32)


@pytest.mark.parametrize("shifts", [False, True])
@pytest.mark.parametrize("scheme", [W16A4, W4A4], ids=["w16", "w4"])
def test_the_trained_network_is_the_fused_one(variant, tokens, scheme, shifts):
    # In float64: in float32 a last bit decides where a value lies on the edge of two levels.
    with jax.enable_x64(True):
        network = fold(variant("qwen2", "float64").network)
        rows = jnp.asarray(tokens[:64].reshape(2, 32))
        means = mean_inputs(network, np.asarray(rows)) if shifts else {}
        matrices = random_rotations(network.config, 1)
        transform = Transform(map_rotations(exact, matrices), shifts=means)
        quantised = network.replace(scheme=scheme)
        trained = cross_entropy(transform, quantised, rows)
        nll = loop_nll(forward(rtn(fuse(quantised, transform)), rows), rows)
        plain = loop_nll(forward(network, rows), rows)
    assert abs(nll - plain) > 0.01  # the grids do something
    assert float(trained) == pytest.approx(nll, rel=1e-5)


def exact(rotation):
    """In float64, and orthogonal to within it: so does `fuse` take it."""
    return reorthonormalised(jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), rotation))


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


def test_first_tokens_do_not_decide_a_shift(network, tokens):
    rows = tokens[:64].reshape(2, 32)
    site = site_inputs(network, jnp.asarray(rows))[1]["qkv"]
    expected = np.asarray(site).reshape(-1, 2, 32, site.shape[-1])[:, :, 1:].mean((1, 2))
    np.testing.assert_allclose(mean_inputs(network, rows)["qkv"], expected, atol=1e-5)


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
