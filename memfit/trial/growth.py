"""What is allocated at the end of each group and, in a trial of its own, where it comes from."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.records import GrowthPlace
from memfit.trial.lazy import memory_snapshot

if TYPE_CHECKING:
    from memfit.devices.memory import MemoryReader

_MEMFIT = str(Path(__file__).parents[1])
_MOST = 8
"""Places that are kept, the largest first."""


class GrowthRecorder:
    """Reads what is allocated whenever a group has ended."""

    def __init__(self, reader: MemoryReader, *, trace: bool) -> None:
        """Start before the first group; `trace` notes the stack of every block that is made."""
        self._reader = reader
        self._ends: list[int] = []
        self._trace = trace and reader.device.type == "cuda"
        self._by_place: list[Counter[str]] = []
        if self._trace:
            import torch  # noqa: PLC0415

            torch.cuda.memory._record_memory_history(  # noqa: SLF001
                "state", context="state", stacks="python"
            )

    def end_group(self) -> None:
        """Read what is allocated now that a group has ended.

        A trial that traces lets Python's collector run first: what only a cycle of references
        holds is no growth.
        """
        if self._trace:
            gc.collect()
            self._by_place.append(self._places_now())
        allocated = self._reader.read(device_used=False).allocated_bytes
        if allocated is not None:
            self._ends.append(allocated)

    @property
    def ends(self) -> tuple[int, ...]:
        """Allocated bytes at the end of each group; empty where no allocator counts them."""
        return tuple(self._ends)

    def places(self) -> tuple[GrowthPlace, ...]:
        """Where the blocks were made that stay, over the later half of the groups."""
        seen = self._by_place
        middle = len(seen) // 2
        groups = len(seen) - 1 - middle
        if groups < 1:
            return ()
        growing = sorted(
            (
                ((size - seen[middle][place]) // groups, place)
                for place, size in seen[-1].items()
                if size - seen[middle][place] >= groups
            ),
            key=lambda item: (-item[0], item[1]),
        )
        return tuple(
            GrowthPlace(where=place, bytes_per_group=size) for size, place in growing[:_MOST]
        )

    def _places_now(self) -> Counter[str]:
        snapshot = memory_snapshot()
        found: Counter[str] = Counter()
        for segment in snapshot["segments"]:
            for block in segment["blocks"]:
                if block["state"] == "active_allocated":
                    found[_place(block.get("frames") or [])] += block["size"]
        return found


def _place(frames: list[dict[str, Any]]) -> str:
    """The innermost line that is neither torch's nor memfit's; frames begin at the innermost."""
    torch_folder = str(Path(sys.modules["torch"].__file__ or "").parent)
    for frame in frames:
        name = str(frame["filename"])
        if name.endswith(".py") and not name.startswith((torch_folder, _MEMFIT)):
            return f"{'/'.join(Path(name).parts[-2:])}:{frame['line']}"
    return "the training loop" if frames else "the backward pass"
