"""What every block at a peak is: its category, the module and the line that allocated it.

A recorder notes, while a trial runs, at which event what began: a phase, a module, the backward
of a node; and which addresses held parameters, gradients and the like. This module puts those
notes together with the replayed history. Nothing here imports torch.
"""

from __future__ import annotations

import bisect
import linecache
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memfit.folding import fold, natural
from memfit.records import Category, Ledger, LedgerPeak, LedgerRow
from memfit.trial.ledger_replay import Block, History

_ORDER: tuple[Category, ...] = Category.__args__  # type: ignore[attr-defined]
_PHASES = ("build", "forward", "backward", "optimizer_step")
_LIBRARY_MODULES = ("nn/modules/conv.py", "nn/modules/linear.py", "nn/modules/rnn.py")
_LIBRARY_NODES = ("Convolution", "Cudnn", "Addmm", "Mm", "Bmm", "Baddbmm")
"""Where kernels of cuBLAS and cuDNN are called from, which ask for scratch memory."""
_PACKAGES = re.compile(r"/(?:site|dist)-packages/")


@dataclass(frozen=True, slots=True)
class Place:
    """A line of source."""

    file: str
    """As it is told: relative to the project, or to the installed packages."""
    line: int
    function: str
    text: str = ""
    """The line itself, where it is the user's."""

    @property
    def told(self) -> str:
        """File and line."""
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Where:
    """What the program is doing, as far as allocations do not tell themselves."""

    module: str = ""
    place: Place | None = None
    """Place in forward of the node whose backward runs; None outside of backward."""
    node: str | None = None
    """Name of that node."""
    recomputes: int | None = None
    """Number of the forward pass of a module that runs inside of backward."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch between two readings of the measured peaks."""

    name: str
    groups: str
    begin: int
    end: int


@dataclass(slots=True)
class Notes:
    """What was noted while the trial ran; every moment is a number of events."""

    phases: list[Phase] = field(default_factory=list)
    backwards: list[int] = field(default_factory=list)
    """Moments at which a microbatch's backward began."""
    where: list[tuple[int, Where]] = field(default_factory=list)
    labels: list[tuple[int, int, Category, str]] = field(default_factory=list)
    """Moment, address, category and module of memory that is known by what holds it."""
    recomputed_until: dict[int, int] = field(default_factory=dict)
    """Moments at which the forward passes inside of backward ended, by their number."""
    ended: int = 0
    """The moment after which only the libraries' own workspaces were freed."""
    optimizer: Place | None = None
    """Where the user made the optimizer."""
    group_ends: list[int] = field(default_factory=list)


class Sources:
    """Turns frames into places."""

    def __init__(self, *, torch: str, memfit: str, installed: Sequence[str], project: Path) -> None:
        """Say which files are whose.

        Args:
            torch: Folder of torch.
            memfit: Folder of memfit.
            installed: Folders of the standard library and of installed packages.
            project: The folder that the user's files are told relative to.
        """
        self._torch = f"{torch}/"
        self._memfit = f"{memfit}/"
        self._installed = tuple(f"{folder}/" for folder in installed)
        self._project = project
        self._owner: dict[str, int] = {}
        self._told: dict[str, str] = {}

    def owner(self, filename: str) -> int:
        """Return 0 for the user's own file, 1 for another package's, 2 for torch's, 3 for none."""
        known = self._owner.get(filename)
        if known is None:
            known = self._owner[filename] = self._judge(filename)
        return known

    def _judge(self, filename: str) -> int:
        if filename.startswith(self._torch):
            return 2
        if filename.startswith(("<", self._memfit)):
            return 3
        if _PACKAGES.search(filename):
            return 1
        return 3 if filename.startswith(self._installed) else 0

    def place(self, filename: str, line: int, function: str) -> Place:
        """Tell one frame."""
        told = self._told.get(filename)
        if told is None:
            told = _PACKAGES.split(filename)[-1]
            if told == filename:
                told = _relative(filename, self._project)
            self._told[filename] = told
        text = linecache.getline(filename, line).strip() if self.owner(filename) == 0 else ""
        return Place(told, line, function, text)

    def innermost(self, frames: Sequence[Mapping[str, Any]]) -> tuple[Place | None, int]:
        """Return the frame that tells most, and whose it is.

        That is the innermost of the user's, else of another package's, else of torch's.
        """
        best: tuple[int, Mapping[str, Any]] | None = None
        for frame in frames:
            owner = self.owner(frame["filename"])
            if owner == 0:
                best = (0, frame)
                break
            if best is None or owner < best[0]:
                best = (owner, frame)
        if best is None or best[0] > 2:  # noqa: PLR2004
            return None, 3
        found = best[1]
        return self.place(found["filename"], found["line"], found["name"]), best[0]


def _relative(filename: str, project: Path) -> str:
    path = Path(filename)
    try:
        return str(path.relative_to(project))
    except ValueError:
        return "/".join(path.parts[-2:])  # where a home or a checkout lies is nobody's business


@dataclass(frozen=True, slots=True)
class Told:
    """A block with what is known of it."""

    block: Block
    category: Category
    module: str
    place: Place | None


