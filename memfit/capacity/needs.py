"""`--need`: which cells still have to be asked, and the smallest device that does. Pure.

"Smallest" is by memory, as the devices report it: the catalogue knows no prices. Devices are asked
from the least memory upwards and none is skipped, for memory is not all: a device with more of it
may choose kernels that need more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from memfit.capacity.cells import Ask
from memfit.capacity.table import CapacityCell, CellStatus, Needed

ALIKE = 1.02
"""Devices whose memory is at most this much more than the smallest one's are asked as well."""


def has_room(cell: CapacityCell, need: int) -> bool | None:
    """Whether the microbatch was certified in a cell whose probe was capped at it.

    None when that was not decided: the probe failed, or ended before this size was tried.
    """
    if cell.status is CellStatus.NOTHING_FITS:
        return False
    if cell.certificate is None:
        return None
    if cell.microbatch == need:
        return True
    was_tried = any(above.microbatch == need for above in cell.certificate.tried_above)
    return False if was_tried or cell.certificate.ceiling == "tried" else None


class Agenda:
    """Which cell is asked next."""

    def __init__(self, asks: Sequence[Ask], *, need: int | None) -> None:
        """Ask all cells in their order; with `need`, in each row only as far as it takes."""
        self._open = list(asks)
        self._need = need
        self._reach: dict[int, float] = {}
        """Memory up to which the devices of a row are asked, once one does."""

    def ended(self, ask: Ask, cell: CapacityCell) -> None:
        """Note what a cell came to."""
        if self._need is not None and has_room(cell, self._need):
            reach = cell.device.total_bytes * ALIKE
            self._reach[ask.row] = min(reach, self._reach.get(ask.row, reach))

    def next(self) -> Ask | None:
        """Take the next cell, or None when there is nothing left to ask."""
        for position, ask in enumerate(self._open):
            reach = self._reach.get(ask.row)
            if reach is None or ask.column.device.total_bytes <= reach:
                return self._open.pop(position)
        return None

    def drop(self, ask: Ask) -> None:
        """Leave out a cell that an earlier run has answered."""
        self._open.remove(ask)

    @property
    def left(self) -> tuple[Ask, ...]:
        """The cells that were not asked."""
        return tuple(self._open)


def needed_of(
    asks: Sequence[Ask], cells: Mapping[int, CapacityCell], *, need: int
) -> tuple[Needed, ...]:
    """Find for each row the smallest device that does.

    Args:
        asks: All cells of the matrix, in each row from the least memory to the most.
        cells: What each came to, by number.
        need: The microbatch.
    """
    answers = []
    for row in dict.fromkeys(ask.row for ask in asks):
        line = [cells[ask.index] for ask in asks if ask.row == row]
        room = [has_room(cell, need) for cell in line]
        first = room.index(True) if True in room else len(line)
        found = line[first] if first < len(line) else None
        alike = [
            cell.device.slug
            for cell, does in zip(line[first + 1 :], room[first + 1 :], strict=True)
            if does and found and cell.device.total_bytes <= found.device.total_bytes * ALIKE
        ]
        below = [cell.index for cell, does in zip(line, room, strict=True) if does is False]
        below = [index for index in below if index in {c.index for c in line[:first]}]
        answers.append(
            Needed(
                setting=line[0].setting,
                microbatch=need,
                device=found.device.slug if found else None,
                cell=found.index if found else None,
                alike=tuple(alike),
                below=below[-1] if below else None,
                undecided=tuple(
                    cell.index
                    for cell, does in zip(line[:first], room[:first], strict=True)
                    if does is None
                ),
            )
        )
    return tuple(answers)
