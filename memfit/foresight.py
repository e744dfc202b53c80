"""What a search is likely to ask next, so that it can be tried while a trial still runs. Pure.

A trial is taken to end as measured growth has it; what follows is then what the search would ask.
Where that is wrong, a trial has run in vain, or for later: the search itself never sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
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
    for nearest in (True, *(_FAR - 1) * (False,)):
        expected = _expect(known, ask, limit_bytes)
        if expected is None:
            return
        steps = candidates.accumulation_steps(ask.microbatch)
        outcome = partial(
            _outcome,
            ask.microbatch,
            expected,
            full_groups=ask.purpose == "confirm" or steps <= group_microbatches,
        )
        otherwise = decide([*known, outcome(fits=not expected.fits)]) if nearest else None
        known.append(outcome(fits=expected.fits))
        following = decide(known)
        if isinstance(following, Found):
            yield following
        if not isinstance(following, Ask):
            return
        if isinstance(otherwise, Found) and expected.may_fit:
            yield otherwise
        yield following
        ask = following


@dataclass(frozen=True, slots=True, kw_only=True)
class _Expected:
    """How a trial is expected to end."""

    demand: int
    peak: int
    phases: tuple[tuple[str, int], ...] = ()
    """Demand of each phase."""
    may_fit: bool
    """Whether its demand is below the limit."""
    fits: bool
    """Whether its peak is, and nothing else speaks against it."""


def _expect(outcomes: Sequence[Outcome], ask: Ask, limit: int) -> _Expected | None:
    """Return how a trial is expected to end; None when that is open."""
    if not outcomes:  # the smallest size: what follows a failure is soon over
        return _Expected(demand=0, peak=0, may_fit=True, fits=True)
    failed = {o.microbatch for o in outcomes if o.verdict is not Verdict.FITS}
    fitted = {o.microbatch for o in outcomes} - failed
    growth = Growth.through(measured(outcomes, fitted))
    if growth is None:
        return None
    demand, peak = growth.demand_at(ask.microbatch), growth.peak_at(ask.microbatch)
    # What fragmentation refused one example above is likely to be refused here as well.
    near = ask.microbatch + 1 in failed
    return _Expected(
        demand=demand,
        peak=peak,
        phases=growth.phases_at(ask.microbatch),
        may_fit=demand <= limit,
        fits=peak <= limit and not near,
    )


def _outcome(microbatch: int, expected: _Expected, *, full_groups: bool, fits: bool) -> Outcome:
    return Outcome(
        trial=0,
        microbatch=microbatch,
        full_groups=full_groups,
        verdict=Verdict.FITS if fits else Verdict.OOM,
        demand_bytes=expected.demand,
        peak_bytes=expected.peak if fits else None,
        phases=expected.phases if fits else (),
    )
