"""Tiny models that GGUF's blocks divide, and what is exported of them."""

import json

import gguf
import numpy as np
from exports import about, fused
from models import VARIANTS, write_folder
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from qrot.grid import Grid
from qrot.model.io.load import load
from qrot.quantize.gptq import Gptq, gptq
from qrot.quantize.keep import save_network
from qrot.quantize.rtn import rtn
from qrot.rotation.random import RotationSites, random_rotations
from qrot.rotation.store import save_rotations
from qrot.rotation.transform import Transform

SIZES = {"hidden_size": 64, "intermediate_size": 96}  # which 32 divides
TOKENS = np.random.default_rng(7).integers(0, 97, (1, 24), np.int32)
G32 = Grid(4, "symmetric", "group", 32)
GGUF = ("--format", "gguf")


def byte_level():
    """97 byte-level tokens, two of them special, one of them two characters."""
    printed = [chr(i) for i in range(33, 124)]
    words = ["<s>", "</s>", *printed[:-2], "Ġ", "Ċ", "th", "12", "<|x|>", "e"]
    words = list(dict.fromkeys(words))
    vocabulary = {word: i for i, word in enumerate(words)}
    made = Tokenizer(models.BPE(vocabulary, [("t", "h"), ("1", "2")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>"])
    made.add_tokens([AddedToken("<|x|>", normalized=False)])
    return made


def model(path, name, **changes):
    """A tiny model of a variant in a folder of its own, of sizes that 32 divides."""
    architecture, own = VARIANTS[name]
    folder = path / name
    write_folder(folder, architecture, **{**SIZES, **own, **changes})
    byte_level().save(str(folder / "tokenizer.json"))
    template = {"chat_template": "{{ messages }}", "pad_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(template))
    return folder


def rotated(folder, **sites):
    config = load(str(folder)).network.config
    return Transform(random_rotations(config, 0, sites=RotationSites(**sites)))


def in_run(folder, transform, scheme, change=rtn, **more):
    """A run folder with the network that it kept."""
    run = folder.parent / "run"
    run.mkdir()
    network = change(fused(folder, transform).replace(scheme=scheme))
    said = about(folder, network.scheme, **more)
    save_rotations(run / "rotations.safetensors", transform, said)
    save_network(run / "network.safetensors", network, said)
    return run, network


def by_gptq(network):
    return gptq(network, np.random.default_rng(5).integers(0, 97, (4, 16), np.int32), Gptq())


def only(folder):
    (path,) = folder.glob("*.gguf")
    return path


def stored(path):
    """By name the tensors of a file, as the gguf package reads it."""
    return {x.name: x for x in gguf.GGUFReader(path).tensors}
