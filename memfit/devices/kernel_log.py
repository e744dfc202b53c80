"""The kernel's log: which processes it has killed for want of memory, where it may be read."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

_LOG = Path("/dev/kmsg")
_FIRST_PID_NAMESPACE = 0xEFFFFFFC
"""Inode of the first namespace of process numbers; `include/linux/proc_ns.h`."""
_KILLED = re.compile(r"\bKill(?:ed)? process (?P<pid>\d+)\b")
_RECORD_BYTES = 8192
"""A record is read whole or not at all; none is longer (`Documentation/ABI/testing/dev-kmsg`)."""


class KernelLog:
    """The kernel's log from a moment on."""

    def __init__(self, path: Path = _LOG) -> None:
        """Open the log at its end; a log that may not be read is `unreadable`, not an error.

        In a container the kernel tells other process numbers than ours, so that a record could
        not be told from somebody else's: such a log counts as unreadable too.
        """
        self._log: int | None = None
        with contextlib.suppress(OSError):
            if path == _LOG and Path("/proc/self/ns/pid").stat().st_ino != _FIRST_PID_NAMESPACE:
                return
            self._log = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self._log, 0, os.SEEK_END)

    def close(self) -> None:
        """Close the log."""
        if self._log is not None:
            os.close(self._log)
            self._log = None

    @property
    def readable(self) -> bool:
        """Whether the log may be read and its process numbers are ours."""
        return self._log is not None

    def kills(self) -> dict[int, str]:
        """Return the processes killed since the log was opened, with the kernel's line for each."""
        found: dict[int, str] = {}
        while self._log is not None:
            try:
                record = os.read(self._log, _RECORD_BYTES)
            except BrokenPipeError:  # what was next has been overwritten; go on after it
                continue
            except OSError:  # BlockingIOError at the end
                break
            if not record:
                break
            found.update(killed(record.decode(errors="replace")))
        return found


def killed(text: str) -> dict[int, str]:
    """Find the processes that lines of the kernel's log say were killed for want of memory."""
    found = {}
    for line in text.splitlines():
        words = line.partition(";")[2] or line
        match = _KILLED.search(words)
        if match is not None and "out of memory" in words.lower():
            found[int(match["pid"])] = words.strip()
    return found


def oom_kills_of_the_system(vmstat: Path = Path("/proc/vmstat")) -> int | None:
    """Processes killed for want of memory since the machine started, anywhere on it."""
    with contextlib.suppress(OSError):
        for line in vmstat.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return None
