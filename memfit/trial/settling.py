"""Whether the allocator has come to rest by the end of a group.

A training step asks for the same blocks in every group, but the allocator does not lay them out
alike at once: a later group can still ask the device for more, and fail where the first two ran.
So while a group made the allocator ask the device for memory and little is left of it, or made it
flush its cache, another one is run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memfit.devices.memory import MemoryReader

MORE_FOR_RETRIES = 2
"""A steady group has no allocator retries; a group that had some is followed by up to this many."""
MORE_FOR_GROWTH = 6
"""Groups that may follow in a trial whose allocator still asks the device for memory."""
_TIMES = 8
_SHARE = 1 / 32
"""Little is left when it is less than this many times what the group took, or than this part of
the limit."""


class Settling:
    """What the last group did to the allocator."""

    def __init__(self, reader: MemoryReader, limit_bytes: int) -> None:
        """Watch a device of which `limit_bytes` may be used."""
        self._reader = reader
        self._limit = limit_bytes
        self._retries_before = 0
        self._taken_before = 0
        self._taken = 0
        self._left = limit_bytes
        self.retries: int | None = None
        """Retries in the last group; None where the device's allocator has none."""

    def begin_group(self) -> None:
        """Look at the counters before a group."""
        reading = self._reader.read(device_used=False)
        self._retries_before = reading.alloc_retries or 0
        self._taken_before = reading.taken_bytes or 0

    def end_group(self) -> None:
        """Look at them after it."""
        reading = self._reader.read(device_used=True)
        if reading.alloc_retries is not None:
            self.retries = reading.alloc_retries - self._retries_before
        if reading.taken_bytes is not None:
            self._taken = reading.taken_bytes - self._taken_before
            held = (reading.reserved_bytes or 0) + (reading.outside_allocator_bytes or 0)
            self._left = self._limit - held

    def wants_another(self, extra: int) -> bool:
        """Whether the last group leaves it open how the next will do, after `extra` more ones."""
        if self.retries and extra < MORE_FOR_RETRIES:
            return True
        tight = self._left < max(_TIMES * self._taken, self._limit * _SHARE)
        return self._taken > 0 and tight and extra < MORE_FOR_GROWTH
