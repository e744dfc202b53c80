"""Memory and time of each phase of a trial, folded over its microbatches and groups."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

from memfit.devices.memory import MemoryReader, Reading
from memfit.records import PhaseMemory


@dataclass(slots=True)
class _PhaseTotals:
    """Peaks of one phase, folded over microbatches and groups."""

    allocated: int | None = None
    reserved: int | None = None
    used: int | None = None
    outside: int | None = None
    retries: int | None = None
    seconds: float = 0.0

    def fold(self, reading: Reading, retries_before: int | None, seconds: float) -> None:
        self.allocated = _larger(self.allocated, reading.peak_allocated_bytes)
        self.reserved = _larger(self.reserved, reading.peak_reserved_bytes)
        self.used = _larger(self.used, reading.device_used_bytes)
        self.outside = _larger(self.outside, reading.outside_allocator_bytes)
        if reading.alloc_retries is not None:
            self.retries = (self.retries or 0) + reading.alloc_retries - (retries_before or 0)
        self.seconds += seconds


def _larger(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return other if one is None else one
    return max(one, other)


GroupsName = Literal["none", "first", "later"]
PhaseName = Literal["build", "forward", "backward", "optimizer_step"]


@dataclass(slots=True)
class PhaseRecorder:
    """Reads memory at every boundary between phases."""

    reader: MemoryReader
    totals: dict[tuple[PhaseName, GroupsName], _PhaseTotals] = field(default_factory=dict)
    groups: GroupsName = "none"
    current: PhaseName | None = None
    retries: int | None = None
    started: float = 0.0

    def begin(self, phase: PhaseName) -> Reading | None:
        """Close the phase that runs and open the next one."""
        reading = self.end()
        self.current = phase
        self.started = time.perf_counter()
        return reading

    def end(self) -> Reading | None:
        """Close the phase that runs."""
        if self.current is None:
            return None
        reading = self.reader.read(device_used=True)
        totals = self.totals.setdefault((self.current, self.groups), _PhaseTotals())
        totals.fold(reading, self.retries, time.perf_counter() - self.started)
        self.retries = reading.alloc_retries
        self.reader.reset_peaks()
        self.current = None
        return reading

    def phases(self) -> tuple[PhaseMemory, ...]:
        """Return what was recorded, in the order in which it was first seen."""
        return tuple(
            PhaseMemory(
                phase=phase,
                groups=groups,
                peak_allocated_bytes=totals.allocated,
                peak_reserved_bytes=totals.reserved,
                device_used_bytes=totals.used,
                outside_allocator_bytes=totals.outside,
                alloc_retries=totals.retries,
                seconds=totals.seconds,
            )
            for (phase, groups), totals in self.totals.items()
        )
