"""`memfit`, and `python -m memfit`: what cannot wait until the command line is imported."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Sequence

_GPU = Path("/dev/nvidiactl")
"""There where NVIDIA's driver is loaded."""


def main() -> NoReturn:
    """Import the command line and run it; Ctrl-C while it is imported ends quietly."""
    previous = signal.getsignal(signal.SIGINT)
    if previous is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    hurry(sys.argv[1:])
    from memfit.cli import command  # noqa: PLC0415

    signal.signal(signal.SIGINT, previous)
    command()


def _end(_number: int, _frame: object) -> None:
    os.write(2, b"error: interrupted\n")
    os._exit(130)


def hurry(words: Sequence[str]) -> None:
    """Start what imports torch where a command will need it, before memfit itself is imported.

    Args:
        words: The command line after `memfit`.
    """
    if not _will_need_virtual_gpu(words):
        return
    from memfit.trial.start import start_ahead  # noqa: PLC0415 - this is what the rest waits for
    from memfit.virtual.build import built_driver_folder  # noqa: PLC0415
    from memfit.virtual.environment import loading  # noqa: PLC0415

    with contextlib.suppress(OSError):  # it is told where it is really needed
        folder = built_driver_folder()
        if folder is not None:
            start_ahead(loading(folder))


def _will_need_virtual_gpu(words: Sequence[str]) -> bool:
    """Guess it from the words, which are not parsed yet; a wrong guess costs nothing but time."""
    if words[:1] != ["probe"] or not words[1:] or {"-h", "--help"} & set(words):
        return False
    device = "auto"
    for word, following in zip(words, [*words[1:], ""], strict=True):
        option, equals, value = word.partition("=")
        if option == "--device":
            device = value if equals else following
    device = device.strip().lower()
    return device not in ("cuda", "cpu") and not (device == "auto" and _GPU.exists())


if __name__ == "__main__":
    main()
