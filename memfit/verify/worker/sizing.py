"""How much is compared: fewer examples where a pass takes long, float32 where memory is short."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from memfit.errors import WorkloadError
from memfit.units import format_bytes, format_seconds
from memfit.verify.splits import DEFAULT_LOGICAL_BATCH, FEWEST, choose_splits
from memfit.verify.worker.randomness import Draws
from memfit.verify.worker.subject import Subject

_TIMED = 2
"""Examples of the pass that is timed; batch normalisation refuses a single one."""
_SOON_S = 30.0
"""A check that would take longer is made of fewer examples."""
_ONCE, _EACH_SPLIT = 22, 2
"""Passes in float32 that a check is worth, and those of each split; one in float64 is worth two,
and so is what is done with parameters alone."""
_COPIES = 11
"""Numbers that are held for each parameter at the same time, at most: it, its gradient and first
state, gradients and parameters to compare with, and two moments of an optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """How many examples are compared."""

    size: int
    note: str | None = None
    """Why they are fewer than usual."""


def choose_size(subject: Subject, fewest: int, tell: Callable[[str], None]) -> Chosen:
    """Time one pass, and choose how many examples are compared.

    Args:
        subject: The workload and its model.
        fewest: Examples that there have to be, at least.
        tell: Told what is being done, and how long it will take where that is long.
    """
    tell(f"timing a forward and backward pass of {_TIMED} examples")
    batch = subject.batch(_TIMED)
    for _ in range(2):  # the first one may be slow for reasons of its own
        took = _time(subject, batch)
        if _seconds(took, DEFAULT_LOGICAL_BATCH) <= _SOON_S:
            return Chosen(size=DEFAULT_LOGICAL_BATCH)
    size = max(FEWEST, fewest)
    note = (
        f"{size} examples are compared instead of {DEFAULT_LOGICAL_BATCH}, for a pass of {_TIMED} "
        f"took {took:.1f} s"
    )
    tell(
        f"note: {note}: about {format_seconds(_seconds(took, size))} in all; "
        f"{how_to_scale(subject)}"
    )
    return Chosen(size=size, note=note)


def _time(subject: Subject, batch: Any) -> float:
    """Return the seconds of a pass, by the processor's time: other programs do not count."""
    began = time.process_time()
    with Draws(still=True):
        subject.physical(batch)
    return (time.process_time() - began) / torch.get_num_threads()


def _seconds(took: float, size: int) -> float:
    """Estimate a whole check from a pass of a few examples; about half of one is for them."""
    return took * (1 + size / _TIMED) / 2 * (_ONCE + _EACH_SPLIT * len(choose_splits(size, None)))


def how_to_scale(subject: Subject) -> str:
    """Say which parameters of the workload could make it smaller."""
    sizes = [
        f"{name}={value}"
        for name, value in subject.info.parameters.items()
        if isinstance(value, int) and not isinstance(value, bool) and value > 1
    ]
    if not sizes:
        return (
            "a smaller model shows the same, and the workload has no parameter that --set makes so"
        )
    return f"a smaller model shows the same: --set, or verify_with ({', '.join(sizes)})"


class PassMemory:
    """What a pass in float32 adds to the memory in use, at its peak."""

    def __init__(self, device: torch.device) -> None:
        """Note what is in use before it."""
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self._before = self._in_use()

    def _in_use(self) -> int:
        if self._device.type == "cuda":
            return int(torch.cuda.memory_allocated(self._device))
        return int(psutil.Process().memory_info().rss)

    def peak_bytes(self) -> int:
        """Return the peak since then, in bytes."""
        if self._device.type == "cuda":
            peak = int(torch.cuda.max_memory_allocated(self._device))
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return max(0, peak - self._before)


def fits_in_float64(subject: Subject, pass_bytes: int) -> bool:
    """Whether there is memory for comparing in float64.

    Args:
        subject: The workload and its model.
        pass_bytes: What a pass over the batch adds in float32.

    Raises:
        WorkloadError: When there is none for float32 either.
    """
    number = sum(p.numel() for p in subject.model.parameters())
    free = _free_bytes(subject.device)
    needed = 4 * number * _COPIES + pass_bytes
    if 2 * needed <= free:
        return True
    if needed <= free:
        return False
    raise WorkloadError(
        f"comparing {number:,} parameters takes about {format_bytes(needed)} in float32, and "
        f"{format_bytes(free)} are free",
        hint=how_to_scale(subject),
    )


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
