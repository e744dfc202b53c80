"""What the allocator did while a block ran: its peaks, and the sizes asked of it in order."""

from __future__ import annotations

from typing import Any

_MOST_EVENTS = 1_000_000


def start() -> None:
    """Record from here on."""
    import torch

    torch.cuda.memory._record_memory_history(
        max_entries=_MOST_EVENTS, stacks="python", context=None
    )


def stop() -> dict[str, Any]:
    """Return peaks and sizes since the start, in the order of the requests."""
    import torch

    stats = torch.cuda.memory_stats()
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    return {
        "peak_allocated_bytes": stats["allocated_bytes.all.peak"],
        "peak_reserved_bytes": stats["reserved_bytes.all.peak"],
        "allocations": [event["size"] for event in events if event["action"] == "alloc"],
        "segments": [event["size"] for event in events if event["action"] == "segment_alloc"],
    }
