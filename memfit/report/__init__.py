"""A record in words and on one HTML page.

`words` is light and serves the terminal too; the page needs Jinja2 and matplotlib, which are
imported when a page is made and not before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memfit.capacity.table import CapacityTable
    from memfit.nothing import NothingFound
    from memfit.records import ProbeResult
    from memfit.report.page import Charts


def render(result: ProbeResult, charts: Charts | None = None) -> str:
    """Make the report of a probe.

    Args:
        result: The answer, with all trials.
        charts: What `draw_charts` made of this answer, if that was done already.

    Returns:
        One HTML document that needs no network and no script; the same record gives the same
        bytes.
    """
    from memfit.report.page import render_page  # noqa: PLC0415 - Jinja2 and matplotlib are heavy

    return render_page(result, charts)


def render_capacity(table: CapacityTable) -> str:
    """Make the page of a capacity plan, in the same way."""
    from memfit.report.capacity_page import render_page  # noqa: PLC0415 - as above

    return render_page(table)


def render_nothing(record: NothingFound) -> str:
    """Make the page of a probe in which nothing fits, in the same way."""
    from memfit.report.nothing import render_page  # noqa: PLC0415 - as above

    return render_page(record)
