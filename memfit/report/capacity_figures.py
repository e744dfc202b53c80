"""The chart of a plan: measured peaks against microbatch, with the line that describes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from matplotlib.ticker import FuncFormatter, MaxNLocator

from memfit.records import Verdict
from memfit.report import capacity_words
from memfit.report.svg import ACCENT, ALLOCATED, FAILED, INK, MUTED, NARROW, WIDE, Chart, draw
from memfit.units import GIB

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memfit.capacity.table import CapacityCell, CapacityTable, Setting

MOST_ROWS, MOST_DEVICES = 6, 4
"""Settings and devices that one chart shows; all others are in the tables."""
_STYLES = ((ACCENT, "o"), (ALLOCATED, "s"), (FAILED, "^"), (MUTED, "D"))
_PANEL = 2.1
"""Inches of height of one setting."""


def shown(table: CapacityTable) -> tuple[tuple[Setting, ...], tuple[str, ...]]:
    """Return the settings and devices of the chart: the first ones that have an answer."""
    cells = [cell for cell in table.matrix if cell.points]
    rows = tuple(r for r in table.spec.settings if any(c.setting == r for c in cells))
    slugs = tuple(s for s in table.spec.devices if any(c.device.slug == s for c in cells))
    return rows[:MOST_ROWS], slugs[:MOST_DEVICES]


def peaks(table: CapacityTable) -> Chart | None:
    """Draw the allocated peaks of every trial, one panel a setting; None where there are none."""
    rows, slugs = shown(table)
    if not rows:
        return None
    note = " (virtual)" if table.is_virtual else ""
    return draw(
        "peaks",
        f"Peak memory against microbatch, setting by setting{note}",
        "Hollow points are allocated peaks and dashed lines their fits; small full points are what "
        "is compared with the limit of the device, a level line. All values are in the table that "
        "follows.",
        lambda figure, narrow: _paint(figure, table, rows, slugs, narrow=narrow),
    )


def _paint(
    figure: Any,
    table: CapacityTable,
    rows: Sequence[Setting],
    slugs: Sequence[str],
    *,
    narrow: bool,
) -> None:
    across = 1 if narrow or len(rows) == 1 else 2
    down = -(-len(rows) // across)
    width = NARROW[0] if narrow else WIDE[0]
    figure.set_size_inches(width, 0.5 + (_PANEL if len(rows) > 1 else 3.0) * down)
    panels = figure.subplots(down, across, squeeze=False).flatten()
    for axes, row in zip(panels, rows, strict=False):
        cells = [c for c in table.matrix if c.setting == row and c.device.slug in slugs]
        _panel(axes, cells, slugs)
        axes.set_title(capacity_words.setting(table, row), fontsize=9.5, loc="left")
    for axes in panels[len(rows) :]:
        axes.set_visible(False)
    figure.supxlabel("microbatch (examples)", fontsize=9.5, color=MUTED)
    figure.supylabel("GiB of one device", fontsize=9.5, color=MUTED)
    handles, names = [], []
    for axes in panels[: len(rows)]:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            if name not in names:
                handles.append(handle)
                names.append(name)
    columns = 2 if narrow else 4
    figure.legend(handles, names, loc="outside upper left", ncols=columns, handlelength=1.6)


def _panel(axes: Any, cells: Sequence[CapacityCell], slugs: Sequence[str]) -> None:
    """Paint one setting: the points of every device, its line and its limit."""
    tops, right = [1.0], 1
    for cell in cells:
        colour, marker = _STYLES[slugs.index(cell.device.slug)]
        fits = [
            (p.microbatch, p.peak_allocated_bytes / GIB)
            for p in cell.points
            if p.verdict is Verdict.FITS and p.peak_allocated_bytes is not None
        ]
        compared = [
            (p.microbatch, p.peak_bytes / GIB)
            for p in cell.points
            if p.verdict is Verdict.FITS and p.peak_bytes is not None
        ]
        limit = cell.device.limit_bytes / GIB
        axes.axhline(limit, color=colour, linewidth=0.9)
        tops.append(limit)
        if compared:
            small = {"linestyle": "", "marker": marker, "markersize": 3, "fillstyle": "full"}
            axes.plot(*zip(*compared, strict=True), color=colour, **small)
        if not fits:
            continue
        right = max(right, *(m for m, _ in fits))
        style = {"linestyle": "", "marker": marker, "markersize": 5.5, "fillstyle": "none"}
        axes.plot(*zip(*fits, strict=True), color=colour, label=cell.device.slug, **style)
        if cell.fit is not None:
            ends = (0, max(m for m, _ in fits))
            heights = [cell.fit.at(m) / GIB for m in ends]
            axes.plot(ends, heights, color=colour, linewidth=1, linestyle=(0, (4, 3)))
        m, height = max(fits)
        axes.annotate(
            str(m),
            (m, height),
            xytext=(0, -5),
            textcoords="offset points",
            ha="center",
            va="top",
            color=INK,
            fontweight="bold",
        )
    axes.set_xlim(0, right * 1.1)
    axes.set_ylim(0, max(tops) * 1.1)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.grid(visible=True, axis="y")
