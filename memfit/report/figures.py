"""The charts of a result: peaks against microbatch, the parts of the peak, one group in time."""

from __future__ import annotations

from string import ascii_uppercase
from typing import TYPE_CHECKING, Any, NamedTuple

from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.ticker import FuncFormatter, MaxNLocator

from memfit.records import Verdict
from memfit.report import words
from memfit.report.svg import (
    ACCENT,
    ALLOCATED,
    FAILED,
    INK,
    MUTED,
    NARROW,
    ON_PART,
    PARTS,
    SHADE,
    STEP,
    WIDE,
    Chart,
    draw,
)
from memfit.units import GIB

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memfit.records import Composition, ProbeResult, Timeline, TrialResult

_CURVE_POINTS = 600
_LEFT_COLOUR = 8
_PART_COLOURS = {
    "the process before the workload": 7,
    "parameters": 1,
    "buffers": 2,
    "gradients": 3,
    "optimizer state": 4,
    "activations": 5,
    "activations and temporaries": 5,
    "temporaries": 9,
    "the microbatch, workspaces and remainders": 10,
}
_MARKERS = {
    Verdict.OOM: "X",
    Verdict.HOST_OOM: "D",
    Verdict.THRASH: "v",
    Verdict.SIZE_LIMIT: "^",
}


class Part(NamedTuple):
    """One segment of the bar that makes up the peak."""

    letter: str
    name: str
    size: int
    colour: int
    """Number of its colour in the style sheet, from 1."""


def _gib_axis(axis: Any) -> None:
    axis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def peaks(result: ProbeResult) -> Chart:
    """Peak memory of every trial against its microbatch, with the limit."""
    trials = [t for t in result.trials if t.spec.purpose != "diagnose"]
    note = " (virtual)" if words.is_virtual(result) else ""
    return draw(
        "peaks",
        f"Peak memory against microbatch{note}",
        f"{words.answer(result)} All values are in the table that follows.",
        lambda figure, narrow: _paint_peaks(figure, result, trials, narrow=narrow),
    )


def _paint_peaks(
    figure: Any, result: ProbeResult, trials: Sequence[TrialResult], *, narrow: bool
) -> None:
    axes = figure.add_subplot()
    limit = result.spec.device.limit_bytes / GIB
    compared = _points((t, t.peak_bytes) for t in trials if t.verdict is Verdict.FITS)
    allocated = _points((t, t.peak_allocated_bytes) for t in trials if t.verdict is Verdict.FITS)
    name = "resident memory" if not allocated else "reserved, and outside the allocator"
    _series(axes, compared, name=f"fits: {name}", colour=ACCENT, marker="o")
    _series(axes, allocated, name="fits: allocated", colour=ALLOCATED, marker="s")
    failed = _failures(axes, trials)
    sizes = [t.spec.split.microbatch for t in trials]
    tops = [y for _, y in (*compared, *failed)]
    axes.set_xlim(*_span(sizes, right=0.28 if narrow else 0.16))
    axes.set_ylim(0, max([limit, *tops]) * 1.14)
    _number_failures(axes, failed, narrow=narrow)
    axes.axhline(limit, color=INK, linewidth=1.1, linestyle=(0, (5, 3)))
    axes.annotate(
        f"limit {limit:.2f} GiB",
        (axes.get_xlim()[0], limit),
        xytext=(5, 4),
        textcoords="offset points",
    )
    _label_answer(axes, result, dict(compared))
    axes.set_xlabel("microbatch (examples)")
    axes.set_ylabel("GiB of one device")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5 if narrow else 9, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    _gib_axis(axes.yaxis)
    axes.grid(visible=True, axis="y")
    shown = len(axes.get_legend_handles_labels()[0])
    columns = 1 if narrow else (3 if shown <= 3 else 2)  # noqa: PLR2004
    figure.legend(loc="outside upper left", ncols=columns, handlelength=1.6)


def _points(found: Any) -> list[tuple[int, float]]:
    """Microbatch and GiB of the trials that have a figure; the highest of each size, sorted."""
    best: dict[int, float] = {}
    for trial, value in found:
        if value is not None:
            m = trial.spec.split.microbatch
            best[m] = max(best.get(m, 0.0), value / GIB)
    return sorted(best.items())


def _series(
    axes: Any, points: Sequence[tuple[int, float]], *, name: str, colour: str, marker: str
) -> None:
    if points:
        style = {"linewidth": 1.4, "marker": marker, "markersize": 6, "color": colour}
        axes.plot(*zip(*points, strict=True), label=name, **style)


def _span(sizes: Sequence[int], *, right: float) -> tuple[float, float]:
    """Limits of the axis of microbatches: from 0, unless all sizes are far from it."""
    low, high = min(sizes), max(sizes)
    start = 0.0 if 2 * low <= high else low - 0.4 * max(high - low, 1)
    return start, high + right * (high - start) + 0.2


