"""What a worker notices by the way: unlike batches, compiled graphs, who else uses the device."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psutil

from memfit.devices.nvml import Nvml
from memfit.records import OtherProcess

if TYPE_CHECKING:
    from memfit.records import Observed

_MOST = 4


class Noticing:
    """Collects what a trial shows by the way."""

    def __init__(self) -> None:
        """Start with nothing seen."""
        self._shapes: dict[int, dict[str, None]] = {}
        self._counts: dict[int, set[int]] = {}
        self._first_graphs: int | None = None
        self._others: dict[int, OtherProcess] = {}

    def batch(self, batch: Any, size: int) -> None:
        """Look at a microbatch of `size` examples."""
        import torch  # noqa: PLC0415
        from torch.utils._pytree import tree_leaves  # noqa: PLC0415

        shapes = [t.shape for t in tree_leaves(batch) if isinstance(t, torch.Tensor)]
        if shapes:
            words = ", ".join("x".join(str(n) for n in shape) or "scalar" for shape in shapes)
            self._shapes.setdefault(size, {})[words] = None

    def count(self, count: int, size: int) -> None:
        """Look at the number of elements of a microbatch of `size` examples."""
        self._counts.setdefault(size, set()).add(count)

    def end_group(self, group: int) -> None:
        """Look at the compiler after a group; the first one compiles."""
        if group == 1:
            self._first_graphs = _graphs()

    def others(self, uuid: str | None) -> None:
        """Look at who else uses a real GPU."""
        if uuid is None:
            return
        for pid, used in Nvml().processes(uuid):
            seen = self._others.get(pid)
            most = max((b for b in (used, seen.used_bytes if seen else None) if b), default=None)
            self._others[pid] = OtherProcess(pid=pid, name=_name_of(pid), used_bytes=most)

    def fill(self, observed: Observed) -> Observed:
        """Put what was noticed into a record."""
        unlike = next((list(seen) for seen in self._shapes.values() if len(seen) > 1), [])
        counts = next((seen for seen in self._counts.values() if len(seen) > 1), set[int]())
        graphs = _graphs()
        first = self._first_graphs
        return replace(
            observed,
            unlike_shapes=tuple(unlike[:_MOST]),
            unlike_counts=(min(counts), max(counts)) if counts else None,
            graphs_first_group=first,
            graphs_later=graphs - (first or 0) if graphs is not None else None,
            other_processes=tuple(self._others.values()),
        )


def _graphs() -> int | None:
    """Graphs that torch.compile has compiled in this process; None where nothing was compiled."""
    utils = sys.modules.get("torch._dynamo.utils")
    counters = getattr(utils, "counters", None)
    if counters is None:
        return None
    return int(counters["stats"]["unique_graphs"]) or None


def _name_of(pid: int) -> str | None:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).name()
    return None
