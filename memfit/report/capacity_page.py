"""The page of a capacity plan: a heat map, its tables and its chart put together."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from memfit.capacity.table import CellStatus
from memfit.records import Verdict
from memfit.report import capacity_figures, capacity_words, words
from memfit.report.page import in_page, templates

if TYPE_CHECKING:
    from markupsafe import Markup

    from memfit.capacity.table import CapacityCell, CapacityTable

STEPS = 6
"""Shades of the heat map."""
WHOLE_CELLS, OF_MANY = 100, 20
"""Cells that are told in full, and how many of a larger plan; those without an answer first."""
WHOLE_POINTS = 150
_WHOLE_RECORD = 90_000


def heat(table: CapacityTable, cell: CapacityCell) -> int:
    """Return the shade of a cell, from 1 to `STEPS`, by the doublings of its microbatch."""
    sizes = [c.microbatch for c in table.matrix if c.microbatch is not None]
    if cell.microbatch is None:
        return 0
    low, high = math.log2(min(sizes)), math.log2(max(sizes))
    if high == low:
        return STEPS // 2
    return 1 + round((STEPS - 1) * (math.log2(cell.microbatch) - low) / (high - low))


def told(table: CapacityTable) -> tuple[CapacityCell, ...]:
    """Return the cells that are told in full: all of them, or the first ones of a large plan."""
    cells = [c for c in table.cells if c.status is not CellStatus.NOT_PROBED]
    if len(cells) > WHOLE_CELLS:
        cells.sort(key=lambda c: c.status is CellStatus.FITS)
        cells = sorted(cells[:OF_MANY], key=lambda c: c.index)
    return tuple(cells)


def embed(table: CapacityTable) -> Markup | None:
    """Write the record as JSON for its page; None when it is long."""
    text = msgspec.json.encode(table).decode()
    if len(text) > _WHOLE_RECORD:
        return None
    return in_page(text)


def render_page(table: CapacityTable) -> str:
    """Make the page of a plan.

    Args:
        table: The answer.

    Returns:
        A whole HTML document.
    """
    cells = told(table)
    points = [(cell, point) for cell in cells for point in cell.points]
    limits = list(dict.fromkeys(limit for cell in table.cells for limit in cell.limits))
    page = templates().get_template("capacity.html.j2")
    return page.render(
        table=table,
        spec=table.spec,
        words=words,
        says=capacity_words,
        virtual=table.is_virtual,
        names=capacity_words.varied(table),
        heat={cell.index: heat(table, cell) for cell in table.matrix},
        rows=[
            (row, table.matrix[start : start + len(table.spec.devices)])
            for start, row in zip(
                range(0, len(table.matrix), len(table.spec.devices)),
                table.spec.settings,
                strict=True,
            )
        ],
        devices=[cell.device for cell in table.matrix[: len(table.spec.devices)]],
        cells=cells,
        linked={cell.index for cell in cells},
        left_out=sum(c.status is not CellStatus.NOT_PROBED for c in table.cells) - len(cells),
        unanswered=[c for c in cells if c.status is not CellStatus.FITS],
        points=points[:WHOLE_POINTS],
        points_left_out=len(points) - len(points[:WHOLE_POINTS]),
        peaks=capacity_figures.peaks(table),
        shown=capacity_figures.shown(table),
        fits=Verdict.FITS,
        limits=limits,
        data=embed(table),
    )
