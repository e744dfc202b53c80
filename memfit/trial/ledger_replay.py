"""The allocator's history replayed: every block with its bytes, its birth and its death.

The history tells what was requested; the allocator hands out whole blocks. How large they were
follows from its own rules (`CUDACachingAllocator.cpp`: `round_size`, `should_split`): requests are
rounded up, and a free block of the large pool is split only where more than 1 MiB would be left.
Moments are counted in events, which are allocations and frees, as the allocator's own counters do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from memfit.units import MIB

_MIN_BLOCK = 512
"""kMinBlockSize."""
_SMALL_SEGMENT = 2 * MIB
"""kSmallBuffer: the size of every segment of the small pool, whose blocks are always split."""
_MOVES = {"alloc", "free_requested", "free_completed", "segment_alloc", "segment_free"}
"""Entries of a history that say what becomes of memory."""
_UNSPLIT = MIB
"""kSmallSize: a large block keeps what would leave no more than this."""


@dataclass(slots=True, eq=False)
class Block:
    """One block that the allocator handed out."""

    address: int
    size_bytes: int
    """Bytes as the allocator counts them, rounding and unsplit remainder included."""
    remainder_bytes: int
    """The unsplit remainder in them."""
    born: int
    """Events that had happened before it was allocated."""
    died: int | None
    """Events that had happened before it was freed; None for one that never was."""
    frames: Sequence[Mapping[str, Any]]
    """Python frames of the allocation, the innermost first; none where no Python ran."""

    def lives_at(self, moment: int) -> bool:
        """Whether it is allocated once `moment` events have happened."""
        return self.born < moment and (self.died is None or self.died >= moment)


@dataclass(frozen=True, slots=True)
class Rules:
    """Settings of the allocator that decide how large blocks are."""

    expandable: bool = False
    max_split_bytes: int = -1
    """Larger blocks are not split; -1 for no such limit."""
    divisions: Mapping[int, int] = field(default_factory=dict)
    """`roundup_power2_divisions`: megabytes (a power of two) to divisions; none where it is 0."""

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Rules:
        """Read the `allocator_settings` of a snapshot."""
        divisions = settings.get("roundup_power2_divisions") or {}
        return cls(
            expandable=bool(settings.get("expandable_segments", False)),
            max_split_bytes=int(settings.get("max_split_size", -1)),
            divisions={int(k): int(v) for k, v in divisions.items() if int(v) > 1},
        )

    def round(self, requested: int) -> int:
        """Round a request up as the allocator does."""
        if requested < _MIN_BLOCK:
            return _MIN_BLOCK
        divisions = self._divisions_for(requested)
        if divisions > 1 and requested > _MIN_BLOCK * divisions:
            floor = 1 << (requested.bit_length() - 1)
            step = floor // divisions
            return -(-requested // step) * step
        return -(-requested // _MIN_BLOCK) * _MIN_BLOCK

    def _divisions_for(self, requested: int) -> int:
        if not self.divisions:
            return 0
        exponent = min(max(requested.bit_length() - 1 - 20, 0), 15)
        return self.divisions.get(1 << exponent, 0)

    def splits(self, block: int, rounded: int, *, small: bool) -> bool:
        """Whether a free block is split for a request, rather than handed out whole."""
        if small:
            return block - rounded >= _MIN_BLOCK
        if 0 <= self.max_split_bytes <= rounded:
            return False
        return block - rounded > _UNSPLIT


class Space:
    """Free ranges of the segments, so far as they decide the size of a block."""

    def __init__(self, rules: Rules) -> None:
        """Begin without a segment."""
        self._rules = rules
        self._end_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        self._segments: dict[int, int] = {}
        self._bounds: set[int] = set()
        self._small: set[int] = set()
        """Starts of free ranges in segments of the small pool."""

    def add(self, start: int, size: int) -> None:
        """Add a segment that the driver gave."""
        self._segments[start] = start + size
        self._bounds |= {start, start + size}
        self._free(start, start + size, small=size == _SMALL_SEGMENT)

    def remove(self, start: int, size: int) -> None:
        """Take away a segment that went back to the driver."""
        self._segments.pop(start, None)
        self._bounds -= {start, start + size}
        self._bounds |= {edge for pair in self._segments.items() for edge in pair}
        end = self._end_of.pop(start, None)
        if end is not None:
            self._start_of.pop(end, None)
        self._small.discard(start)

    def take(self, start: int, requested: int) -> tuple[int, bool]:
        """Hand a block out, and return its bytes and whether it lies in the small pool."""
        rounded = self._rules.round(requested)
        end = self._end_of.pop(start, None)
        if end is None:  # an expandable segment, whose blocks are always split
            return rounded, False
        del self._start_of[end]
        small = start in self._small
        self._small.discard(start)
        if not self._rules.splits(end - start, rounded, small=small):
            return end - start, small
        self._free(start + rounded, end, small=small)
        return rounded, small

    def give_back(self, start: int, size: int, *, small: bool) -> None:
        """Take a block back, and join it with its free neighbours."""
        end = start + size
        if end not in self._bounds and end in self._end_of:
            following = self._end_of.pop(end)
            del self._start_of[following]
            self._small.discard(end)
            end = following
        if start not in self._bounds and start in self._start_of:
            before = self._start_of.pop(start)
            del self._end_of[before]
            self._small.discard(before)
            start = before
        self._free(start, end, small=small)

    def _free(self, start: int, end: int, *, small: bool) -> None:
        if start < end:
            self._end_of[start] = end
            self._start_of[end] = start
            if small:
                self._small.add(start)


@dataclass(slots=True)
class History:
    """All blocks of a trial, and the allocated bytes after every event."""

    blocks: list[Block]
    """In the order of their births."""
    levels: list[int]
    """Allocated bytes once 0, 1, 2, … events have happened."""

    def highest(self, begin: int, end: int) -> tuple[int, int]:
        """Return the bytes and the moment of the first peak from `begin` to `end`, both included.

        Moments beyond the last event are that of the last event.
        """
        last = len(self.levels) - 1
        begin, end = min(begin, last), min(end, last)
        moment = max(range(begin, end + 1), key=self.levels.__getitem__)
        return self.levels[moment], moment

    def alive_at(self, moment: int) -> list[Block]:
        """Return the blocks that are allocated once `moment` events have happened."""
        return [block for block in self.blocks if block.lives_at(moment)]


def replay(trace: Iterable[Mapping[str, Any]], rules: Rules) -> History:
    """Replay a trace that began with an empty allocator.

    Args:
        trace: Entries of one device in `torch.cuda.memory._snapshot()["device_traces"]`.
        rules: The allocator's settings.
    """
    space = Space(rules)
    live: dict[int, Block] = {}
    small: set[int] = set()
    leaving: dict[int, Block] = {}
    history = History(blocks=[], levels=[0])
    moment, level = 0, 0
    for entry in trace:
        action = entry["action"]
        if action not in _MOVES:
            continue  # such as a refused request, which has no address
        address = entry["addr"]
        if action == "alloc":
            size, is_small = space.take(address, entry["size"])
            left = size - rules.round(entry["size"])
            block = Block(address, size, left, moment, None, entry.get("frames", ()))
            live[address] = block
            if is_small:
                small.add(address)
            history.blocks.append(block)
            level += size
        elif action == "free_requested":
            gone = live.pop(address, None)
            if gone is not None:
                gone.died = moment
                leaving[address] = gone
                level -= gone.size_bytes
        elif action == "free_completed":
            gone = leaving.pop(address, None)
            if gone is not None and not rules.expandable:
                space.give_back(address, gone.size_bytes, small=address in small)
            small.discard(address)
            continue
        elif action == "segment_alloc":
            space.add(address, entry["size"])
            continue
        else:
            space.remove(address, entry["size"])
            continue
        moment += 1
        history.levels.append(level)
    return history
