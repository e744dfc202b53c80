"""The command line as a user runs it: a process of its own, in a folder of its own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from memfit import errors

WORKLOADS = Path(__file__).parents[1] / "workloads"
PACKAGE = Path(errors.__file__).parent
PLAIN = {
    "_TYPER_FORCE_DISABLE_TERMINAL": "1",
    "TERMINAL_WIDTH": "100",
    "COLUMNS": "100",
    "NO_COLOR": "1",
}
PATIENCE_S = 180.0


@dataclass(frozen=True, slots=True)
class Ended:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def told(self) -> dict[str, Any]:
        """The JSON document on stdout."""
        document: dict[str, Any] = json.loads(self.out)
        return document

    @property
    def error_lines(self) -> list[str]:
        """The lines on stderr that begin with `error:`."""
        return [line for line in self.err.splitlines() if line.startswith("error: ")]

    @property
    def error(self) -> str:
        """The one error, without its first word."""
        assert len(self.error_lines) == 1, self.err
        assert f'File "{PACKAGE}' not in self.err, self.err
        return self.error_lines[0].removeprefix("error: ")

    @property
    def hint(self) -> str:
        """The hint under the error."""
        hints = [line for line in self.err.splitlines() if line.startswith("hint: ")]
        assert len(hints) == 1, self.err
        return hints[0].removeprefix("hint: ")


def command(*words: object) -> list[str]:
    """Write a command as a list."""
    return [sys.executable, "-m", "memfit", *map(str, words)]


def environment(**more: object) -> dict[str, str]:
    """Return this process's environment without a terminal's habits."""
    return {**os.environ, **PLAIN, **{name: str(value) for name, value in more.items()}}


def memfit(*words: object, cwd: Path, **variables: object) -> Ended:
    """Run a command to its end."""
    done = subprocess.run(
        command(*words),
        cwd=cwd,
        env=environment(**variables),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


class Running:
    """A command that runs, as leader of a process group like that of a terminal."""

    def __init__(self, *words: object, cwd: Path, **variables: object) -> None:
        """Start it."""
        self._process = subprocess.Popen(
            command(*words),
            cwd=cwd,
            env=environment(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._seen: list[psutil.Process] = []

    @property
    def pid(self) -> int:
        """Its process id, and that of its group."""
        return self._process.pid

    def wait_for(self, path: Path) -> None:
        """Wait until a file is there, and note the processes that run then."""
        self.wait_until(path.exists)

    def wait_for_child(self) -> None:
        """Wait until it has started a process."""
        self.wait_until(lambda: bool(self._children()))

    def wait_until(self, reached: Any) -> None:
        """Wait until a condition holds, and note the processes that run then."""
        deadline = time.monotonic() + PATIENCE_S
        while not reached():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._process.kill()
                raise AssertionError(self._process.communicate())
            time.sleep(0.01)
        self._seen = self._children()

    def _children(self) -> list[psutil.Process]:
        return psutil.Process(self.pid).children(recursive=True)

    def end(self) -> Ended:
        """Wait for its end, and check that it leaves no process behind."""
        out, err = self._process.communicate(timeout=PATIENCE_S)
        assert self._seen, "no child was seen"
        deadline = time.monotonic() + 5
        while alive := [child for child in self._seen if _runs(child)]:
            assert time.monotonic() < deadline, alive
            time.sleep(0.02)
        return Ended(self._process.returncode, out, err)


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
