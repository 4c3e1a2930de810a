"""What the command line turns into a sentence, what keeps its traceback, what is left behind."""

import errno
import os
import subprocess
import sys
import warnings

import jax
import numpy as np
import pytest
import typer

from qrot import cli
from qrot.errors import InputError


def run(monkeypatch, *arguments):
    """`qrot ...` in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", ["qrot", *map(str, arguments)])
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    try:
        cli.main()
    except SystemExit as end:
        return end.code or 0
    return 0


@pytest.fixture
def raising(monkeypatch, capsys):
    """(exception) -> (exit code of a command that raises it, what stderr says)."""

    def raising(error):
        app = typer.Typer(pretty_exceptions_enable=False)

        @app.command()
        def fail() -> None:
            raise error

        monkeypatch.setattr(cli, "app", app)
        return run(monkeypatch), capsys.readouterr().err

    return raising


FULL = os.strerror(errno.ENOSPC)
SENTENCES = [
    (InputError("a:\n  b"), "qrot: a: b\n"),
    (InputError("\x1b[31mred\x07 \u202e"), "qrot: \ufffd[31mred\ufffd \ufffd\n"),
    (PermissionError(errno.EACCES, "Permission denied", "/a"), "qrot: /a: Permission denied\n"),
    (OSError(errno.ENOSPC, FULL), f"qrot: a file: {FULL}\n"),
    (OSError(errno.EIO, "Input/output error", "/a"), "qrot: /a: Input/output error\n"),
    (MemoryError(), "not enough memory for it (MemoryError): use fewer or shorter windows"),
    (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nat x"), "Out of memory)"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "you tried)"),
]


@pytest.mark.parametrize(("error", "sentence"), SENTENCES)
def test_what_is_bad_input_or_a_fact_about_the_machine_is_one_sentence(raising, error, sentence):
    code, said = raising(error)
    assert (code, said.count("\n")) == (2, 1)
    assert said.startswith("qrot: ")
    assert sentence in said


FAULTS = [
    KeyError("a"),
    ValueError("b"),
    FileNotFoundError("without a number, from a library"),
    OSError(errno.EBADF, "Bad file descriptor"),
    RuntimeError("INTERNAL: x"),
    jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem"),
    jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Shared memory size limit exceeded"),
]


@pytest.mark.parametrize("error", FAULTS)
def test_faults_of_qrot_keep_their_traceback(raising, error):
    with pytest.raises(type(error)) as found:
        raising(error)
    assert found.value is error


def test_a_real_shortage_of_memory(raising):
    with pytest.raises(MemoryError) as found:
        np.empty(1 << 55)
    code, said = raising(found.value)
    assert code == 2
    assert "Unable to allocate" in said


def test_an_interrupt_is_a_word(raising):
    assert raising(KeyboardInterrupt()) == (130, "qrot: stopped\n")
    assert raising(typer.Exit(130)) == (130, "")  # of a command that has said so itself


def test_warnings_are_one_line(monkeypatch, capsys):
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    def warn() -> None:
        warnings.warn("first\n  second \x1b[0m", stacklevel=1)

    monkeypatch.setattr(cli, "app", app)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert run(monkeypatch) == 0
    assert capsys.readouterr().err == "qrot: warning: first second \ufffd[0m\n"


def program(output):
    """`qrot --help` whose output goes to a file; (its exit code, what it says)."""
    code = "import sys; sys.argv = ['qrot', '--help']; from qrot.cli import main; main()"
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=output, stderr=subprocess.PIPE, env=environment
    )
    return done.returncode, done.stderr.decode()


def test_nobody_reads_on():
    """qrot compare | head"""
    read, written = os.pipe()
    os.close(read)
    with open(written, "wb") as pipe:
        assert program(pipe) == (1, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="of Linux")
def test_a_full_disk_takes_what_is_printed():
    with open("/dev/full", "wb") as full:
        assert program(full) == (2, f"qrot: a file: {FULL}\n")
