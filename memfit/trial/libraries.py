"""cuDNN's libraries, opened once in the nursery instead of once in every trial.

cuDNN opens most of its libraries when it is first used, and relocating them takes a forked trial up
to 0.15 s. The first trial that used them leaves word of which they are; the nursery then opens the
same files, and later trials find them there. Opening starts neither CUDA nor threads.
"""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

_LEFT = "libraries"
_NAMES = "libcudnn"
_opened = False


def leave_word(folder: Path) -> None:
    """In the process of a trial: write down which of them it has open, for the nursery."""
    if _opened:
        return
    with contextlib.suppress(OSError):
        maps = Path("/proc/self/maps").read_text(errors="replace")
        files = {line.partition("/")[2] for line in maps.splitlines() if _NAMES in line}
        (folder / _LEFT).write_text("".join(f"/{name}\n" for name in sorted(files)))


def read_word(folder: Path) -> tuple[str, ...]:
    """Return the files that a trial had open; none where they are open here already."""
    if _opened:
        return ()
    with contextlib.suppress(OSError):
        return tuple((folder / _LEFT).read_text().splitlines())
    return ()


def open_now(files: tuple[str, ...]) -> None:
    """Open these files, once."""
    global _opened  # noqa: PLW0603 - of the process, as what is opened is
    for file in files:
        _opened = True
        with contextlib.suppress(OSError):
            ctypes.CDLL(file)
