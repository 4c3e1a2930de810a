"""The command line: what is typed, what is printed, and how it exits. A file for each command."""

from __future__ import annotations

import errno
import os
import sys
import warnings

import typer

from qrot.cli import bench, export, gate, generate, look, merge, pipeline, refresh, run
from qrot.errors import InputError
from qrot.files.whole import short_path

app = typer.Typer(
    help="Rotations that make language models easy to quantise.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback()
def _commands() -> None:
    """Rotations that make language models easy to quantise."""


_COMMANDS = (
    run.run,
    gate.gate,
    look.compare,
    look.inspect,
    export.export,
    merge.merge,
    refresh.refresh,
    pipeline.pipeline,
    generate.generate,
)
for command in _COMMANDS:
    app.command()(command)
app.command("import")(export.import_)
app.add_typer(bench.app, name="bench")


def main() -> None:
    """The console command.

    Bad input, and what this machine cannot do, is one sentence on stderr and exit code 2. What else
    is raised is a fault of qrot and keeps its traceback.
    """
    warnings.showwarning = lambda message, *_: _say(f"warning: {message}")
    try:
        _run()
    except KeyboardInterrupt:
        _say("stopped")
        sys.exit(130)
    except BrokenPipeError:  # of `qrot compare | head`: nobody reads on
        sys.exit(1)
    except Exception as error:
        if (sentence := _sentence(error)) is None:
            raise
        _say(sentence)
        sys.exit(2)


def _run() -> None:
    try:
        app()
    except SystemExit as end:
        if isinstance(getattr(end.__context__, "__cause__", None), KeyboardInterrupt):
            raise KeyboardInterrupt from None  # which typer turns into an exit without a word
        raise
    finally:
        _flush()


def _flush() -> None:
    """Write out what was printed, once: Python tries again at its end, and complains of it."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def _sentence(error: Exception) -> str | None:
    """What to say in place of a traceback; None where the fault may be qrot's."""
    if isinstance(error, InputError):
        return str(error)
    # Without a number it is a library's; with that of a closed file qrot has used it wrongly.
    if isinstance(error, OSError) and error.errno not in (None, errno.EBADF):
        return f"{short_path(error.filename or 'a file')}: {error.strerror or error}"
    if _is_out_of_memory(error):
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        return (
            f"this machine has not enough memory for it ({first}): use fewer or shorter windows, a "
            "smaller batch or a smaller model"
        )
    return None


def _is_out_of_memory(error: Exception) -> bool:
    """Whether memory of the machine or the accelerator is used up; a kernel whose blocks do not fit
    a core's own memory is a fault of qrot."""
    text = str(error).lower()
    if isinstance(error, MemoryError):
        return True
    used_up = text.startswith("resource_exhausted") or "can't allocate memory" in text
    within = any(word in text for word in ("vmem", "smem", "shared memory"))
    return isinstance(error, RuntimeError) and used_up and not within


def _say(sentence: str) -> None:
    """Print one line on stderr, without characters that a terminal would act on."""
    line = " ".join(sentence.split())
    plain = "".join(x if x.isprintable() else "\N{REPLACEMENT CHARACTER}" for x in line)
    print(f"qrot: {plain}", file=sys.stderr)