def tell(history: History, notes: Notes, sources: Sources, blocks: Sequence[Block]) -> list[Told]:
    """Say of each of these blocks what it is."""
    labels = _labelled(history, notes)
    moments = [moment for moment, _ in notes.where]
    births = [block.born for block in history.blocks]
    told: list[Told] = []
    for block in blocks:
        at = bisect.bisect_right(moments, block.born) - 1
        where = notes.where[at][1] if at >= 0 else Where()
        place, owner = sources.innermost(block.frames)
        phase = _phase_at(notes.phases, block.born)
        if where.place is not None and owner > 0:
            place = where.place
        elif phase == "optimizer_step" and owner > 0 and notes.optimizer is not None:
            place = notes.optimizer
        label = labels.get(block)
        if label is not None:
            category, module = label
        else:
            category = _category(block, where, phase, notes, births)
            module = where.module
        told.append(Told(block, category, module, place))
    return told


def _labelled(history: History, notes: Notes) -> dict[Block, tuple[Category, str]]:
    """Find the blocks whose addresses were noted; what was noted first stays."""
    by_address: dict[int, list[Block]] = defaultdict(list)
    for block in history.blocks:
        by_address[block.address].append(block)
    found: dict[Block, tuple[Category, str]] = {}
    for moment, address, category, module in notes.labels:
        for block in by_address.get(address) or _holding(history, address, moment):
            if block.lives_at(moment):
                found.setdefault(block, (category, module))
    return found


def _holding(history: History, address: int, moment: int) -> list[Block]:
    """Blocks that hold an address in their middle: parts of what somebody else cut up."""
    return [
        block
        for block in history.alive_at(moment)
        if block.address < address < block.address + block.size_bytes
    ]


def _phase_at(phases: Sequence[Phase], moment: int) -> str:
    for phase in phases:
        if phase.begin <= moment < phase.end:
            return phase.name
    return "other"


def _category(
    block: Block, where: Where, phase: str, notes: Notes, births: Sequence[int]
) -> Category:
    """Tell a block that nobody has labelled by when it came and went."""
    died = block.died
    if died is not None and died >= notes.ended:
        return "workspace"
    if _is_scratch(block, where, births):
        return "workspace"
    if phase == "forward":
        index = bisect.bisect_right(notes.backwards, block.born)
        needed = notes.backwards[index] if index < len(notes.backwards) else notes.ended
        return "activations" if died is None or died >= needed else "temporary"
    if phase == "backward" and where.recomputes is not None:
        until = notes.recomputed_until.get(where.recomputes, notes.ended)
        return "activations" if died is None or died >= until else "temporary"
    if died is None:
        return "other"
    ends = next((p.end for p in notes.phases if p.begin <= block.born < p.end), notes.ended)
    return "temporary" if died <= ends or phase in ("backward", "optimizer_step") else "other"


def _is_scratch(block: Block, where: Where, births: Sequence[int]) -> bool:
    """Whether a library took this for one call: nothing was allocated while it lived."""
    if block.died is None:
        return False
    after = bisect.bisect_right(births, block.born)
    if after < len(births) and births[after] < block.died:
        return False
    if where.node is not None and where.recomputes is None:
        return where.node.startswith(_LIBRARY_NODES)
    return bool(block.frames) and block.frames[0]["filename"].endswith(_LIBRARY_MODULES)


def ledger(history: History, notes: Notes, sources: Sources) -> Ledger:
    """Sum the blocks of each phase's highest moment up."""
    peaks: list[LedgerPeak] = []
    moments: list[int] = []
    for name in _PHASES:
        found = [
            (*history.highest(phase.begin, phase.end), phase.groups)
            for phase in notes.phases
            if phase.name == name
        ]
        if not found:
            continue
        level, moment, groups = max(found, key=lambda item: item[0])
        peaks.append(
            LedgerPeak(phase=name, groups=groups, allocated_bytes=level)  # type: ignore[arg-type]
        )
        moments.append(moment)
    sums: dict[tuple[Category, str, Place | None], list[list[int]]] = {}

    def add(key: tuple[Category, str, Place | None], block: Block, size: int) -> None:
        entry = sums.setdefault(key, [[0, 0] for _ in moments])
        for column, moment in zip(entry, moments, strict=True):
            if block.lives_at(moment):
                column[0] += size
                column[1] += 1

    shown = [b for b in history.blocks if any(b.lives_at(moment) for moment in moments)]
    for item in tell(history, notes, sources, shown):
        block = item.block
        add(
            (item.category, item.module, item.place),
            block,
            block.size_bytes - block.remainder_bytes,
        )
        if block.remainder_bytes:
            add(("remainders", "", None), block, block.remainder_bytes)
    return Ledger(peaks=tuple(peaks), rows=_rows(sums))


def _rows(
    sums: Mapping[tuple[Category, str, Place | None], Sequence[Sequence[int]]],
) -> tuple[LedgerRow, ...]:
    """Make rows of sums, with numbered modules of equal bytes in one."""
    alike: dict[Any, list[str]] = defaultdict(list)
    for (category, module, place), columns in sums.items():
        key = (category, place, tuple(b for b, _ in columns), tuple(n for _, n in columns))
        alike[key].append(module)
    rows = [
        LedgerRow(
            category=category,
            module=path,
            place=place.told if place else None,
            function=place.function if place else "",
            text=place.text if place else "",
            bytes=tuple(size * len(members) for size in sizes),
            blocks=tuple(count * len(members) for count in blocks),
        )
        for (category, place, sizes, blocks), modules in alike.items()
        for path, members in fold(modules)
    ]
    return tuple(sorted(rows, key=_by_name))


def _by_name(row: LedgerRow) -> tuple[Any, ...]:
    file, _, line = (row.place or "").rpartition(":")
    return (_ORDER.index(row.category), natural(row.module), file, int(line or 0), row.bytes)
