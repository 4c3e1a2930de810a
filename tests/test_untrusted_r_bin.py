"""R.bin from anywhere: SpinQuant's and DartQuant's are read, all else is one sentence."""

import io
import pickle
import subprocess
import sys
import textwrap
import zipfile

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qrot.errors import InputError
from qrot.export.read_spinquant import R1, R2, read_spinquant
from qrot.files.torch_file import open_torch_file
from qrot.model.config import ModelConfig
from qrot.model.forward import forward
from qrot.network import fold, fuse
from qrot.rotation.forms import Dense

torch = pytest.importorskip("torch")
SIZES = ModelConfig("llama", 48, 56, 3, 4, 2, 12, 97)


def orthogonal(*shape, seed=0):
    return np.linalg.qr(np.random.default_rng(seed).normal(size=shape))[0].astype(np.float32)


def spinquant(**changes):
    """R1, and one R2 a layer."""
    values = {R2.format(i): torch.tensor(orthogonal(12, 12, seed=i + 1)) for i in range(3)}
    return {R1: torch.tensor(orthogonal(48, 48)), **values, **changes}


def dartquant():
    """R1, and one R2 a layer and kv head."""
    values = {R2.format(i): torch.tensor(orthogonal(2, 12, 12, seed=i + 1)) for i in range(3)}
    return {R1: torch.tensor(orthogonal(48, 48)), **values}


def refused(path, *words, config=SIZES):
    with pytest.raises(InputError) as error:
        read_spinquant(path, config)
    sentence = str(error.value)
    assert sentence.startswith(f"{path}: ")
    assert sentence.isprintable()
    assert len(sentence) < len(str(path)) + 300
    assert "weights_only" not in sentence
    assert all(word in sentence for word in words), sentence


# What is read


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize(
    "change",
    [
        lambda x: x,
        lambda x: x.double(),
        torch.nn.Parameter,
        lambda x: x.T.contiguous().T,  # as torch.linalg.qr returns them, column by column
        lambda x: torch.stack([x, x])[1],
    ],
    ids=["as it is", "float64", "a parameter", "transposed", "a part of another"],
)
def test_tensors_are_read_as_pytorch_has_them(tmp_path, change, protocol):
    tensors = {name: change(x) for name, x in spinquant().items()}
    torch.save(tensors, tmp_path / "R.bin", pickle_protocol=protocol)
    found = read_spinquant(tmp_path / "R.bin", SIZES).rotations
    np.testing.assert_array_equal(found["residual"].matrix, tensors[R1].detach().numpy())
    for i in range(3):
        own = tensors[R2.format(i)].detach().numpy()
        np.testing.assert_array_equal(found["value"].matrix[i], own)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_brought_to_orthogonality(tmp_path, dtype):
    exact = spinquant()
    torch.save({name: x.to(dtype) for name, x in exact.items()}, tmp_path / "R.bin")
    found = read_spinquant(tmp_path / "R.bin", SIZES).rotations
    for matrix, name in ((found["residual"].matrix, R1), (found["value"].matrix[2], R2.format(2))):
        wide = np.asarray(matrix, np.float64)
        assert np.abs(wide @ wide.T - np.eye(len(wide))).max() < 1e-6
        assert np.abs(wide - exact[name].numpy()).max() < 4e-3


def test_an_ordered_mapping_and_any_prefix(tmp_path):
    import collections

    torch.save(collections.OrderedDict(spinquant()), tmp_path / "of a name.pt")
    assert "value" in read_spinquant(tmp_path / "of a name.pt", SIZES, online=False).rotations


def test_dartquant_has_one_r2_a_kv_head(variant, tmp_path):
    """Each is what its kv head turns by; the network computes the same with them."""
    network = fold(variant("llama-biases").network)
    torch.save(dartquant(), tmp_path / "R.bin")
    transform = read_spinquant(tmp_path / "R.bin", network.config)
    value = transform.rotations["value"]
    assert isinstance(value, Dense)
    assert value.stack == (3, 2)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 97, (2, 10)))
    expected, found = (forward(x, tokens) for x in (network, fuse(network, transform)))
    assert np.abs(expected - found).max() < 1e-4 * np.abs(expected).max()
    fused = fuse(network, read_spinquant(tmp_path / "R.bin", network.config, online=False))
    before, after = (np.asarray(x.params.layers.v.bias, np.float64) for x in (network, fused))
    for i in range(3):
        matrices = dartquant()[R2.format(i)].double().numpy()
        heads = np.einsum("hi,hij->hj", before[i].reshape(2, 12), matrices)
        np.testing.assert_allclose(after[i].reshape(2, 12), heads, atol=1e-5)