def _failures(axes: Any, trials: Sequence[TrialResult]) -> list[tuple[int, float]]:
    """Mark what does not fit, one shape for each verdict."""
    failed = [t for t in trials if t.verdict is not Verdict.FITS]
    points: list[tuple[int, float]] = []
    for verdict in sorted({t.verdict for t in failed}):
        found = _points(
            (t, t.demand_bytes if t.demand_bytes is not None else t.peak_bytes)
            for t in failed
            if t.verdict is verdict
        )
        if found:
            style = {"linestyle": "", "marker": _MARKERS.get(verdict, "P"), "color": FAILED}
            name = f"does not fit: {words.verdict(verdict)}"
            axes.plot(*zip(*found, strict=True), label=name, markersize=8, **style)
        points.extend(found)
    return points


def _number_failures(axes: Any, points: Sequence[tuple[int, float]], *, narrow: bool) -> None:
    """Write the microbatch above each failure, as long as it does not cover its neighbour's."""
    low, high = axes.get_xlim()
    character = (0.034 if narrow else 0.018) * (high - low)
    free_from = low
    for m, height in sorted(points):
        half = character * len(str(m)) / 2
        if m - half < free_from:
            continue
        free_from = m + half + character / 2
        axes.annotate(
            str(m),
            (m, height),
            xytext=(0, 7),
            textcoords="offset points",
            ha="center",
            color=FAILED,
        )


def _label_answer(axes: Any, result: ProbeResult, heights: dict[int, float]) -> None:
    m = result.certificate.microbatch
    if m in heights:
        axes.annotate(
            f"{m}: the answer",
            (m, heights[m]),
            xytext=(9, -3),
            textcoords="offset points",
            ha="left",
            va="top",
            color=ACCENT,
            fontweight="bold",
        )


def parts(result: ProbeResult, made_of: Composition) -> tuple[Part, ...]:
    """Split the answer's peak into its parts, and the rest of the device up to the limit.

    What lies beyond the allocated bytes appears only where it was measured.
    """
    trial, limit = result.answer, result.spec.device.limit_bytes
    reserved, top = trial.peak_reserved_bytes, trial.peak_bytes
    named = [(name, size, _PART_COLOURS[name]) for name, size in made_of.parts.items()]
    if not made_of.baseline_bytes:
        named = [part for part in named if part[0] != "the process before the workload"]
    if reserved is not None and top is not None:
        named.append(
            ("reserved by the allocator, not allocated", reserved - made_of.total_bytes, 6)
        )
        named.append(("outside the allocator", top - reserved, 7))
    if top is not None:
        named.append(("left up to the limit", limit - top, _LEFT_COLOUR))
    shown = [part for part in named if part[1] >= 0]
    return tuple(
        Part(letter=letter, name=name, size=value, colour=colour)
        for letter, (name, value, colour) in zip(ascii_uppercase, shown, strict=False)
    )


def composition(result: ProbeResult, made_of: Composition) -> Chart:
    """Draw the parts of the peak as one stacked bar."""
    note = " (virtual)" if words.is_virtual(result) else ""
    found = parts(result, made_of)
    told = "; ".join(f"{part.name} {words.size(part.size)}" for part in found)
    return draw(
        "composition",
        f"What the peak is made of{note}",
        f"{told}.",
        lambda figure, narrow: _paint_parts(figure, found, narrow=narrow),
    )


def _paint_parts(figure: Any, found: Sequence[Part], *, narrow: bool) -> None:
    figure.set_size_inches(NARROW[0] if narrow else WIDE[0], 1.3)
    axes = figure.add_subplot()
    whole = sum(part.size for part in found) / GIB
    room, small = (0.10, 0.03) if not narrow else (0.2, 0.05)
    left, raised = 0.0, False
    for part in found:
        width = part.size / GIB
        empty = part.colour == _LEFT_COLOUR
        axes.barh(
            [0],
            [width],
            left=left,
            height=1,
            color="none" if empty else PARTS[part.colour - 1],
            edgecolor=MUTED,
            linewidth=0.6,
            linestyle="--" if empty else "-",
        )
        middle = left + width / 2
        if width > room * whole:
            named = f"  {part.name}" if width > 4 * room * whole and not narrow else ""
            text = f"{part.letter}{named}  {words.size(part.size)}"
            colour = INK if empty else ON_PART
            axes.text(middle, 0, text, ha="center", va="center", color=colour)
        elif width > small * whole:
            colour = INK if empty else ON_PART
            axes.text(middle, 0, part.letter, ha="center", va="center", color=colour)
        elif part.size:
            height = 0.56 if not raised else 0.86
            raised = not raised
            axes.text(middle, height, part.letter, ha="center", va="bottom")
        left += width
    axes.set_xlim(0, whole)
    axes.set_ylim(-0.5, 1.15)
    axes.yaxis.set_visible(False)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("GiB of one device; letters are in the table")
    _gib_axis(axes.xaxis)


