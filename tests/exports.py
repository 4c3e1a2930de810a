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
from qrot.text import Data, read_texts
from qrot.grid import Grid
from qrot.model.io.load import load
from qrot.rotation.random import RotationSites, random_rotations
from qrot.rotation.forms import Learned
from qrot.rotation.store import save_rotations
from qrot.scheme import Scheme

TOKENS = np.random.default_rng(7).integers(0, 97, (1, 24), np.int32)
W4A4KV4 = Scheme(Grid(4, clip="mse"), A4, A4, A4)


def tokenizer():
    """97 words of the text that verification reads; the rest is unknown."""
    words = sorted(set(read_texts(Data()).evaluation.split()))[:96]
    vocabulary = {word: i for i, word in enumerate(["[UNK]", *words])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


def save(folder, learned, scheme, digest=None):
    """A rotation file for the model in `folder`, beside it."""
    path = folder.parent / f"{folder.name}.safetensors"
    digest = digest or load(str(folder)).digest
    metadata = {
        "model": str(folder),
        "digest": digest,
        "scheme": TypeAdapter(Scheme).dump_python(scheme, mode="json"),
        "seed": 3,
    }
    save_rotations(path, learned, metadata)
    return path


def write_fitted(path, name, scheme=W4A4KV4, learned=None):
    """A tiny model in a folder of its own, and the rotation file for it."""
    folder = path / name
    write_variant(folder, name)
    tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text('{"temperature": 0.5}')
    return save(folder, everything(load(str(folder))) if learned is None else learned, scheme)


def everything(model):
    """All that can be learned."""
    rotations, scales = jax.tree.map(jnp.float32, put(model, ALL))
    draw = np.random.default_rng(3)
    return Learned(rotations, some_shifts(model, draw), some_clips(model, draw), scales)


def hadamard(name, tmp_path, **sites):
    folder = tmp_path / "sizes"
    write_variant(folder, name)
    return Learned(random_rotations(load(str(folder)).config, 0, sites=RotationSites(**sites)))


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


def apart(a, b):
    return np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(np.asarray(b)).max()
