"""Learning that stops and goes on: the same result, and no other run's checkpoints."""

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
from learning import SHORT, W4A4, W16A4, run
from models import write_variant
from orbax.checkpoint import v1 as ocp

from qrot.errors import InputError
from qrot.learn import loop
from qrot.learn.history import load_history
from qrot.network import fold
from qrot.rotation.random import RotationSites
from qrot.rotation.transform import Transform


@pytest.fixture(scope="module")
def network(variant):
    return fold(variant("qwen2").network)


@pytest.fixture(scope="module")
def tokens(network):
    return np.random.default_rng(0).integers(0, network.config.vocab_size, 640, dtype=np.int32)


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
    from learning import SHORT, W4A4
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


DAMAGED = {
    "contents": ("2/state/_METADATA", lambda file: file.write_bytes(file.read_bytes()[:999])),
    "no contents": ("2/state/_METADATA", Path.unlink),
    "numbers": ("2/state/manifest.ocdbt", lambda file: file.write_bytes(b"0" * 99)),
    "what it is": ("2/_CHECKPOINT_METADATA", lambda file: file.write_text("[]")),
    "nothing in it": ("3", Path.mkdir),
}


# The threads of TensorStore answer after Orbax has closed its loop.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_checkpoints_are_refused(network, tokens, tmp_path, name):
    settings, (file, damage) = replace(SHORT, steps=2), DAMAGED[name]
    run(network, tokens, settings, W16A4, tmp_path)
    damage(tmp_path / "checkpoint" / file)
    with pytest.raises(InputError, match=r"checkpoint: these checkpoints are damaged; remove the"):
        run(network, tokens, settings, W16A4, tmp_path)


def test_a_file_in_place_of_checkpoints_is_refused(network, tokens, tmp_path):
    (tmp_path / "checkpoint").write_text("x")
    with pytest.raises(InputError, match="checkpoint: is no folder"):
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
