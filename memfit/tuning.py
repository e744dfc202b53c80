"""Whether another setting of the allocator lets a larger microbatch train.

What a size needs does not depend on the allocator's layout, so what is known of demand is taken
over: sizes that fitted say how it grows, and those whose demand alone is above the limit stay out.
What failed by fragmentation is open again. A size counts only once it has run full groups with the
setting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from memfit.outcomes import Outcome, outcomes_of, refuses
from memfit.records import TrialResult, Verdict
from memfit.search import Ask, decide

if TYPE_CHECKING:
    from memfit.batch import Candidates

_MOST = 12
"""Trials that may be spent on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Larger:
    """What was found with another setting."""

    best: TrialResult | None
    """The trial of full groups at the largest size above the answer; None when there is none."""
    trials: tuple[TrialResult, ...]
    """Those that were run."""
    complete: bool
    """Whether nothing was left to try."""


def carried_over(outcomes: Iterable[Outcome], *, limit_bytes: int) -> tuple[Outcome, ...]:
    """Return what trials with one setting say about all settings."""
    kept = []
    for outcome in outcomes:
        if outcome.verdict is Verdict.FITS:
            # Its peak above its demand was fragmentation, which another setting need not have.
            kept.append(replace(outcome, full_groups=False, peak_bytes=outcome.demand_bytes))
        elif refuses(outcome) or (
            outcome.demand_bytes is not None and outcome.demand_bytes > limit_bytes
        ):
            kept.append(outcome)
    return tuple(kept)


def look_for_larger(
    sizes: Candidates,
    trials: Iterable[TrialResult],
    *,
    answer: int,
    limit_bytes: int,
    group_microbatches: int,
    max_trials: int,
    run: Callable[[Ask], TrialResult | None],
) -> Larger:
    """Search above an answer with another setting.

    Args:
        sizes: The candidates.
        trials: Those of the search that gave the answer.
        answer: The microbatch that it gave.
        limit_bytes: The most that may be used on the device.
        group_microbatches: Cap on the microbatches of a search trial's group.
        max_trials: Trials that may be spent; twelve are, at most.
        run: Runs a trial with the other setting; None ends the search, as when time is up.
    """
    known = carried_over(outcomes_of(trials), limit_bytes=limit_bytes)
    done: list[TrialResult] = []
    most = min(_MOST, max_trials)

    def following(ceiling: int) -> Ask | None:
        outcomes = (*known, *outcomes_of(done))
        decision = decide(
            sizes,
            outcomes,
            limit_bytes=limit_bytes,
            max_trials=ceiling - len(done) + len(outcomes),
            group_microbatches=group_microbatches,
        )
        wanted = isinstance(decision, Ask) and decision.microbatch > answer
        return decision if isinstance(decision, Ask) and wanted else None

    while (asked := following(most)) is not None:
        result = run(asked)
        if result is None:
            break
        done.append(result)
        if result.verdict is not Verdict.FITS and not result.verdict.limits_size:
            break  # it says nothing about a size, and the answer stands without it
    failed = {t.spec.split.microbatch for t in done if t.verdict is not Verdict.FITS}
    fitted = [
        t
        for t in done
        if t.verdict is Verdict.FITS
        and t.spec.runs_full_groups
        and t.spec.split.microbatch not in failed
        and t.spec.split.microbatch > answer
    ]
    best = max(fitted, key=lambda t: t.spec.split.microbatch, default=None)
    # With a single trial left the search would only confirm what it has; with two it looks on.
    return Larger(best=best, trials=tuple(done), complete=following(len(done) + 2) is None)
