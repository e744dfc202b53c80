"""What a search is likely to ask next, so that it can be tried while a trial still runs. Pure.

How a trial ends is open, but not equally open: measured growth says what it will need. So the
search is followed along both ends of each trial, the likelier first, and what it asks for on many
ways is worth more than what it asks for on one. Where that is wrong, a trial has run in vain, or
for later: the search itself never sees it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memfit.outcomes import Growth, Outcome, measured
from memfit.records import Verdict
from memfit.search import Ask, Decision, Found

if TYPE_CHECKING:
    from memfit.batch import Candidates

Question = tuple[int, str]
"""A microbatch, and the purpose of its trial."""
_NOTED = "noted"
"""The purpose of the run that follows an answer."""

LIKELY, UNLIKELY, HARDLY = 0.7, 0.2, 0.03
"""How likely a trial is taken to fit; see `_expect`. In the probes of `reports/speed.md` so many
did: 14 of 20, 6 of 28 and 0 of 34."""
_EVEN, _LIKELY_ANSWER = 0.5, 0.6
"""Chances from which a size that may be the answer, and what follows an answer, come first."""
_LEAST_CHANCE = 0.25
"""Chance below which a trial is not worth slowing down the one that it runs beside."""
_WAYS = 24
"""How many decisions of the search are looked at."""
_LEAST_FOLLOWED = 0.01
"""Chance below which a way is not followed."""


def foresee(
    candidates: Candidates,
    outcomes: Sequence[Outcome],
    ask: Ask,
    *,
    ended: Mapping[Question, Outcome],
    limit_bytes: int,
    group_microbatches: int,
    decide: Callable[[Sequence[Outcome]], Decision],
) -> list[Ask | Found]:
    """Foresee what follows a trial that has not ended, in the order in which it is worth trying.

    Sizes that may be the answer come first, for what is run after them waits for all of them; then
    what follows the answer, which notes every allocation and takes twice as long as other trials;
    and then those that only show that nothing larger fits, beside which that can run.

    Args:
        candidates: The sizes that could be emitted.
        outcomes: Those that the search has seen.
        ask: The trial that runs.
        ended: Those that the search has not seen yet, of trials that ran ahead.
        limit_bytes: The most that may be used on the device.
        group_microbatches: Cap on the microbatches of a search trial's group.
        decide: The search.
    """
    ways = _Ways(candidates, ended, limit_bytes, group_microbatches)
    ways.go_on(1.0, tuple(outcomes), ask)
    chances: dict[Question, float] = {}
    first: dict[Question, Ask | Found] = {}
    may_fit: set[Question] = set()
    question: Question
    for chance, known in ways:
        following = decide(known)
        if isinstance(following, Ask):
            question = (following.microbatch, following.purpose)
            if ways.go_on(chance, known, following) > HARDLY:
                may_fit.add(question)
        elif isinstance(following, Found):
            question = (following.certificate.microbatch, _NOTED)
        else:
            continue
        first.setdefault(question, following)
        chances[question] = chances.get(question, 0.0) + chance

    def worth(question: Question) -> tuple[int, float]:
        chance = chances[question]
        if question in may_fit and chance >= _EVEN:
            return 2, chance
        return int(question[1] == _NOTED and chance >= _LIKELY_ANSWER), chance

    left = (q for q, chance in chances.items() if chance >= _LEAST_CHANCE and q not in ended)
    return [first[question] for question in sorted(left, key=worth, reverse=True)]


class _Ways:
    """Ways that the search may go, the likeliest first."""

    def __init__(
        self,
        candidates: Candidates,
        ended: Mapping[Question, Outcome],
        limit: int,
        group_microbatches: int,
    ) -> None:
        self._candidates = candidates
        self._ended = ended
        self._limit = limit
        self._group_microbatches = group_microbatches
        self._open: list[tuple[float, int, tuple[Outcome, ...]]] = []
        self._met = 0

    def __iter__(self) -> _Ways:
        return self

    def __next__(self) -> tuple[float, tuple[Outcome, ...]]:
        """Return the chance of the likeliest way that is left, and its outcomes."""
        if not self._open or self._met - len(self._open) >= _WAYS:
            raise StopIteration
        negated, _, known = heapq.heappop(self._open)
        return -negated, known

    def go_on(self, chance: float, known: tuple[Outcome, ...], ask: Ask) -> float:
        """Add the ways on which a trial ends in one way or the other.

        Returns:
            How likely it is that it fits; 1 where that is open, and no way goes on.
        """
        seen = self._ended.get((ask.microbatch, ask.purpose))
        expected = _expect(known, ask.microbatch, self._limit)
        if expected is None:
            return 1.0
        steps = self._candidates.accumulation_steps(ask.microbatch)
        full = ask.purpose == "confirm" or steps <= self._group_microbatches
        ends = [(1.0, seen)] if seen is not None else expected.ends(full_groups=full)
        for share, outcome in ends:
            if chance * share >= _LEAST_FOLLOWED:
                heapq.heappush(self._open, (-chance * share, self._met, (*known, outcome)))
                self._met += 1
        return expected.chance


@dataclass(frozen=True, slots=True, kw_only=True)
class _Expected:
    """How a trial is expected to end."""

    microbatch: int
    demand: int | None
    """None for the smallest size, of which nothing is known."""
    peak: int | None
    phases: tuple[tuple[str, int], ...] = ()
    """Demand of each phase."""
    chance: float
    """That it fits."""

    def ends(self, *, full_groups: bool) -> list[tuple[float, Outcome]]:
        """Return both ends, each with how likely it is."""
        return [
            (
                self.chance if fits else 1 - self.chance,
                Outcome(
                    trial=0,
                    microbatch=self.microbatch,
                    full_groups=full_groups,
                    verdict=Verdict.FITS if fits else Verdict.OOM,
                    demand_bytes=self.demand,
                    peak_bytes=self.peak if fits else None,
                    phases=self.phases if fits else (),
                ),
            )
            for fits in (True, False)
        ]


def _expect(outcomes: Sequence[Outcome], microbatch: int, limit: int) -> _Expected | None:
    """Return how a trial is expected to end; None when that is open.

    One that is predicted within the limit fits more often than not. One whose demand alone is
    within it, or that lies right below one that failed, fits now and then: what fragmentation
    refused is likely to be refused again. One that needs more than there is hardly ever does, nor
    one above a size that failed.
    """
    if not outcomes:
        return _Expected(microbatch=microbatch, demand=None, peak=None, chance=LIKELY)
    failed = {o.microbatch for o in outcomes if o.verdict is not Verdict.FITS}
    fitted = {o.microbatch for o in outcomes} - failed
    growth = Growth.through(measured(outcomes, fitted))
    if growth is None:
        return None
    demand, peak = growth.demand_at(microbatch), growth.peak_at(microbatch)
    chance = LIKELY
    if demand > limit or any(growth.size < size < microbatch for size in failed):
        chance = HARDLY
    elif peak > limit or microbatch + 1 in failed:
        chance = UNLIKELY
    return _Expected(
        microbatch=microbatch,
        demand=demand,
        peak=peak,
        phases=growth.phases_at(microbatch),
        chance=chance,
    )
