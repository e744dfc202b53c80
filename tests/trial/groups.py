"""Control groups of the tests' own, where this machine lets one be made."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def _place() -> tuple[Path, str] | None:
    """Return where groups with a limit on memory can be made, and the file of their limit."""
    for folder, limit in (
        (Path("/sys/fs/cgroup"), "memory.max"),
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
    ):
        made = folder / f"memfit-tests-{os.getpid()}"
        try:
            made.mkdir()
        except OSError:
            continue
        usable = os.access(made / limit, os.W_OK)
        with contextlib.suppress(OSError):
            made.rmdir()
        if usable:
            return folder, limit
    return None


MEMORY = _place()
"""None where no group can be made: without the right to, or inside most containers."""


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """Make a group with a limit on memory, and remove it once its processes are gone."""
    assert MEMORY is not None
    folder, limit = MEMORY
    made = folder / f"memfit-tests-{os.getpid()}-{time.monotonic_ns()}"
    made.mkdir()
    try:
        (made / limit).write_text(str(limit_bytes))
        yield made
    finally:
        for _ in range(200):
            try:
                made.rmdir()
                break
            except OSError:
                time.sleep(0.02)
