"""Tiny models with rotation files to export, `qrot export` itself, and what PyTorch makes of it.

PyTorch and transformers are imported where they are used: the core suite has neither.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from learned import ALL, put, some_clips, some_shifts
from models import write_variant
from pydantic import TypeAdapter
from runs import A4
from tokenizers import Tokenizer, models, pre_tokenizers

from qrot import cli
from qrot.export.online import MODULE
from qrot.export.verify import load_with_module, logits_in_qrot
from qrot.grid import Grid, fake_quantise
from qrot.model.io.load import load
from qrot.network import fold, fuse
from qrot.quantize.keep import save_network
from qrot.quantize.rtn import rtn
from qrot.rotation.random import RotationSites, random_rotations
from qrot.rotation.store import save_rotations
from qrot.rotation.transform import Transform
from qrot.scheme import Scheme
from qrot.sites import PROJECTIONS
from qrot.text import Data, read_texts

TOKENS = np.random.default_rng(7).integers(0, 97, (1, 24), np.int32)
W4A4KV4 = Scheme(Grid(4, clip="mse"), A4, A4, A4)
ROW = "learned, seed 3"


def tokenizer():
    """97 words of the text that verification reads; the rest is unknown."""
    words = sorted(set(read_texts(Data()).evaluation.split()))[:96]
    vocabulary = {word: i for i, word in enumerate(["[UNK]", *words])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


def about(folder, scheme, **more):
    """What a file says of itself, for the model in `folder`."""
    return {
        "model": str(folder),
        "digest": load(str(folder)).digest,
        "scheme": TypeAdapter(Scheme).dump_python(scheme, mode="json"),
        "seed": 3,
        "row": ROW,
        "calibration": {"windows": 4, "length": 64},
        **more,
    }


def save(folder, transform, scheme, **more):
    """A rotation file for the model in `folder`, beside it."""
    path = folder.parent / f"{folder.name}.safetensors"
    save_rotations(path, transform, about(folder, scheme, **more))
    return path


def write_model(folder, name):
    """A tiny model with a tokenizer."""
    write_variant(folder, name)
    tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text('{"temperature": 0.5}')


def write_fitted(path, name, scheme=W4A4KV4, transform=None, **more):
    """A tiny model in a folder of its own, and the rotation file for it."""
    folder = path / name
    write_model(folder, name)
    if transform is None:
        transform = everything(load(str(folder)).network)
    return save(folder, transform, scheme, **more)


def write_run(path, name, transform, scheme, change=rtn, **more):
    """A tiny model in a folder of its own, and a run folder with the network that it kept."""
    folder, run = path / name, path / "run"
    write_model(folder, name)
    run.mkdir()
    network = change(fused(folder, transform).replace(scheme=scheme))
    save_rotations(run / "rotations.safetensors", transform, about(folder, scheme, **more))
    save_network(run / "network.safetensors", network, about(folder, network.scheme, **more))
    return run, network


def fused(folder, transform):
    """The model in `folder` with a transform in its weights."""
    return fuse(fold(load(str(folder)).network), transform)


def as_values(network):
    """Weights that are rounded, but are no integers of any scale, as QuIP's are."""
    rounded = rtn(network).params.layers
    change = {
        name: rounded.linear(name).replace(weight=1.03 * rounded.linear(name).weight, scale=None)
        for name in PROJECTIONS
    }
    return network.replace(params=network.params.replace(layers=rounded.replace(**change)))


def in_qrot(network, tokens=TOKENS):
    return logits_in_qrot(network)(tokens)


def everything(network):
    """All that can be put on a network."""
    transform, draw = jax.tree.map(jnp.float32, put(network, ALL)), np.random.default_rng(3)
    return transform.replace(shifts=some_shifts(network, draw), clips=some_clips(network, draw))


def hadamard(name, tmp_path, **sites):
    folder = tmp_path / "sizes"
    write_variant(folder, name)
    config = load(str(folder)).network.config
    return Transform(random_rotations(config, 0, sites=RotationSites(**sites)))


def export(monkeypatch, *arguments):
    """`qrot export ...` in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", ["qrot", "export", *map(str, arguments)])
    try:
        cli.main()
    except SystemExit as end:
        return end.code or 0
    return 0


def logits(model, tokens=TOKENS):
    import torch

    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.float().numpy()


def opened(folder, **options):
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def opened_by_module(folder):
    """What the module in an exported folder makes of it."""
    return load_with_module(folder, MODULE)


def watched(model):
    """(layer, input, output) of each quantised linear layer, filled in as the model runs."""
    import torch

    seen = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_hook(
                lambda m, x, y: seen.append((m, x[0].numpy().copy(), y.detach()))
            )
    return seen


def logits_with_rounded_inputs(quantised, scheme, layers=3):
    """The logits; asserts that each quantised layer rounds its inputs as qrot's grid does."""
    import torch

    seen = watched(quantised)
    found = logits(quantised)
    assert len(seen) == 7 * layers
    for linear, x, y in seen:
        rounded = np.array(fake_quantise(jnp.asarray(x), scheme.activations))
        expected = torch.nn.functional.linear(torch.tensor(rounded), linear.weight, linear.bias)
        assert apart(y, expected.detach()) < 1e-5
    return found


def apart(a, b):
    return np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(np.asarray(b)).max()
