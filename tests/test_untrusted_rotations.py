"""Rotation files that no loader may trust: one sentence each, whatever is wrong with them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rotation_files import META, SIZES, Text, everything, identity, orthogonal, read, signs, write

from qrot.errors import InputError
from qrot.hadamard.factors import hadamard_matrix
from qrot.rotation.store import load_rotations, save_rotations


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Tensors and values of the header of a file that is as it has to be."""
    path = tmp_path_factory.mktemp("good") / "rotations.safetensors"
    save_rotations(path, everything(), META)
    return read(path)


def refused(path, *words, **options):
    with pytest.raises(InputError) as error:
        load_rotations(path, **{"sizes": SIZES, **options})
    sentence = str(error.value)
    assert sentence.startswith(f"{path}: ")
    assert "\n" not in sentence
    assert len(sentence) < len(str(path)) + 500
    assert all(word in sentence for word in words), sentence


def test_the_good_one_is_read(tmp_path, good):
    write(path := tmp_path / "r.safetensors", *good)
    found, metadata = load_rotations(
        path, sizes=SIZES, identity=identity(META["digest"]), weight_bits=4
    )
    assert metadata == META
    assert jax.tree.structure(found) == jax.tree.structure(everything())
    for a, b in zip(*map(jax.tree.leaves, (found, everything())), strict=True):
        assert a.dtype == jnp.float32
        np.testing.assert_array_equal(a, b)


