"""The page of a probe in which nothing fits."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from memfit.records import Source
from memfit.report import words
from memfit.report.page import in_page, templates

if TYPE_CHECKING:
    from markupsafe import Markup

    from memfit.nothing import NothingFound
    from memfit.records import TrialResult

_TEMPLATE = "nothing.html.j2"


def render_page(record: NothingFound) -> str:
    """Make the page: what does not fit, what it needs, what would help, and every trial."""
    page = templates().get_template(_TEMPLATE)
    return page.render(
        record=record,
        device=record.spec.device,
        words=words,
        virtual=record.source is Source.VIRTUAL,
        data=_embed(record),
    )


def _embed(record: NothingFound) -> Markup:
    """Write the record as JSON for its page, without timelines."""

    def short(trials: tuple[TrialResult, ...]) -> tuple[TrialResult, ...]:
        return tuple(replace(t, timeline=None, ledger=None) for t in trials)

    kept = replace(record, trials=short(record.trials), other_trials=short(record.other_trials))
    return in_page(msgspec.json.encode(kept).decode())