def test_dartquants_two_files(tmp_path):
    tensors, first, second = dartquant(), tmp_path / "r1.pt", tmp_path / "r2.pt"
    torch.save({R1: tensors.pop(R1)}, first)
    torch.save(tensors, second)
    found = read_spinquant(first, SIZES, more=[second]).rotations
    assert found["value"].stack == (3, 2)
    refused(first, "has no model.layers.0.self_attn.R2", "may be in two files")
    refused(second, "has no R1")
    with pytest.raises(InputError, match=r"has R1, as .*r1\.pt has"):
        read_spinquant(first, SIZES, more=[first, second])


# What is not


class Evil:
    def __reduce__(self):
        return (print, ("\x1b[31mrun",))


WRONG = {
    "another model": (lambda: spinquant(R1=torch.eye(64)), "R1 is 64 x 64, and this model needs"),
    "a model of 4 layers": (lambda: spinquant(**{R2.format(3): torch.eye(12)}), "layers.3.self_at"),
    "more": (lambda: spinquant(R4=torch.eye(56)), "holds R4, which no R.bin of this model has"),
    "escape codes": (lambda: spinquant(**{"\x1b[31m": torch.eye(3)}), r"holds '\x1b[31m', which"),
    "few heads": (lambda: spinquant(**{R2.format(0): torch.eye(12)[None]}), "is 1 x 12 x 12"),
    "mixed heads": (lambda: spinquant(**{R2.format(0): dartquant()[R2.format(0)]}), "in some laye"),
    "nan": (lambda: spinquant(R1=torch.full((48, 48), torch.nan)), "R1 is not orthogonal"),
    "huge": (lambda: spinquant(R1=1e300 * torch.eye(48).double()), "R1 is not orthogonal"),
    "integers": (lambda: spinquant(R1=torch.eye(48).int()), "torch.IntStorage, which is none"),
    "truths": (lambda: spinquant(R1=torch.eye(48) > 0), "torch.BoolStorage, which is none"),
    "complex": (lambda: spinquant(R1=torch.eye(48).cfloat()), "torch.ComplexFloatStorage"),
    "sparse": (lambda: spinquant(R1=torch.eye(48).to_sparse()), "_get_layout, which is no dense"),
    "meta": (lambda: spinquant(R1=torch.empty(48, 48, device="meta")), "_rebuild_meta_tensor"),
    "float8": (lambda: spinquant(R1=torch.eye(48).to(torch.float8_e4m3fn)), "UntypedStorage"),
    "a number": (lambda: spinquant(R1=3), "R1 is no tensor"),
    "a list": (lambda: spinquant(R1=[torch.eye(48)]), "holds other things than tensors"),
    "a mapping": (lambda: spinquant(R1={"a": torch.eye(48)}), "R1 is no tensor"),
    "null": (lambda: spinquant(R1=None), "R1 is no tensor"),
    "a name of numbers": (lambda: {0: torch.eye(48)}, "no mapping from names to tensors"),
    "a tensor alone": (lambda: torch.eye(48), "no mapping from names to tensors"),
    "a list alone": (lambda: [torch.eye(48)], "holds other things than tensors"),
    "a program": (lambda: spinquant(R1=Evil()), "print, which is no dense tensor"),
    "stretched": (lambda: spinquant(R1=torch.ones(1, 1).expand(48, 48)), "R1 is not orthogonal"),
}


@pytest.mark.parametrize("name", WRONG)
def test_tensors_that_are_wrong(tmp_path, capsys, name):
    make, words = WRONG[name]
    torch.save(make(), tmp_path / "R.bin")
    refused(tmp_path / "R.bin", words)
    assert not capsys.readouterr().out  # nothing in it was run


def test_quantised_tensors_and_negative_views(tmp_path):
    with pytest.warns(UserWarning, match="deprecated"):
        quantised = torch.quantize_per_tensor(torch.eye(48), 0.1, 0, torch.qint8)
    torch.save(spinquant(R1=quantised), tmp_path / "R.bin")
    refused(tmp_path / "R.bin", "torch.")
    torch.save(spinquant(R1=torch._neg_view(torch.eye(48))), tmp_path / "R.bin")
    refused(tmp_path / "R.bin", "R1 is no plain tensor")


