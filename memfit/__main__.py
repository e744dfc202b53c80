"""`memfit`, and `python -m memfit`: nothing is imported before Ctrl-C has somewhere to go."""

import os
import signal
from typing import NoReturn


def main() -> NoReturn:
    """Import the command line and run it; Ctrl-C while it is imported ends quietly."""
    previous = signal.getsignal(signal.SIGINT)
    if previous is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    from memfit.cli import command  # noqa: PLC0415

    signal.signal(signal.SIGINT, previous)
    command()


def _end(_number: int, _frame: object) -> None:
    os.write(2, b"error: interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    main()
