"""The search: finished trials in, the next size or the certificate out.

`decide` is a pure function of the list of outcomes, so a probe resumes by replaying them. Measured
growth chooses which size to try next; the answer is a size that ran full groups.

Memory is not monotone in the microbatch: with fragmentation a size can fail where a larger one
fits. One thing is taken to be monotone: the *demand*, what a trial needs whatever the allocator's
layout. A size that failed is a *ceiling*, above which nothing is tried, when

- its demand exceeds the limit; or
- the host or a kernel's index limit refused it, or the model alone did not fit; or
- it ran out of memory and growth measured on sizes that fitted puts its demand clearly over the
  limit. The demand seen by a trial that failed is only what had been asked for until then, and can
  stay just below the limit however large the size. A note tells of such a ceiling.

Any other failure (fragmentation, `thrash`) is a *hole*: sizes above it are still tried. The search
is complete when everything between the answer and the ceiling was tried. Where the three smallest
sizes asked for fail, nothing fits.

A group of a single microbatch (`m = B / D`) holds no gradients during forward, so it can need less
than a smaller microbatch that accumulates. A ceiling counts for it only where the trial that failed
held no gradients either. Otherwise that size is tried too, unless it is out of all proportion; a
note tells of that as well.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from memfit.errors import InternalError
from memfit.outcomes import Growth, Outcome, measured, outcomes_of, refuses
from memfit.records import Certificate, TriedAbove, Verdict
from memfit.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memfit.batch import Candidates

__all__ = [
    "Ask",
    "Decision",
    "Exhausted",
    "Found",
    "NoFit",
    "Outcome",
    "decide",
    "expected_room",
    "outcomes_of",
    "story",
]

FULL_AT_ONCE = 32
"""Most microbatches of a group that is run in full before it is known to be the answer's."""
MAX_JUMP = 32
"""How far above the largest size that fitted the next one may lie, as a factor."""
GIVE_UP_AFTER = 3
"""Sizes that have to fail before nothing is said to fit, where no ceiling says so earlier."""
HALF = 2
WIDE_GAP = 4
"""Factor between a fit and a failure above which their gap is halved on a logarithmic scale."""
CLEARLY = 1 / 32
"""Part of the limit by which predicted demand has to exceed it for a failure to be a ceiling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """The next trial to run."""

    microbatch: int
    purpose: Literal["search", "confirm"]
    """`confirm` has to run every microbatch of the group."""
    reason: str
    """Why this size, without a full stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The answer."""

    certificate: Certificate
    notes: tuple[str, ...] = ()
    """Remarks for the user, without full stops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoFit:
    """No candidate fits."""

    microbatch: int
    """The smallest candidate."""
    trial: int
    """Index of the trial that showed that it does not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exhausted:
    """The ceiling of trials was reached before any size was confirmed."""

    trials: int
    untried: tuple[int, ...]


Decision = Ask | Found | NoFit | Exhausted


def decide(
    candidates: Candidates,
    outcomes: Sequence[Outcome],
    *,
    limit_bytes: int,
    max_trials: int,
    group_microbatches: int,
) -> Decision:
    """Say what follows from the trials that have finished.

    Args:
        candidates: The sizes that could be emitted.
        outcomes: Finished trials in the order in which they ran, without diagnosing ones.
        limit_bytes: The most that may be used on the device.
        max_trials: Trials that may be spent; one is kept for the confirmation of the answer.
        group_microbatches: Cap on the microbatches of a search trial's group. Where it covers the
            whole group, a search trial counts as the confirmation.

    Raises:
        InternalError: When an outcome says nothing about a size (`error`, `crash`, `timeout`),
            or is about a size that is no candidate.
    """
    state = _State(candidates, outcomes, limit_bytes)
    zone = state.zone()
    left = max_trials - len(outcomes)
    best = state.best
    unconfirmed = best is not None and best not in state.confirmed
    if best is not None and unconfirmed and left >= 1 and (not zone or left == 1):
        steps = candidates.accumulation_steps(best)
        reason = f"the answer so far, with full groups of {steps} microbatches"
        return Ask(microbatch=best, purpose="confirm", reason=reason)
    if zone and left >= 1:
        size, reason = state.next_size(zone)
        # The last trial has to stand as an answer by itself; after a failed confirmation, short
        # groups are known to show too little; and an expected answer needs no second trial.
        steps = candidates.accumulation_steps(size)
        expected = steps <= FULL_AT_ONCE and state.expects(size)
        full = steps > group_microbatches and (left == 1 or state.confirm_failed or expected)
        return Ask(microbatch=size, purpose="confirm" if full else "search", reason=reason)
    if state.confirmed:
        return state.found(zone)
    if zone or unconfirmed:
        return Exhausted(trials=len(outcomes), untried=zone)
    return NoFit(microbatch=candidates.smallest, trial=state.failed[candidates.smallest].trial)


def story(
    candidates: Candidates,
    outcomes: Sequence[Outcome],
    *,
    limit_bytes: int,
    max_trials: int,
    group_microbatches: int,
) -> tuple[str, ...]:
    """Return for each finished trial the reason for which it was asked for."""
    reasons = []
    for position in range(len(outcomes)):
        decision = decide(
            candidates,
            outcomes[:position],
            limit_bytes=limit_bytes,
            max_trials=max_trials,
            group_microbatches=group_microbatches,
        )
        reasons.append(decision.reason if isinstance(decision, Ask) else "")
    return tuple(reasons)


def expected_room(
    candidates: Candidates, outcomes: Sequence[Outcome], *, limit_bytes: int
) -> int | None:
    """Estimate the largest microbatch that would fit were it a candidate; None when unknown.

    It takes two sizes that fitted: what a failed trial had asked for until then is only the least
    that its size needs.
    """
    state = _State(candidates, outcomes, limit_bytes)
    if state.best is None or state.growth is None or len(state.fitted) == 1:
        return None
    room = state.growth.room(limit_bytes)
    if room is not None and state.ceiling is not None:
        room = min(room, state.ceiling - 1)
    return None if room is None else max(room, state.best)


class _State:
    """What the outcomes say about the candidates."""

    def __init__(self, candidates: Candidates, outcomes: Sequence[Outcome], limit: int) -> None:
        self.candidates = candidates
        self.outcomes = outcomes
        self.limit = limit
        for outcome in outcomes:
            _check(candidates, outcome)
        self.failed = {o.microbatch: o for o in outcomes if o.verdict is not Verdict.FITS}
        self.fitted = {o.microbatch for o in outcomes} - self.failed.keys()
        self.confirmed = self.fitted & {o.microbatch for o in outcomes if o.full_groups}
        self.confirm_failed = any(
            o.verdict is Verdict.FITS and o.microbatch in self.failed for o in outcomes
        )
        self.best = max(self.fitted, default=None)
        floor = self.best or 0
        self.failed_above = sorted(size for size in self.failed if size > floor)
        self.growth = Growth.through(measured(outcomes, self.fitted), self._lowest_failure())
        self.ceiling = next((size for size in self.failed_above if self._is_ceiling(size)), None)
        self.single = self._single_microbatch()

    def _lowest_failure(self) -> tuple[int, int] | None:
        """Return the lowest failure above the largest fit, and its demand at the least."""
        for size in self.failed_above:
            demand = self.failed[size].demand_bytes
            if demand is not None:
                return size, demand
        return None

    def _single_microbatch(self) -> int | None:
        """Return the candidate whose group is one microbatch, where it is not the only one."""
        largest = self.candidates.largest
        alone = self.candidates.accumulation_steps(largest) == 1
        return largest if alone and largest != self.candidates.smallest else None

    def _exceeds(self, size: int) -> bool:
        demand = self.failed[size].demand_bytes
        return demand is not None and demand > self.limit

    def _exceeds_by_growth(self, size: int) -> bool:
        return (
            self.growth is not None
            and self.growth.demand_at(size) > self.limit + self.limit * CLEARLY
        )

    def _is_ceiling(self, size: int) -> bool:
        outcome = self.failed[size]
        if refuses(outcome):
            return True
        over = self._exceeds(size) or self._exceeds_by_growth(size)
        return outcome.verdict is Verdict.OOM and over

    def _single_open(self) -> bool:
        """Whether a group of one microbatch may still fit, whatever the ceiling."""
        if self.single is None or self.single in self.failed or self.single in self.fitted:
            return False
        alike = any(
            (self._exceeds(size) or refuses(self.failed[size]))
            and (
                not self.failed[size].gradients_held
                or self.failed[size].verdict is Verdict.SIZE_LIMIT
            )
            for size in self.failed_above
        )
        return not alike and self._single_excluded() is None

    def _single_excluded(self) -> str | None:
        """Say why a group of one microbatch is out of all proportion, if it is."""
        if self.single is None:
            return None
        if self.growth is not None and self.growth.per_example * self.single > 2 * self.limit:
            need = format_bytes(int(self.growth.per_example * self.single))
            return f"growth alone would take {need} of {format_bytes(self.limit)}"
        reach = MAX_JUMP * (self.best or self.candidates.smallest)
        if self.single > reach and self.single not in self.candidates.sizes[:2]:
            return f"it is over {MAX_JUMP} times the largest size that fitted"
        return None

    def zone(self) -> tuple[int, ...]:
        """Return the untried candidates above the largest fit that may still fit."""
        if self.best is None and len(self.failed) >= GIVE_UP_AFTER:
            return ()
        floor = self.best or 0
        top = self.ceiling if self.ceiling is not None else self.candidates.largest + 1
        zone = [m for m in self.candidates.sizes if floor < m < top and m not in self.failed]
        if self.single is not None and self.single >= top and self._single_open():
            zone.append(self.single)
        return tuple(zone)

    def expects(self, size: int) -> bool:
        """Whether the measured growth says that this size fits."""
        return self.growth is not None and self.growth.peak_at(size) <= self.limit

    def next_size(self, zone: tuple[int, ...]) -> tuple[int, str]:
        """Choose from the zone, and say why."""
        if not self.outcomes:
            return zone[0], "the smallest size, to see whether anything fits"
        if self.best is not None:
            zone = tuple(m for m in zone if m <= MAX_JUMP * self.best) or zone[:1]
        if self.growth is None:
            return self._unmeasured(zone)
        promising = self._largest_promising(zone, self.growth)
        if promising is not None:
            return self._promising(zone, promising, self.growth)
        return self._closing(zone, self.growth)

    def _largest_promising(self, zone: tuple[int, ...], growth: Growth) -> int | None:
        room = growth.room(self.limit)
        reached = len(zone) if room is None else bisect_right(zone, room + 1)
        within = (size for size in reversed(zone[:reached]) if growth.peak_at(size) <= self.limit)
        return next(within, None)

    def _unmeasured(self, zone: tuple[int, ...]) -> tuple[int, str]:
        """Choose without a measured growth: double while there is nothing to go between."""
        if self.best is not None and self.failed_above:
            return self._between(zone, self.failed_above[0], HALF)
        if self.ceiling is not None:
            return zone[-1], "the largest size below the ceiling that was not tried"
        tried = max(outcome.microbatch for outcome in self.outcomes)
        double = next((size for size in zone if size >= 2 * tried), zone[-1])
        return double, "a second size, to measure how memory grows"

    def _promising(self, zone: tuple[int, ...], size: int, growth: Growth) -> tuple[int, str]:
        """Choose where growth says that something above the largest fit fits as well.

        Where trials have contradicted it, step back from the lowest failure, farther each time.
        """
        contradicted = self.ceiling is not None and growth.demand_at(self.ceiling) <= self.limit
        parts = (16, 4, HALF) if contradicted else (None, None, 4, HALF)
        setbacks = len(self.failed) if contradicted else self._setbacks()
        part = parts[min(setbacks, len(parts)) - 1] if setbacks else None
        if part is not None and size < self.failed_above[0]:
            return self._between(zone, self.failed_above[0], part)
        return size, (
            f"predicted to fit: {format_bytes(growth.peak_at(size))} of "
            f"{format_bytes(self.limit)}, from sizes {growth.other_size} and {growth.size}"
        )

    def _setbacks(self) -> int:
        """Count the failures since the last fit."""
        fits = [o.microbatch in self.fitted for o in self.outcomes]
        return fits[::-1].index(True)

    def _between(self, zone: tuple[int, ...], failed: int, part: int) -> tuple[int, str]:
        """Choose below a failed size, a part of the way down to the largest fit."""
        best = self.best or 0
        target = failed - max(1, (failed - best) // part)
        if part == HALF and failed > WIDE_GAP * best:
            target = math.isqrt(best * failed)
        size = max((size for size in zone if size <= target), default=zone[0])
        return size, f"{best} fits and {failed} does not"

    def _closing(self, zone: tuple[int, ...], growth: Growth) -> tuple[int, str]:
        """Choose where nothing above the largest fit is predicted to fit."""
        several = [size for size in zone if size != self.single]
        if not several:
            return zone[-1], "the whole group at once: it holds no gradients, so may need less"
        for size in several:
            if growth.demand_at(size) > self.limit:
                need, limit = format_bytes(growth.demand_at(size)), format_bytes(self.limit)
                return size, f"predicted not to fit and to end the search: {need} of {limit}"
        return several[-1], "above the largest fit and below the ceiling, so it has to be tried"

    def found(self, untried: tuple[int, ...]) -> Found:
        """Build the certificate of the largest size that fitted with full groups."""
        answer = max(self.confirmed)
        unconfirmed = {size for size in self.fitted if size > answer}
        untried = tuple(sorted(unconfirmed.union(untried)))
        ceiling: Literal["tried", "cap", "budget"] = "tried"
        if untried:
            ceiling = "budget"
        elif answer == self.candidates.largest:
            ceiling = "cap"
        trials = [o.trial for o in self.outcomes if o.full_groups and o.microbatch == answer]
        certificate = Certificate(
            microbatch=answer,
            trial=trials[0],
            ceiling=ceiling,
            tried_above=tuple(self._tried(s) for s in sorted(self.failed) if s > answer),
            untried=untried,
            cap=self.candidates.largest,
            closed_by=(
                self._tried(self.ceiling)
                if self.ceiling is not None and self.ceiling > answer
                else None
            ),
        )
        return Found(certificate=certificate, notes=self._notes())

    def _tried(self, size: int) -> TriedAbove:
        return TriedAbove(
            microbatch=size,
            trial=self.failed[size].trial,
            verdict=self.failed[size].verdict,
            demand_exceeds_limit=self._exceeds(size),
        )

    def _notes(self) -> tuple[str, ...]:
        notes = []
        size = self.ceiling
        if size is not None and self.growth is not None:
            outcome = self.failed[size]
            if not refuses(outcome) and not self._exceeds(size):
                need, limit = format_bytes(self.growth.demand_at(size)), format_bytes(self.limit)
                notes.append(
                    f"nothing above microbatch {size} was tried: it ran out of memory, and growth "
                    f"from {self.growth.other_size} to {self.growth.size} puts its demand at "
                    f"{need} of {limit}"
                )
        reason = self._single_excluded()
        if reason and self.single not in self.failed and self.single not in self.fitted:
            notes.append(
                f"microbatch {self.single}, the whole group at once without gradients held, was "
                f"not tried: {reason}"
            )
        return tuple(notes)


def _check(candidates: Candidates, outcome: Outcome) -> None:
    if outcome.verdict is not Verdict.FITS and not outcome.verdict.limits_size:
        raise InternalError(f"the search was given trial {outcome.trial} ({outcome.verdict})")
    if outcome.microbatch not in candidates:
        raise InternalError(f"microbatch {outcome.microbatch} of a trial is no candidate")
