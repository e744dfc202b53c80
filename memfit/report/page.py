"""The page: a record, its charts and a template put together."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from memfit.report import figures, staying, verified, words
from memfit.story import tell

if TYPE_CHECKING:
    from memfit.records import Ledger, LedgerRow, ProbeResult, Timeline
    from memfit.report.svg import Chart

TEMPLATE = "report.html.j2"
_WHOLE_TABLE = 64
_SHOWN_OF_LONG = 24
_WHOLE_RECORD = 150_000
_LEDGER_ROWS = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseRow:
    """One phase of the timeline, for the table under the chart."""

    name: str
    microbatch: int | None
    """Number of the microbatch in the group, from 1; None for the optimizer step."""
    event: int
    highest_bytes: int | None
    """The highest allocated memory within the phase; None where no point was kept in it."""


def phase_rows(timeline: Timeline) -> tuple[PhaseRow, ...]:
    """Sum a timeline up, one row a phase."""
    starts = [phase.event for phase in timeline.phases]
    ends = [*starts[1:], timeline.events + 1]
    return tuple(
        PhaseRow(
            name=words.phase(phase.phase),
            microbatch=None if phase.microbatch is None else phase.microbatch + 1,
            event=phase.event,
            highest_bytes=max(
                (p.allocated_bytes for p in timeline.points if phase.event <= p.event < end),
                default=None,
            ),
        )
        for phase, end in zip(timeline.phases, ends, strict=True)
    )


def shorten(rows: tuple[PhaseRow, ...]) -> tuple[tuple[PhaseRow, ...], int]:
    """Keep a table readable: both ends and the highest phase of a long one.

    Returns:
        The rows to show, and how many are left out.
    """
    if len(rows) <= _WHOLE_TABLE:
        return rows, 0
    highest = max(range(len(rows)), key=lambda i: rows[i].highest_bytes or 0)
    half = _SHOWN_OF_LONG // 2
    chosen = sorted({*range(half), highest, *range(len(rows) - half, len(rows))})
    return tuple(rows[i] for i in chosen), len(rows) - len(chosen)


def largest_rows(ledger: Ledger) -> tuple[tuple[LedgerRow, int], ...]:
    """Pick the largest rows of a ledger's highest peak, each with its bytes there."""
    at = ledger.highest
    rows = sorted(ledger.rows, key=lambda row: -row.bytes[at])[:_LEDGER_ROWS]
    return tuple((row, row.bytes[at]) for row in rows if row.bytes[at])


def in_page(json: str) -> Markup:
    """Write JSON so that it cannot end the element it stands in."""
    return Markup(json.replace("<", "\\u003c"))  # noqa: S704 - no `<` is left in it


def embed(result: ProbeResult) -> tuple[Markup, bool]:
    """Write a record as JSON for its page.

    Returns:
        The JSON, and whether it is the whole record: the timelines and the ledger of a very long
        search are left out, which keeps the page small.
    """
    text = msgspec.json.encode(result).decode()
    whole = len(text) <= _WHOLE_RECORD
    if not whole:
        trials = tuple(replace(t, timeline=None, ledger=None) for t in result.trials)
        text = msgspec.json.encode(replace(result, trials=trials)).decode()
    return in_page(text), whole


def stress_virtual(text: str) -> Markup:
    """Escape a sentence, stress the word `virtual` in it, and keep numbers with what they need."""
    stressed = str(escape(text)).replace(" virtual ", " <em>virtual</em> ")
    stressed = stressed.replace(f" {words.TIMES} ", f"&nbsp;{words.TIMES}&nbsp;")
    stressed = re.sub(r"(\d) ([KMGT]?i?B)\b", r"\1&nbsp;\2", stressed)
    return Markup(stressed)  # noqa: S704 - escaped before


def code(text: str) -> Markup:
    """Escape a sentence and set what stands between backticks as code."""
    pieces = str(escape(text)).split("`")
    if len(pieces) % 2 == 0:
        return escape(text)
    made = (f"<code>{piece}</code>" if i % 2 else piece for i, piece in enumerate(pieces))
    return Markup("".join(made))  # noqa: S704 - escaped before


@cache
def templates() -> Environment:
    """Open the templates, with the filters that all pages use."""
    made = Environment(
        loader=PackageLoader("memfit.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters["stress_virtual"] = stress_virtual
    made.filters["code"] = code
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Charts:
    """The charts that can be drawn before it is known what the peak is made of."""

    peaks: Chart
    timeline: Chart | None


def draw_charts(result: ProbeResult) -> Charts:
    """Draw the charts that need the trials and the answer, and nothing that is only told of it."""
    curve = _curve(result)
    return Charts(
        peaks=figures.peaks(result), timeline=figures.timeline(result, curve) if curve else None
    )


def _curve(result: ProbeResult) -> Timeline | None:
    found = result.answer.timeline
    return found if found and found.points and found.phases else None


def render_page(result: ProbeResult, charts: Charts | None = None) -> str:
    """Make the page of a probe.

    Args:
        result: The answer, with all trials.
        charts: Its charts, where they are drawn already.

    Returns:
        A whole HTML document.
    """
    answer = result.answer
    made_of, curve = answer.composition, _curve(result)
    charts = charts or draw_charts(result)
    data, whole = embed(result)
    rows, left_out = shorten(phase_rows(curve)) if curve else ((), 0)
    page = templates().get_template(TEMPLATE)
    return page.render(
        result=result,
        answer=answer,
        device=result.spec.device,
        words=words,
        staying=staying,
        verified=verified,
        virtual=words.is_virtual(result),
        story=result.story or tell(result.trials, result.certificate),
        trials={trial.spec.index: trial for trial in result.trials},
        peaks=charts.peaks,
        composition=figures.composition(result, made_of) if made_of else None,
        made_of=made_of,
        ledger_rows=largest_rows(answer.ledger) if answer.ledger else (),
        parts=figures.parts(result, made_of) if made_of else (),
        timeline=charts.timeline,
        curve=curve,
        phase_rows=rows,
        phases_left_out=left_out,
        data=data,
        whole_record=whole,
    )
