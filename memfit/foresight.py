"""What a search is likely to ask next, so that it can be tried while a trial still runs. Pure.

A trial is taken to end as measured growth has it; what follows is then what the search would ask.
Where that is wrong, a trial has run in vain, or for later: the search itself never sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from memfit.outcomes import Growth, Outcome, measured
from memfit.records import Verdict
from memfit.search import Ask, Decision, Found

if TYPE_CHECKING:
    from memfit.batch import Candidates

_FAR = 8
"""How many trials ahead is looked."""


def foresee(
    candidates: Candidates,
    outcomes: Sequence[Outcome],
    ask: Ask,
    *,
    limit_bytes: int,
    group_microbatches: int,
    decide: Callable[[Sequence[Outcome]], Decision],
) -> Iterator[Ask | Found]:
    """Foresee what follows a trial that has not ended, the nearest first.

    Args:
        candidates: The sizes that could be emitted.
        outcomes: Those that have ended.
        ask: The trial that runs.
        limit_bytes: The most that may be used on the device.
        group_microbatches: Cap on the microbatches of a search trial's group.
        decide: The search.
    """
    known = list(outcomes)
    for _ in range(_FAR):
        expected = _expected(known, ask, limit_bytes)
        if expected is None:
            return
        steps = candidates.accumulation_steps(ask.microbatch)
        full = ask.purpose == "confirm" or steps <= group_microbatches
        known.append(_outcome(ask.microbatch, expected, full_groups=full))
        following = decide(known)
        if isinstance(following, Found):
            yield following
        if not isinstance(following, Ask):
            return
        yield following
        ask = following


def _expected(outcomes: Sequence[Outcome], ask: Ask, limit: int) -> tuple[Verdict, int, int] | None:
    """Return how a trial is expected to end, with its demand and peak; None when that is open."""
    failed = {o.microbatch for o in outcomes if o.verdict is not Verdict.FITS}
    fitted = {o.microbatch for o in outcomes} - failed
    growth = Growth.through(measured(outcomes, fitted))
    if growth is None:
        return None
    demand, peak = growth.demand_at(ask.microbatch), growth.peak_at(ask.microbatch)
    # What fragmentation refused one example above is likely to be refused here as well.
    if peak <= limit and ask.microbatch + 1 not in failed:
        return Verdict.FITS, demand, peak
    return Verdict.OOM, demand, peak


def _outcome(microbatch: int, expected: tuple[Verdict, int, int], *, full_groups: bool) -> Outcome:
    verdict, demand, peak = expected
    return Outcome(
        trial=0,
        microbatch=microbatch,
        full_groups=full_groups,
        verdict=verdict,
        demand_bytes=demand,
        peak_bytes=peak if verdict is Verdict.FITS else None,
    )
