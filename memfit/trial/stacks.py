"""Where a worker was when it crashed or hung: Python's own dump, in what the worker printed."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import time
from pathlib import Path

from memfit.workload import is_users, short_path

_ASK = signal.SIGUSR1
_LONGEST_WAIT_S = 2.0
_SETTLED_S = 0.1
"""A stack is written line by line; it is whole when nothing has come for so long."""
_FRAME = re.compile(r'^(?P<before>\s*File ")(?P<path>[^"]+)(?P<after>", line \d+ in .*)$')
_NOISE = ("Extension modules:", "Fatal Python error:")
"""Lines of a dump that name no place; the signal is told apart from it."""


def dump_to(output: int) -> None:
    """Have this process write its stack to a descriptor when it crashes, or when it is asked.

    A crash tells the thread that crashed; a hang tells all of them, since backward on a GPU runs
    in a thread of its own.
    """
    faulthandler.enable(output, all_threads=False)
    faulthandler.register(_ASK, file=output, all_threads=True)


def ask(pid: int, output: Path) -> None:
    """Have a worker that hangs write its stack, and wait a moment for it."""
    with contextlib.suppress(OSError):
        before = seen = output.stat().st_size
        os.kill(pid, _ASK)
        asked = changed = time.monotonic()
        while (now := time.monotonic()) < asked + _LONGEST_WAIT_S:
            size = output.stat().st_size
            if size != seen:
                seen, changed = size, now
            elif seen != before and now >= changed + _SETTLED_S:
                return
            time.sleep(0.01)


def readable(lines: list[str]) -> list[str]:
    """Keep of a dump what is the user's, with files told by their path in the project."""
    kept = []
    for line in lines:
        frame = _FRAME.match(line)
        if frame is None:
            if not line.startswith(_NOISE):
                kept.append(line)
        elif is_users(frame["path"]) and "runpy" not in frame["path"]:
            kept.append(f"{frame['before']}{short_path(frame['path'])}{frame['after']}")
    return "\n".join(kept).strip("\n").split("\n") if kept else []
