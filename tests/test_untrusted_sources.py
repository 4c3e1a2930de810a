"""What `qrot export` and `qrot import` are given: one sentence, exit code 2, nothing written."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
from exports import export, hadamard, write_run
from models import write_folder
from rotation_files import read, write

from qrot import cli
from qrot.errors import InputError
from qrot.export.source import open_source, weight_method
from qrot.grid import Grid
from qrot.scheme import Scheme

pytestmark = pytest.mark.usefixtures("quick_compile")


def refused(capsys, code):
    """The one sentence of a command that ended with this code."""
    assert code == 2
    sentence = capsys.readouterr().err
    assert sentence.startswith("qrot: ")
    assert sentence.count("\n") == 1
    assert sentence.strip().isprintable()
    return sentence


def test_paths_that_are_none(monkeypatch, tmp_path, capsys):
    os.mkfifo(fifo := tmp_path / "fifo")
    (empty := tmp_path / "empty").mkdir()
    (device := tmp_path / "device").symlink_to("/dev/zero")
    before = sorted(tmp_path.iterdir())
    for path, words in {
        fifo: "no such rotation file",
        empty: "without learned rotations or a kept network",
        device: "no such rotation file",
        tmp_path / "absent": "there is no such run folder or file",
        tmp_path / ("x" * 5000): "cannot be read (File name too long)",
        Path("x" * 5000): "cannot be read (File name too long)",
        Path(cli.__file__): "not a readable rotation file",
    }.items():
        code = export(monkeypatch, path, "--out", tmp_path / "out")
        assert words in refused(capsys, code)
    assert sorted(tmp_path.iterdir()) == before
    with pytest.raises(InputError, match="a NUL is in no path"):
        open_source(tmp_path / "a\0b")


CONFIGS = {
    "a list": ("- 1\n", "it must be a section of keys with values, not [1]"),
    "text": ("hello\n", "it must be a section of keys with values, not 'hello'"),
    "no YAML": ("weights: {", "not valid YAML"),
    "a key twice": ("data: {}\ndata: {}\n", "is there twice"),
    "method: a list": ("weight_method: [rtn]\n", "weight_method must be a name, not ['rtn']"),
    "method: a number": ("weight_method: 3\n", "weight_method must be a name, not 3"),
    "method: a section": ("weight_method: {a: 1}\n", "weight_method must be a name"),
    "method: unknown": ("weight_method: evil\n", "there is no 'evil'"),
    "its section": ("weight_method: quip\nquip: 3\n", "quip must be a section"),
    "its settings": ("weight_method: quip\nquip: {evil: 3}\n", "Quip.evil"),
    "weights: text": ("weights: rtn\n", "weights must be a section"),
    "weights: a list": ("weights: [rtn]\n", "weights must be a section"),
    "weights: no method": ("weights: {damping: 1}\n", "names no method for the weights, but None"),
    "weights: a list of methods": ("weights: {method: [rtn]}\n", "names no method for the weights"),
    "weights: unknown": ("weights: {method: gptq, evil: 1}\n", "Gptq.evil"),
    "weights: a kind": ("weights: {method: gptq, damping: x}\n", "Gptq.damping"),
    "data: a list": ("weights: {method: gptq}\ndata: [1]\n", "data must be a section"),
    "mixed: text": ("mixed: x\n", "mixed must be a section"),
    "calibration: a number": ("weights: {method: gptq}\ncalibration: 3\n", "must be a section"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_beside_of_another_kind(made, monkeypatch, tmp_path, capsys, name):
    text, words = CONFIGS[name]
    path = made("llama", Scheme(Grid(4)))
    (path.parent / "config.yaml").write_text(text)
    code = export(monkeypatch, path, "--out", tmp_path / "out", "--format", "torch")
    assert words in refused(capsys, code)
    assert not (tmp_path / "out").exists()


def test_settings_in_a_file_that_are_unknown(made, monkeypatch, tmp_path, capsys):
    path = made("llama", Scheme(Grid(4)))
    tensors, header = read(path)
    for key, settings, words in (
        ("data", {"source": "nowhere"}, "Data.source"),
        ("data", {"evil": 3}, "Data.evil"),
        ("calibration", {"windows": -1}, "windows"),
        ("calibration", {"evil": 3}, "Calibration.evil"),
        ("weights", {"method": "gptq", "evil": 3}, "Gptq.evil"),
    ):
        write(path, tensors, header | {"weights": {"method": "gptq"}, key: settings})
        code = export(monkeypatch, path, "--out", tmp_path / "out", "--format", "torch")
        assert words in refused(capsys, code)
        assert not (tmp_path / "out").exists()


def test_null_settings_are_those_of_a_run_that_says_nothing(made):
    path = made("llama")
    (path.parent / "config.yaml").write_text("weight_method: null\nrtn: null\ndata: null\n")
    assert weight_method(open_source(path))[0].name == "rtn"
    (path.parent / "config.yaml").write_text("")
    assert weight_method(open_source(path))[0].name == "rtn"


def test_a_kept_network_that_names_no_row_or_one_of_dots(monkeypatch, tmp_path, capsys):
    alone = hadamard("llama", tmp_path, key=False, down=False)
    run, _ = write_run(tmp_path, "llama", alone, Scheme(Grid(4)))
    kept = run / "network.safetensors"
    tensors, header = read(kept)
    for row, words in {
        "../../etc/passwd": "no rotation file of this row is kept beside it",
        "x" * 5000: "no rotation file of this row is kept beside it",
        "a\0b": "no rotation file of this row is kept beside it",
        None: "names no row",
    }.items():
        write(kept, tensors, header | {"about": {**header["about"], "row": row}})
        code = export(monkeypatch, run, "--out", tmp_path / "out", "--format", "spinquant")
        assert words in refused(capsys, code)


def imported(monkeypatch, *arguments):
    """`qrot import ...` in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", ["qrot", "import", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code


