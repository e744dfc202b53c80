"""Allocated memory over one group, from the allocator's own history."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from memfit.records import Timeline, TimelinePhase, TimelinePoint

if TYPE_CHECKING:
    from memfit.devices.memory import MemoryReader

_POINTS = 400
"""Points kept of a timeline; a chart has no room for more."""
_HISTORY = 400_000
"""Events that the allocator keeps at the most; a longer group is not charted."""


class TimelineRecorder:
    """Records a group's allocator events, on a CUDA device."""

    def __init__(self, reader: MemoryReader) -> None:
        """Start from what is allocated now."""
        reading = reader.read(device_used=False)
        self._reader = reader
        self._allocated = reading.allocated_bytes or 0
        self._first_event = reading.allocator_events
        self._phases: list[TimelinePhase] = []

    @classmethod
    def start(cls, reader: MemoryReader) -> Self | None:
        """Start recording; None where the device's allocator keeps no history."""
        if reader.device.type != "cuda":
            return None
        import torch  # noqa: PLC0415

        # Without stacks, recording costs little and takes host memory only.
        torch.cuda.memory._record_memory_history(  # noqa: SLF001
            "all", context=None, max_entries=_HISTORY
        )
        return cls(reader)

    def begin(self, phase: str, microbatch: int | None) -> None:
        """Note where a phase begins."""
        if phase == "group_done":
            return
        event = self._reader.read(device_used=False).allocator_events - self._first_event
        self._phases.append(
            TimelinePhase(phase=phase, microbatch=microbatch, event=event)  # type: ignore[arg-type]
        )

    def finish(self) -> Timeline | None:
        """Stop recording and return the timeline; None when the group was too long to keep."""
        import torch  # noqa: PLC0415

        events = self._reader.read(device_used=False).allocator_events - self._first_event
        snapshot: Any = torch.cuda.memory._snapshot()  # noqa: SLF001
        torch.cuda.memory._record_memory_history(None)  # noqa: SLF001
        trace = snapshot["device_traces"][self._reader.device.index or 0]
        allocated = self._allocated
        levels = [allocated]
        for entry in trace:
            if entry["action"] == "alloc":
                allocated += self._reader.block_bytes(entry["size"])
            elif entry["action"] == "free_requested":
                allocated -= self._reader.block_bytes(entry["size"])
            else:
                continue
            levels.append(allocated)
        if events >= _HISTORY or len(levels) <= 1:
            return None
        return Timeline(
            events=len(levels) - 1, points=thin(levels, _POINTS), phases=tuple(self._phases)
        )


def thin(levels: list[int], points: int) -> tuple[TimelinePoint, ...]:
    """Keep at most `points` levels: the highest of each stretch, so that peaks survive."""
    stride = -(-len(levels) // points)
    kept = []
    for start in range(0, len(levels), stride):
        stretch = levels[start : start + stride]
        offset = max(range(len(stretch)), key=stretch.__getitem__)
        kept.append(TimelinePoint(event=start + offset, allocated_bytes=stretch[offset]))
    return tuple(kept)