def archive(path, tensors, change=lambda name, data: data, **options):
    """An R.bin whose entries are changed and written anew."""
    torch.save(tensors, memory := io.BytesIO())
    with zipfile.ZipFile(memory) as old, zipfile.ZipFile(path, "w", **options) as new:
        for name in old.namelist():
            if (data := change(name, old.read(name))) is not None:
                new.writestr(name, data)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda n, d: None if n.endswith("data.pkl") else d, "not a file of tensors"),
        (lambda n, d: None if n.endswith("/data/0") else d, "R1 has a shape that its numbers"),
        (lambda n, d: d[:-4] if n.endswith("/data/0") else d, "R1 has a shape that its numbers"),
        (lambda n, d: b"big" if n.endswith("byteorder") else d, "not little-endian"),
        (lambda n, d: d[:50] if n.endswith("data.pkl") else d, "its pickle is damaged"),
        (lambda n, d: b"" if n.endswith("data.pkl") else d, "its pickle"),
        (lambda n, d: b"." if n.endswith("data.pkl") else d, "its pickle is damaged"),
        (
            lambda n, d: b"\x80\x02" + b"h\x07." if n.endswith("data.pkl") else d,
            "pickle is damaged",
        ),
        (lambda n, d: pickle.dumps(b"x") if n.endswith("data.pkl") else d, "other things than"),
        (
            lambda n, d: b"\x80\x02)" + b"\x85" * 10**4 + b"." if n.endswith("l") else d,
            "no mapping",
        ),
        (lambda n, d: d.replace(b"K0K0", b"K\xffK\xff") if n.endswith("l") else d, "its numbers"),
    ],
)
def test_archives_that_are_wrong(tmp_path, change, words):
    archive(tmp_path / "R.bin", spinquant(), change)
    refused(tmp_path / "R.bin", words)


def test_files_that_are_none(tmp_path):
    path = tmp_path / "R.bin"
    torch.save(spinquant(), path)
    content = path.read_bytes()
    for wrong in (b"", b"nothing", content[:-30], content[: len(content) // 2], b"PK" * 999):
        path.write_bytes(wrong)
        refused(path, "not a file of tensors as torch.save has them, or damaged")
    flipped = bytearray(content)
    flipped[content.index(spinquant()[R1].numpy().tobytes()[:64])] ^= 1
    path.write_bytes(flipped)
    refused(path, "damaged")  # which the checksum of the zip tells
    torch.save(spinquant(), path, _use_new_zipfile_serialization=False)
    refused(path, "not a file of tensors as torch.save has them")
    for absent in (tmp_path / "absent", tmp_path):
        refused(absent, "cannot be read")


def test_bombs(tmp_path):
    """Sizes are bounded by those of the model before anything is read."""
    path = tmp_path / "R.bin"
    archive(path, spinquant(), compression=zipfile.ZIP_DEFLATED)
    refused(path, "is compressed or encrypted")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bomb:
        bomb.writestr("archive/data.pkl", bytes(50_000_000))
    refused(path, "is compressed or encrypted")
    with path.open("wb") as sparse:
        sparse.truncate(2_000_000_000)
    refused(path, "2,000,000,000 bytes, which is more than")


def test_a_directory_of_many_entries(tmp_path):
    """Each would be an object of Python's."""
    path = tmp_path / "R.bin"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x", b"")
    content = path.read_bytes()
    end = content.rindex(b"PK\x05\x06")
    start = content.index(b"PK\x01\x02")
    directory = content[start:end] * 50_000
    sizes = len(directory).to_bytes(4, "little") + content[end + 16 : end + 20]
    path.write_bytes(content[:start] + directory + content[end : end + 12] + sizes + b"\0\0")
    with pytest.raises(InputError, match="not a file of tensors"):
        open_torch_file(path, 1 << 30)


MEMORY = """
    import resource, sys
    from pathlib import Path
    from qrot.files.torch_file import open_torch_file
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert open_torch_file(Path(sys.argv[1]), 1 << 20) == {}
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_pickle_that_asks_for_much_memory_gets_none(tmp_path):
    """A memo of four thousand million places, for which Python's own unpickler takes 32 GB."""
    path = tmp_path / "R.bin"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", b"\x80\x02}r\xff\xff\xff\xff.")
    command = [sys.executable, "-c", textwrap.dedent(MEMORY), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 50_000  # KiB


def read_or_refused(path):
    """Reading all of a file either works or is one sentence."""
    try:
        for tensor in open_torch_file(path, 1 << 20).values():
            assert tensor.whole().shape == tensor.shape
    except InputError as error:
        sentence = str(error)
    else:
        return
    assert sentence.startswith(f"{path}: ")
    assert sentence.isprintable()


def scrambled(data, content):
    """Contents of which some bytes are others."""
    content = bytearray(content)
    places = st.integers(0, len(content) - 1)
    for place in data.draw(st.lists(places, min_size=1, max_size=4)):
        content[place] = data.draw(st.integers(0, 255))
    return bytes(content)


fuzz = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
SMALL = {"a": torch.eye(3), "b": torch.eye(2).bfloat16().T}


@fuzz
@given(st.data())
def test_every_byte_that_is_changed_is_read_or_one_sentence(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "mutated.bin"
    torch.save(SMALL, memory := io.BytesIO())
    path.write_bytes(scrambled(data, memory.getvalue()))
    read_or_refused(path)


@fuzz
@given(st.data())
def test_every_pickle_is_read_or_one_sentence(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "pickled.bin"
    archive(path, SMALL, lambda n, d: scrambled(data, d) if n.endswith("data.pkl") else d)
    read_or_refused(path)