def test_where_an_import_cannot_go(monkeypatch, tmp_path, capsys):
    """Found before anything is read: neither the file nor the model is there."""
    (folder := tmp_path / "folder").mkdir()
    (file := tmp_path / "file").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    outs = [folder, file, tmp_path / "absent" / "r", file / "r", tmp_path / ("x" * 5000), Path(".")]
    for out in (*outs, Path("/"), Path("/proc/r")):
        arguments = (tmp_path / "R.bin", "--model", tmp_path / "model", "--weight-bits", 16)
        sentence = refused(capsys, imported(monkeypatch, *arguments, "--out", out))
        assert "R.bin" not in sentence
        assert "model" not in sentence
    assert sorted(tmp_path.rglob("*")) == before
    assert file.read_text() == "mine"


def test_what_cannot_be_imported(monkeypatch, tmp_path, capsys):
    write_folder(tmp_path / "model", "llama")
    (tmp_path / "R.bin").write_bytes(b"nothing")
    out = tmp_path / "out.safetensors"
    arguments = ("--model", tmp_path / "model", "--weight-bits", 16, "--out", out)
    for path, words in {
        tmp_path / "R.bin": "not a file of tensors",
        tmp_path / "absent": "cannot be read",
        tmp_path / "model": "cannot be read",
    }.items():
        code = imported(monkeypatch, path, *arguments)
        assert words in refused(capsys, code)
    assert not out.exists()


def test_dartquants_files_are_imported(monkeypatch, tmp_path, capsys):
    torch = pytest.importorskip("torch")
    write_folder(tmp_path / "model", "llama")

    def orthogonal(*shape):
        return torch.linalg.qr(torch.rand(*shape, generator=torch.Generator().manual_seed(0)))[0]

    torch.save({"R1": orthogonal(48, 48)}, tmp_path / "r1.pt")
    values = {f"model.layers.{i}.self_attn.R2": orthogonal(2, 12, 12) for i in range(3)}
    torch.save(values, tmp_path / "r2.pt")
    out = tmp_path / "out.safetensors"
    files, options = (tmp_path / "r1.pt", tmp_path / "r2.pt"), ("--weight-bits", 16, "--out", out)
    options = ("--model", tmp_path / "model", "--no-online", *options)
    assert imported(monkeypatch, *files, *options) == 0
    capsys.readouterr()
    found = open_source(out).transform.rotations["value"]
    np.testing.assert_array_equal(found.matrix[1], values["model.layers.1.self_attn.R2"])
    assert export(monkeypatch, out, "--out", tmp_path / "exported") == 0