R, DOWN, KEY = "rotations.residual.matrix", "rotations.down", "rotations.key"
Q = orthogonal(48, 48)
TENSORS = {
    "nan": ({R: Q * np.nan}, "residual.matrix is not orthogonal"),
    "inf": ({R: np.where(Q[3, 5] == Q, np.inf, Q)}, "residual.matrix is not orthogonal"),
    "zeros": ({R: 0 * Q}, "R R^T - I reaches 1.0e+00, above 1e-04"),
    "three times": ({R: 3 * Q}, "R R^T - I reaches 8.0e+00"),
    "huge": ({R: np.float32(1e30) * Q}, "not orthogonal"),
    "huge in float64": ({R: 1e300 * Q.astype(np.float64)}, "not orthogonal"),
    "random": ({R: np.random.default_rng(1).normal(size=(48, 48))}, "not orthogonal"),
    "in float16": ({R: Q.astype(np.float16)}, "not orthogonal"),
    "one entry": ({R: Q + 2e-3 * (Q[3, 5] == Q)}, "above 1e-04"),
    "integers": ({R: (100 * Q).astype(np.int8)}, "int8, which is no floating one"),
    "truths": ({R: Q > 0}, "bool, which is no floating one"),
    "smaller": ({R: orthogonal(32, 32)}, "residual turns 32 values, and there are 48"),
    "a vector": ({R: Q[0]}, "cannot have the shape [48]"),
    "a scalar": ({R: Q[0, 0]}, "cannot have the shape []"),
    "a rectangle": ({R: Q[:, :32]}, "cannot have the shape [48, 32]"),
    "empty": ({R: Q[:0]}, "residual.matrix is empty"),
    "nothing": ({R: Q[:0, :0]}, "residual.matrix is empty"),
    "for each layer": ({R: orthogonal(3, 48, 48)}, "residual is stacked [3]"),
    "layers": ({"rotations.value.blocks": orthogonal(7, 2, 3, 4, 4)}, "value is stacked [7, 2]"),
    "heads": ({"rotations.value.blocks": orthogonal(3, 4, 3, 4, 4)}, "needs [3] or [3, 2]"),
    "one for all": ({"rotations.value.blocks": orthogonal(3, 4, 4)}, "value is stacked []"),
    "blocks of nan": ({"rotations.value.blocks": np.full((3, 2, 3, 4, 4), np.nan)}, "value.blocks"),
    "few blocks": ({"rotations.value.blocks": orthogonal(3, 2, 2, 4, 4)}, "value turns 8 values"),
    "half a sign": ({f"{DOWN}.signs": signs(3, 56) / 2}, "down.signs holds other numbers than 1"),
    "no sign": ({f"{DOWN}.signs": signs(3, 56) * np.nan}, "down.signs holds numbers that are not"),
    "few signs": ({f"{DOWN}.signs": signs(3, 28)}, "do not go together"),
    "left": ({f"{DOWN}.left": 2 * orthogonal(3, 7, 7)}, "down.left is not orthogonal"),
    "right of one layer": ({f"{DOWN}.right": orthogonal(8, 8)}, "do not go together"),
    "signs of one": ({f"{KEY}.signs": signs(1)[0]}, "key.signs cannot have the shape []"),
    "signs of 8": ({f"{KEY}.signs": signs(8)}, "key turns 8 values, and there are 12"),
    "signs of 10": ({f"{KEY}.signs": signs(10)}, "a block of 4 does not divide 10"),
    "another factor": ({f"{KEY}.factor0": np.ones((4, 4), np.int8)}, "other Hadamard matrices"),
    "a factor of floats": ({f"{KEY}.factor0": signs(4, 4)}, "other Hadamard matrices"),
    "a factor of zeros": ({f"{KEY}.factor0": np.zeros((4, 4), np.int8)}, "other Hadamard"),
    "a factor too many": ({f"{KEY}.factor1": np.ones((4, 4), np.int8)}, "other Hadamard"),
    "a factor without axes": ({f"{KEY}.factor0": np.int8(1)}, "other Hadamard matrices"),
    "factor of no number": ({f"{KEY}.factors": np.ones((1, 1), np.int8)}, "other Hadamard"),
    "a name": ({"foo": Q}, "holds foo, which no rotation file has"),
    "a tree": ({"evil.residual": Q}, "holds evil.residual, which no"),
    "escape codes": ({"\x1b[31m": Q}, r"holds '\x1b[31m', which no"),
    "a long name": ({"x" * 1000: Q}, "holds 'xxx"),
    "a rotation": ({"rotations.evil": Q}, "there is no rotation evil, but residual, key, value"),
    "a rotation of dots": ({"rotations.": Q}, "there is no rotation '', but"),
    "a part": ({"rotations.residual.evil": Q}, "residual is of no form"),
    "a deep part": ({"rotations.residual.a.b": Q}, "residual is of no form"),
    "a block as a tensor": ({"rotations.key.block": signs(4)}, "key is of no form"),
    "another scale": ({"scales.residual": signs(3, 48)}, "holds scales.residual, which no"),
    "a scale of o": ({"scales.o": signs(3, 48)}, "holds scales.o, which no"),
    "a scale of nan": ({"scales.qkv": np.full((3, 48), np.nan)}, "scales.qkv holds numbers that"),
    "a scale of e^100": ({"scales.qkv": np.full((3, 48), 100.0)}, "scales.qkv holds logarithms"),
    "a short scale": ({"scales.down": signs(3, 48)}, "scales.down has the shape [3, 48], and"),
    "a scale of pairs": ({"scales.keys": signs(3, 2, 12)}, "needs [3, 1, 6] or [3, 2, 6]"),
    "integer scales": (
        {"scales.qkv": np.ones((3, 48), np.int32)},
        "scales.qkv has the dtype int32",
    ),
    "another shift": ({"shifts.evil": Q}, "holds shifts.evil, which no"),
    "a shift of keys": ({"shifts.keys": signs(3, 24)}, "holds shifts.keys, which no"),
    "a shift of inf": ({"shifts.o": np.full((3, 48), np.inf)}, "shifts.o holds numbers that"),
    "a shift in float64": ({"shifts.o": np.full((3, 48), 1e200)}, "shifts.o holds numbers that"),
    "a short shift": ({"shifts.o": signs(2, 48)}, "shifts.o has the shape [2, 48]"),
    "another clip": ({"clips.activations": signs(3)}, "holds clips.activations, which no"),
    "a clip of nan": ({"clips.o": np.full(3, np.nan)}, "clips.o holds numbers that"),
    "a clip of 0": ({"clips.o": np.zeros(3)}, "clips.o holds clip ratios outside 0 to 1"),
    "a clip of 2": ({"clips.o": np.full(3, 2.0)}, "clips.o holds clip ratios outside 0 to 1"),
    "clips of 2 layers": ({"clips.o": np.ones(2)}, "clips.o has the shape [2], and this model"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_are_wrong(tmp_path, good, name):
    changes, words = TENSORS[name]
    tensors, header = good
    write(path := tmp_path / "r.safetensors", tensors | changes, header)
    refused(path, words)


def forms(**changes):
    return {
        "forms": {"residual": {"form": "dense"}, "value": {"form": "blocks"}}
        | {"key": {"form": "hadamard", "block": 4}, "down": {"form": "kronecker"}, **changes}
    }


def key(block):
    return forms(key={"form": "hadamard", "block": block})


HEADERS = {
    "no forms": ({"forms": None}, "its forms are None"),
    "a list of forms": ({"forms": []}, "its forms are []"),
    "a form of text": (forms(residual="dense"), "residual is of no form"),
    "a form that is a list": (forms(residual={"form": ["dense"]}), "residual is of no form"),
    "another form": (forms(residual={"form": "givens"}), "residual is of no form"),
    "another's form": (forms(residual={"form": "hadamard", "block": 4}), "residual is of no form"),
    "a key too many": (forms(residual={"form": "dense", "matrix": 3}), "residual is of no form"),
    "a block too many": (forms(residual={"form": "dense", "block": 4}), "residual is of no form"),
    "a form too many": (forms(evil={"form": "dense"}), "there is no rotation evil"),
    "no block": (forms(key={"form": "hadamard"}), "key is of no form"),
    "a block of text": (key("x"), "key: a block of 'x' does not divide 12"),
    "a block of a fraction": (key(4.0), "key: a block of 4.0 does not divide 12"),
    "a block of truth": (key(True), "key: a block of True does not divide 12"),
    "a block of 0": (key(0), "key: a block of 0 does not divide 12"),
    "a block of 5": (key(5), "key: a block of 5 does not divide 12"),
    "a negative block": (key(-4), "key: a block of -4 does not divide 12"),
    "a list of blocks": (key([4]), "key: a block of [4] does not divide 12"),
    "an unknown order": (key(6), "key: no Hadamard transform of order 6"),
    "another block": (key(12), "other Hadamard matrices"),
    "a huge block": (key(10**30), "does not divide 12"),
    "digest: a list": ({"digest": []}, "metadata.digest: Input should be a valid string"),
    "digest: nothing": ({"digest": ""}, "does not say which model it was fitted to"),
    "model: a number": ({"model": 5}, "metadata.model: Input should be a valid string"),
    "model: null": ({"model": None}, "metadata.model: Input should be a valid string"),
    "row: a list": ({"row": ["a"]}, "metadata.row: "),
    "seed: text": ({"seed": "3"}, "metadata.seed: Input should be a valid integer"),
    "scheme: a list": ({"scheme": []}, "metadata.scheme: "),
    "scheme: text": ({"scheme": "x"}, "metadata.scheme: "),
    "scheme: null": ({"scheme": None}, "metadata.scheme: "),
    "bits: text": ({"trained_weight_bits": "x"}, "metadata.trained_weight_bits: "),
    "bits: a truth": ({"trained_weight_bits": True}, "metadata.trained_weight_bits: "),
    "weights: a list": ({"weights": []}, "metadata.weights: "),
    "weight_method: a list": ({"weight_method": []}, "metadata.weight_method: "),
    "calibration: a list": ({"calibration": [1]}, "metadata.calibration: "),
    "data: text": ({"data": "files"}, "metadata.data: "),
    "no JSON": ({"scheme": Text("{")}, "scheme in its header: not valid JSON"),
    "deep JSON": ({"scheme": Text("[" * 100_000)}, "scheme in its header: not valid JSON"),
    "JSON with a key twice": ({"scheme": Text('{"a": 1, "a": 2}')}, "the key 'a' is there twice"),
    "half a character": ({"row": Text(r'"\ud800"')}, "row in its header: not valid JSON"),
    "another format": ({"format": "qrot rotations 99"}, "not a rotation file of qrot"),
    "the first format": ({"format": "qrot rotations 1"}, "not a rotation file of qrot"),
    "a foreign format": ({"format": Text("pt")}, "not a rotation file of qrot"),
    "a network": ({"format": "qrot network 1"}, "not a rotation file of qrot"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_that_are_wrong(tmp_path, good, name):
    changes, words = HEADERS[name]
    tensors, header = good
    write(path := tmp_path / "r.safetensors", tensors, header | changes)
    refused(path, words)


@pytest.mark.parametrize("missing", ["format", "forms", "model", "digest"])
def test_headers_that_lack_something(tmp_path, good, missing):
    tensors, header = good
    left = {key: x for key, x in header.items() if key != missing}
    write(path := tmp_path / "r.safetensors", tensors, left)
    refused(path)


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        (R, "its tensors are not those of residual"),
        (f"{DOWN}.left", "down is of no form"),
        (f"{KEY}.factor0", "key comes without the factors of its Hadamard matrix"),
    ],
)
def test_parts_that_are_missing(tmp_path, good, missing, words):
    tensors, header = good
    left = {name: x for name, x in tensors.items() if name != missing}
    write(path := tmp_path / "r.safetensors", left, header)
    refused(path, words)


# Formats 2 and 3, in which a matrix has no name of its own


def older(version, blocks, changes=None):
    """A file of before: residual whole, values by layer, key in blocks of 4."""
    tensors = {
        "rotations.residual": Q,
        "rotations.value": orthogonal(3, 12, 12),
        "rotations.key.signs": signs(12),
        "clips.o": np.ones(3, np.float32),
    }
    if version == 3:
        tensors["rotations.key.factor0"] = np.array(hadamard_matrix(4))
    header = {"format": f"qrot rotations {version}", "blocks": blocks, **META}
    return tensors | (changes or {}), header


BLOCKS = {
    "null": (None, "its blocks are None"),
    "a list": ([], "its blocks are []"),
    "no site": ({}, "its tensors are not those of"),
    "another site": ({"key": 4, "evil": 4}, "there is no rotation evil"),
    "a site without signs": ({"key": 4, "residual": 0}, "has blocks for residual"),
    "text": ({"key": "x"}, "key: a block of 'x' does not divide 12"),
    "0": ({"key": 0}, "key: a block of 0 does not divide 12"),
    "5": ({"key": 5}, "key: a block of 5 does not divide 12"),
    "-4": ({"key": -4}, "key: a block of -4 does not divide 12"),
}
OLDER = {
    "nan": ({"rotations.residual": Q * np.nan}, "residual.matrix is not orthogonal"),
    "zeros": ({"rotations.residual": Q * 0}, "residual.matrix is not orthogonal"),
    "a vector": ({"rotations.residual": Q[0]}, "residual.blocks cannot have the shape [48]"),
    "a scalar": ({"rotations.residual": Q[0, 0]}, "cannot have the shape []"),
    "3 axes": ({"rotations.residual": Q.reshape(4, 12, 48)}, "cannot have the shape [4, 12, 48]"),
    "blocks": ({"rotations.residual": orthogonal(2, 12, 12)}, "residual turns 24 values"),
    "6 axes": ({"rotations.value": np.ones((1, 3, 2, 3, 4, 4))}, "value is stacked [1, 3, 2]"),
    "layers": ({"rotations.value": orthogonal(7, 12, 12)}, "value is stacked [7]"),
    "half a sign": ({"rotations.key.signs": signs(12) / 2}, "key.signs holds other numbers"),
    "a site": ({"rotations.fused": np.zeros(1, np.float32)}, "there is no rotation fused"),
    "twice": ({"rotations.residual.signs": signs(48)}, "residual is of no form"),
    "integers": ({"rotations.residual": (Q * 9).astype(np.int16)}, "has the dtype int16"),
}


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("name", [*BLOCKS, *(f"tensors: {name}" for name in OLDER)])
def test_older_files_that_are_wrong(tmp_path, name, version):
    path = tmp_path / "r.safetensors"
    write(path, *older(version, {"key": 4}))
    assert [*load_rotations(path, sizes=SIZES)[0].rotations] == ["key", "residual", "value"]
    blocks, changes = {"key": 4}, {}
    if name in BLOCKS:
        blocks, words = BLOCKS[name]
    else:
        changes, words = OLDER[name.removeprefix("tensors: ")]
    write(path, *older(version, blocks, changes))
    refused(path, words)


def test_only_format_2_may_lack_the_factors(tmp_path):
    tensors, header = older(3, {"key": 4})
    factor = tensors.pop("rotations.key.factor0")
    write(path := tmp_path / "r.safetensors", tensors, header)
    refused(path, "key comes without the factors of its Hadamard matrix")
    write(path, *older(2, {"key": 4}, {"rotations.key.factor0": np.rot90(factor)}))
    refused(path, "key was made with other Hadamard matrices")
