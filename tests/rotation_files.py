"""Rotation files of every kind, to be changed and written again."""

import json

import numpy as np
from safetensors.numpy import load_file, save_file

from qrot.files.tensors import open_tensor_file
from qrot.identity import Identity
from qrot.model.config import ModelConfig
from qrot.rotation.forms import Blocks, Dense, Hadamard, Kronecker
from qrot.rotation.transform import Transform

SIZES = ModelConfig("llama", 48, 56, 3, 4, 2, 12, 97)
META = {
    "model": "tiny",
    "digest": "0" * 16,
    "seed": 3,
    "row": "learned, seed 3",
    "trained_weight_bits": 4,
    "scheme": {"weights": {"bits": 4}},
    "calibration": {"windows": 4, "length": 64},
}


def orthogonal(*shape):
    return np.linalg.qr(np.random.default_rng(0).normal(size=shape))[0].astype(np.float32)


def signs(*shape):
    return np.random.default_rng(1).choice([-1.0, 1.0], shape).astype(np.float32)


def everything():
    """Something of every form and of every tree."""
    rotations = {
        "residual": Dense(orthogonal(48, 48)),
        "value": Blocks(orthogonal(3, 2, 3, 4, 4)),
        "key": Hadamard(signs(12), 4),
        "down": Kronecker(signs(3, 56), orthogonal(3, 7, 7), orthogonal(3, 8, 8)),
    }
    draw = np.random.default_rng(2)
    scales = {"qkv": (48,), "gate_up": (48,), "down": (56,), "keys": (2, 6), "values": (2, 12)}
    shifts = {"qkv": 48, "o": 48, "gate_up": 48, "down": 56}
    clips = ("qkv", "keys", "values", "o", "gate_up", "down")
    return Transform(
        rotations,
        {name: np.float32(draw.normal(size=(3, *shape))) for name, shape in scales.items()},
        {name: np.float32(draw.normal(size=(3, n))) for name, n in shifts.items()},
        {name: np.float32(draw.uniform(0.5, 1, 3)) for name in clips},
    )


def read(path):
    """Tensors and values of the header of a file, to be changed and written again."""
    texts = open_tensor_file(path)[1]
    return load_file(path), {key: json.loads(text) for key, text in texts.items()}


def write(path, tensors, header):
    texts = {key: x if isinstance(x, Text) else json.dumps(x) for key, x in header.items()}
    save_file({name: np.asarray(x, order="C") for name, x in tensors.items()}, path, texts)


class Text(str):
    """A text that stands in a header as it is."""


def identity(digest):
    """Of a model whose files have this digest."""
    found = Identity({}, {}, [])
    vars(found)["of_files"] = digest
    return found
