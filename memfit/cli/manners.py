"""What every verb does alike: consoles, errors and exit codes."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ParamSpec

import typer
from rich.console import Console
from rich.text import Text

from memfit.errors import CannotJudge, InternalError, Interrupted, MemfitError, UsageError

P = ParamSpec("P")


class _Answers(Console):
    """A console whose reader may go away; rich would end the program with status 1."""

    def on_broken_pipe(self) -> None:
        """Leave the decision to the verb."""
        raise BrokenPipeError


def stdout() -> Console:
    """Return the console for answers."""
    return _Answers(highlight=False)


def stderr() -> Console:
    """Return the console for progress, warnings and errors."""
    return Console(stderr=True, highlight=False)


def write_json(record: Any) -> None:
    """Write a record to stdout as its one JSON document."""
    from memfit.records import to_json  # noqa: PLC0415

    sys.stdout.write(to_json(record).decode())
    sys.stdout.flush()


@contextlib.contextmanager
def answer_saved(saved: Path) -> Iterator[None]:
    """Tell, where a page cannot be written, that the answer it is made from is in `saved`."""
    try:
        yield
    except CannotJudge as error:
        raise CannotJudge(
            error.message,
            hint=f"the answer is saved in {saved}: make room, and `memfit report {saved}` makes "
            "the page",
        ) from None


def verb(body: Callable[P, None]) -> Callable[P, None]:
    """Give a command's body the one way in which errors end: a message, a hint, an exit code."""

    @functools.wraps(body)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        previous = signal.signal(signal.SIGTERM, _interrupt)
        try:
            _check_words()
            body(*args, **kwargs)
        except MemfitError as error:
            _show(error)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            _show(Interrupted("interrupted"))
            raise typer.Exit(Interrupted.exit_code) from None
        except BrokenPipeError:
            # The reader of stdout has gone; nothing is left to say to it.
            _silence_stdout()
            raise typer.Exit(0) from None
        except typer.Exit:
            raise
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                raise
            _silence_stdout()
            _show(CannotJudge(f"cannot write the answer to stdout: {error.strerror}"))
            raise typer.Exit(CannotJudge.exit_code) from None
        except Exception as error:  # noqa: BLE001 - the last line between a bug and its user
            _show(
                InternalError(
                    f"memfit itself failed: {type(error).__name__}: {error}",
                    hint="please report this with the lines above",
                    details=traceback.format_exc(),
                )
            )
            raise typer.Exit(InternalError.exit_code) from None
        finally:
            signal.signal(signal.SIGTERM, previous)

    return run


def _silence_stdout() -> None:
    """Let what Python still has to flush at its end go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def _show(error: MemfitError) -> None:
    console = stderr()
    if error.details:
        console.print(Text(error.details), soft_wrap=True)
        console.print()
    console.print(Text.assemble(("error: ", "bold red"), error.message), soft_wrap=True)
    if error.hint:
        console.print(Text.assemble(("hint: ", "bold cyan"), error.hint), soft_wrap=True)


def _check_words() -> None:
    """Refuse words that no record could hold."""
    for word in sys.argv[1:]:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise UsageError(
                f"{os.fsencode(word)!r} is not UTF-8, and results are written in it",
                hint="give the file, or the value, another name",
            ) from None
