"""Processor cores of this machine, as far as this process may use them."""

from __future__ import annotations

import contextlib
import os


def cores() -> int:
    """Return how many cores this process may use; those of the machine where no system tells."""
    with contextlib.suppress(AttributeError):  # not on every system
        return max(len(os.sched_getaffinity(0)), 1)
    return os.cpu_count() or 1
