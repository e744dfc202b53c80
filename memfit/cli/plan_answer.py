"""A capacity plan on a terminal: a sentence, one table, and what it leaves out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from memfit.capacity.table import CellStatus
from memfit.report import capacity_words, words

if TYPE_CHECKING:
    from rich.console import Console

    from memfit.capacity.table import CapacityCell, CapacityTable

_WIDE = 150


def render_plan(table: CapacityTable, console: Console) -> None:
    """Print the answer of a plan.

    Args:
        table: The answer.
        console: Where to print; nothing depends on its colours.
    """
    if not console.is_terminal:
        console.width = max(console.width, _WIDE)
    console.print(Text(words.sentence(capacity_words.headline(table)), style="bold"))
    for need in table.needed:
        if len(table.needed) > 1:
            console.print(Text(f"- {capacity_words.needed(table, need)}"))
        below = capacity_words.below(table, need)
        if below:
            console.print(Text(f"  the next smaller, {below}", style="dim"))
    if table.needed:
        console.print(Text(capacity_words.BY_MEMORY, style="dim"))
    console.print()
    virtual = ", virtual" if table.is_virtual else ""
    console.print(Text(f"{table.workload.name}, {capacity_words.fixed(table)}{virtual}:"))
    console.print(_table(table))
    for note in _notes(table):
        console.print(Text(f"note: {note}"))


def _table(table: CapacityTable) -> Table:
    names = capacity_words.varied(table)
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    made.add_column("device", no_wrap=True)
    for name in names:
        made.add_column(name, no_wrap=True, justify="right")
    made.add_column("m", no_wrap=True, justify="right")
    made.add_column(f"m {words.TIMES} A {words.TIMES} D", no_wrap=True)
    for name in ("peak", "of limit", "left"):
        made.add_column(name, no_wrap=True, justify="right")
    made.add_column("most of it")
    room = any(cell.tries for cell in table.matrix)
    if room:
        made.add_column("what buys room")
    row = None
    for cell in table.matrix:
        if cell.status is CellStatus.NOT_PROBED:
            continue
        if row is not None and row != cell.setting and len(table.spec.devices) > 1:
            made.add_row()
        row = cell.setting
        bought = "; ".join(capacity_words.tried(table, cell, one) for one in cell.tries)
        made.add_row(
            cell.device.slug,
            *(capacity_words.value(cell.setting, name) for name in names),
            *_figures(cell),
            *([bought] if room else []),
        )
    return made


def _figures(cell: CapacityCell) -> list[Text | str]:
    if cell.status is not CellStatus.FITS:
        style = "red" if cell.status is CellStatus.FAILED else "yellow"
        return [
            Text("-"),
            Text(capacity_words.STATUSES[cell.status], style=style),
            "",
            words.size(cell.device.limit_bytes),
            "",
            "",
        ]
    return [
        Text(str(cell.microbatch), style="bold"),
        capacity_words.short_split(cell),
        words.size(cell.peak_bytes),
        words.size(cell.device.limit_bytes),
        words.size(cell.headroom_left_bytes),
        capacity_words.dominant(cell),
    ]


def _notes(table: CapacityTable) -> list[str]:
    notes = list(table.notes)
    for cell in table.matrix:
        if cell.status in (CellStatus.NOTHING_FITS, CellStatus.FAILED, CellStatus.CANNOT_JUDGE):
            place = capacity_words.listed(cell.setting, capacity_words.varied(table))
            told = f" ({place})" if place else ""
            notes.append(f"{cell.device.slug}{told}: {cell.message}")
    skipped = sum(cell.status is CellStatus.NOT_PROBED for cell in table.matrix)
    if skipped:
        notes.append(f"{words.number(skipped, 'cell')} of larger devices not probed")
    advice = capacity_words.advice(table)
    if advice:
        notes.append(advice)
    return notes
