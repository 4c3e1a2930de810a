"""Paths that are refused before the work, and programs that write to the same one at once."""

import errno
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qrot.errors import InputError
from qrot.files.whole import check_writable, whole_file, whole_folder, write_text


def tree(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder to stand in, with a file, an empty folder, a full one and links."""
    place = tmp_path / "place"
    (place / "full").mkdir(parents=True)
    (place / "full" / "a").write_text("a")
    (place / "empty").mkdir()
    (place / "file").write_text("mine")
    (place / "loop").symlink_to("loop")
    (place / "link").symlink_to("empty")
    monkeypatch.chdir(place)
    return place


LONG, DEEP = "x" * 256, "y/" * 2500
EITHER = {
    "/": "",
    ".": "",
    "..": "",
    "full": "",
    "file/x": "file/x: ",
    "/dev/null": "",
    "/dev/null/x": "/dev/null/x: ",
    "/proc/nothing": "cannot be written",
    LONG: "File name too long",
    DEEP: "File name too long",
    "é" * 128: "File name too long",
    "a\0b": "null byte",
    "\udcff\ud800": "surrogates",
}
FOLDERS = {
    "": "",
    "file": "is there already; choose another --out",
    "file/x/y": "Not a directory",
    "loop": "is there already",
}
FILES = {
    "": "is no file",
    "empty": "is no file",
    "link": "is no file",
    "absent/x": "absent is no folder",
}


@pytest.mark.parametrize(
    ("path", "reason", "folder"),
    [(*pair, kind) for kind in (True, False) for pair in EITHER.items()]
    + [(*pair, True) for pair in FOLDERS.items()]
    + [(*pair, False) for pair in FILES.items()],
)
def test_refused(place, path, reason, folder):
    before = tree(place)
    with pytest.raises(InputError, match=reason or "is ") as error:
        check_writable(Path(path), folder=folder)
    assert len(str(error.value)) < 1000
    assert tree(place) == before


@pytest.mark.parametrize(
    ("path", "folder"),
    [(path, True) for path in ("x" * 250, "é" * 127, "empty", "link", "a/b/c", "full/new")]
    + [(path, False) for path in ("x" * 250, "é" * 127, "file", "full/new")],
)
def test_what_passes_can_be_written(place, path, folder):
    before = tree(place)
    check_writable(Path(path), folder=folder)
    assert tree(place) == before
    if folder:
        with whole_folder(Path(path)) as partial:
            (partial / "a").write_text("new")
        assert os.listdir(path) == ["a"]
    else:
        write_text(Path(path), "new")
        assert Path(path).read_text() == "new"
    assert not list(place.rglob("*.partial"))


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=300), st.booleans())
def test_any_path_is_fine_or_refused_in_a_sentence(place, path, folder):
    before = tree(place)
    with suppress(InputError):
        check_writable(Path("full") / path.lstrip("/"), folder=folder)
    assert tree(place) == before


def test_the_folder_that_one_is_in(place, monkeypatch):
    monkeypatch.chdir(place / "empty")
    for path in (".", "../empty"):
        with pytest.raises(InputError, match="is the folder that you are in"):
            check_writable(Path(path), folder=True)


def test_a_file_system_of_its_own(place, monkeypatch):
    """A mounted volume, onto which nothing can be moved as a whole."""
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "empty")
    with pytest.raises(InputError, match="is a file system of its own"):
        check_writable(Path("empty"), folder=True)


def test_read_only(place, monkeypatch):
    """As root, whom permissions do not stop, by a system that refuses."""

    def mkdir(path, **_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "mkdir", mkdir)
    for folder in (True, False):
        with pytest.raises(InputError, match=r"x: cannot be written \(Read-only file system\)"):
            check_writable(Path("x"), folder=folder)


def test_a_failure_takes_the_folders_that_were_made_for_it(place):
    def failing():
        with whole_folder(Path("a/b/c")) as partial:
            (partial / "half").write_text("half")
            raise OSError(errno.ENOSPC, "No space left on device", str(partial / "half"))

    before = tree(place)
    with pytest.raises(InputError, match=r"^a/b/c: cannot be written \(No space left on device\)"):
        failing()
    assert tree(place) == before


def test_errors_of_others_keep_their_file(place):
    def failing(error):
        with whole_folder(Path("out")):
            raise error

    with pytest.raises(InputError, match=r"^/else: cannot be written"):
        failing(PermissionError(errno.EACCES, "Permission denied", "/else"))
    with pytest.raises(OSError, match="what a library says") as found:  # a fault, not the system's
        failing(OSError("what a library says"))
    assert found.type is OSError


def test_a_full_disk_names_the_file_and_not_the_partial_one(place):
    full = os.strerror(errno.ENOSPC)

    def failing(named):
        with whole_file(Path("file")) as partial:
            partial.write_text("half")
            raise OSError(errno.ENOSPC, full, *([str(partial)] if named else []))

    for named in (False, True):
        with pytest.raises(OSError, match=full) as found:
            failing(named)
        assert found.value.filename == "file"
        assert (place / "file").read_text() == "mine"
    assert not list(place.glob("*.partial"))


def test_two_files_at_once(place):
    """Each is whole; the last one stays."""
    with whole_file(Path("file")) as slow:
        slow.write_text("slow, half")
        write_text(Path("file"), "fast")
        assert (place / "file").read_text() == "fast"
        slow.write_text("slow")
    assert (place / "file").read_text() == "slow"


def test_many_folders_at_once(place):
    """One of them wins, whole; the others are refused."""
    ends, refusals, start = [], [], threading.Barrier(8)

    def write(name):
        start.wait()
        try:
            with whole_folder(Path("out")) as folder:
                for part in "abc":
                    (folder / part).write_text(name)
                    time.sleep(0.001)
            ends.append(name)
        except InputError as error:
            refusals.append(str(error))

    threads = [threading.Thread(target=write, args=(str(i),)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ends) == 1
    assert refusals == ["out: is there already; choose another --out"] * 7
    assert {path.name: path.read_text() for path in (place / "out").iterdir()} == {
        part: ends[0] for part in "abc"
    }
    assert not list(place.rglob("*.partial"))


PROGRAM = """
import sys, time
from pathlib import Path
from qrot.files.whole import whole_folder
with whole_folder(Path("out")) as folder:
    (folder / "a").write_text("half")
    print("begun", flush=True)
    sys.stdin.read()
"""


def begun():
    """Another program that is in the midst of writing `out`."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "begun\n"
    return process


def write(name):
    with whole_folder(Path(name)) as folder:
        (folder / "a").write_text("mine")


def test_what_a_killed_program_left_goes_and_what_a_living_one_writes_stays(place):
    def partials():
        return list(place.glob(".out.*.partial"))

    def age():
        for path in partials():
            os.utime(path, (0, 0))

    killed = begun()
    killed.kill()
    killed.communicate()
    write("other")
    slow = begun()
    assert len(partials()) == 2
    age()
    write("another")
    assert len(partials()) == 2
    write("out")
    assert len(partials()) == 1
    assert (place / "out" / "a").read_text() == "mine"
    _, said = slow.communicate()
    assert "out: is there already" in said
    assert slow.returncode == 1
    assert (place / "out" / "a").read_text() == "mine"
    assert not list(place.glob(".*"))
