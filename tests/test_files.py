"""Files that are whole or not there, and safetensors files written as tensors come."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from qrot.errors import InputError
from qrot.files.tensors import write_tensor_file, write_tensors
from qrot.files.whole import whole_file, whole_folder, write_text

TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(5, dtype=np.int8),
    "c": np.arange(4).astype(ml_dtypes.bfloat16),
    "d": np.array(2.5),
}


def equal(found):
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        np.testing.assert_array_equal(found[name], tensor)


def test_tensors_come_back_from_one_file_and_from_shards(tmp_path):
    write_tensors(tmp_path, TENSORS.items())
    equal(load_file(tmp_path / "model.safetensors"))
    (tmp_path / "shards").mkdir()
    write_tensors(tmp_path / "shards", TENSORS.items(), shard=16)
    index = json.loads((tmp_path / "shards" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 3  # a; b and c; d
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in TENSORS.values())
    found = {}
    for file in (tmp_path / "shards").glob("*.safetensors"):
        found |= load_file(file)
    assert {n: (tmp_path / "shards" / f).is_file() for n, f in index["weight_map"].items()} == (
        dict.fromkeys(TENSORS, True)
    )
    equal({name: found[name] for name in TENSORS})


def test_a_file_of_tensors_with_metadata_longer_than_a_header(tmp_path):
    file, about = tmp_path / "network.safetensors", {"about": "ä" * 300_000}
    write_tensor_file(file, TENSORS.items(), about)
    equal(load_file(file))
    with safe_open(file, "np") as opened:
        assert opened.metadata() == about


def test_a_failure_leaves_what_was_there(tmp_path):
    file = tmp_path / "a"
    write_text(file, "old")

    def halfway():
        yield "a", TENSORS["a"]
        raise KeyboardInterrupt

    for write in (lambda: write_tensor_file(file, halfway(), {}), lambda: half(file)):
        with pytest.raises(KeyboardInterrupt):
            write()
        assert file.read_text() == "old"
        assert [path.name for path in tmp_path.iterdir()] == ["a"]
    with pytest.raises(InputError, match="is there already"), whole_folder(tmp_path):
        pass
    with pytest.raises(KeyboardInterrupt), whole_folder(tmp_path / "b") as folder:
        write_tensors(folder, halfway())
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def half(file):
    with whole_file(file) as partial:
        partial.write_text("half")
        raise KeyboardInterrupt