def timeline(result: ProbeResult, found: Timeline) -> Chart:
    """Draw allocated memory over one group, phase by phase."""
    note = " (virtual)" if words.is_virtual(result) else ""
    top = max((point.allocated_bytes for point in found.points), default=0)
    return draw(
        "timeline",
        f"Allocated memory over one group{note}",
        f"{found.events:,} allocator events in {len(found.phases):,} phases; the highest point is "
        f"{words.size(top)}. The table that follows has every phase's peak.",
        lambda figure, narrow: _paint_timeline(figure, found, narrow=narrow),
    )


def _paint_timeline(figure: Any, found: Timeline, *, narrow: bool) -> None:
    axes = figure.add_subplot()
    curve = thin([(p.event, p.allocated_bytes) for p in found.points], _CURVE_POINTS)
    events, sizes = zip(*curve, strict=True)
    heights = [size / GIB for size in sizes]
    ends = [phase.event for phase in found.phases[1:]] + [found.events]
    spans = list(zip(found.phases, ends, strict=True))
    forward = [(p.event, end) for p, end in spans if p.phase == "forward"]
    if words.shades_forward(found):
        _bands(axes, forward, colour=SHADE, name="shaded: forward")
    last = [(p.event, end) for p, end in spans if p.phase == "optimizer_step"]
    _bands(axes, last, colour=STEP, name="dark: optimizer step")
    axes.plot(events, heights, color=ACCENT, linewidth=1.2, drawstyle="steps-post")
    highest = max(range(len(heights)), key=lambda i: heights[i])
    right = events[highest] > found.events / 2
    axes.plot([events[highest]], [heights[highest]], "o", color=ACCENT, markersize=5)
    axes.annotate(
        f"peak {heights[highest]:.2f} GiB",
        (events[highest], heights[highest]),
        xytext=(-7 if right else 7, 7),
        textcoords="offset points",
        ha="right" if right else "left",
        fontweight="bold",
    )
    axes.set_xlim(0, max(found.events, 1))
    axes.set_ylim(0, max(heights) * 1.2 or 1)
    axes.set_xlabel("allocator events in the group")
    axes.set_ylabel("allocated, GiB")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=4 if narrow else 7, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    _gib_axis(axes.yaxis)
    _label_microbatches(axes, found, narrow=narrow)
    figure.legend(loc="outside lower left", ncols=2, handlelength=1.2)


def _bands(axes: Any, spans: Sequence[tuple[int, int]], *, colour: str, name: str) -> None:
    """Shade stretches of the x axis in one path, which keeps the file small."""
    if not spans:
        return
    corners = [corner for a, b in spans for corner in ((a, 0), (b, 0), (b, 1), (a, 1), (a, 0))]
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(spans)
    shape = PathPatch(
        Path(corners, codes),
        transform=axes.get_xaxis_transform(),
        facecolor=colour,
        linewidth=0,
        label=name,
    )
    axes.add_patch(shape)


def _label_microbatches(axes: Any, found: Timeline, *, narrow: bool) -> None:
    """Number the microbatches above the axes, no more of them than are readable."""
    starts = [
        (p.microbatch + 1, p.event)
        for p in found.phases
        if p.phase == "forward" and p.microbatch is not None
    ]
    if not starts:
        return
    most = 6 if narrow else 12
    every = next(n for n in (1, 2, 5, *range(10, 10_010, 10)) if len(starts) / n <= most)
    chosen = [(i, e) for i, e in starts if i % every == 0 or i == 1]
    if every > 1 and len(chosen) > 1 and chosen[1][0] - chosen[0][0] < 0.75 * every:
        del chosen[1]
    top = axes.secondary_xaxis("top")
    top.set_xticks([event for _, event in chosen])
    top.set_xticklabels([str(number) for number, _ in chosen])
    top.set_xlabel("microbatch of the group, where its forward begins")
    top.spines["top"].set_visible(False)


def thin(curve: Sequence[tuple[int, int]], most: int) -> list[tuple[int, int]]:
    """Keep about `most` points of a curve, the lowest and highest of every stretch among them."""
    if len(curve) <= most:
        return list(curve) or [(0, 0)]
    stretch = -(-2 * len(curve) // most)
    kept: list[tuple[int, int]] = []
    for start in range(0, len(curve), stretch):
        piece = curve[start : start + stretch]
        low, high = min(piece, key=_height), max(piece, key=_height)
        kept.extend(sorted({low, high}))
    return kept


def _height(point: tuple[int, int]) -> int:
    return point[1]
