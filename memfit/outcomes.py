"""What the search needs to know of finished trials, and the growth that they measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from memfit.records import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from memfit.records import TrialResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the search needs to know of one finished trial."""

    trial: int
    """Index of the trial in its probe."""
    microbatch: int
    full_groups: bool
    """Whether every microbatch of the group was run."""
    verdict: Verdict
    demand_bytes: int | None = None
    """Memory that the trial needed, whatever the allocator's layout."""
    peak_bytes: int | None = None
    """The figure that is compared with the limit."""
    gradients_held: bool = True
    """Whether it may have failed only because gradients of earlier microbatches were held."""
    size_mattered: bool = True
    """Whether a microbatch was there at all; False when the model alone did not fit."""

    @classmethod
    def of(cls, result: TrialResult) -> Outcome:
        """Take from a trial what the search needs."""
        phase, index = result.evidence.phase, result.evidence.microbatch_index
        return cls(
            trial=result.spec.index,
            microbatch=result.spec.split.microbatch,
            full_groups=result.spec.runs_full_groups,
            verdict=result.verdict,
            demand_bytes=result.demand_bytes,
            peak_bytes=result.peak_bytes,
            gradients_held=phase is None or (phase in ("forward", "backward") and index != 1),
            size_mattered=phase not in ("imported", "build"),
        )


def outcomes_of(trials: Iterable[TrialResult]) -> tuple[Outcome, ...]:
    """Return the outcomes of a probe's trials: those that count for the search.

    Diagnoses do not, nor does a doubtful trial: its repetition does. Where the repetition fits
    after all, it confirms nothing by itself, so that such a size has to fit twice.
    """
    known = [trial for trial in trials if trial.spec.purpose != "diagnose"]
    waiting = unrepeated(known)
    left_out = {*repetitions(known), waiting.spec.index if waiting else None}
    found = []
    for trial in known:
        if trial.spec.index not in left_out:
            outcome = Outcome.of(trial)
            unsure = trial.spec.repeats is not None and trial.verdict is Verdict.FITS
            found.append(replace(outcome, full_groups=False) if unsure else outcome)
    return tuple(found)


def repetitions(trials: Iterable[TrialResult]) -> dict[int, int]:
    """Return the trials that were repeated, each with the trial that repeats it."""
    return {t.spec.repeats: t.spec.index for t in trials if t.spec.repeats is not None}


def unrepeated(trials: Sequence[TrialResult]) -> TrialResult | None:
    """Return the doubtful trial that is still to be repeated before it counts, or None."""
    done = repetitions(trials)
    for trial in trials:
        waits = trial.evidence.doubtful and trial.verdict.limits_size
        if waits and trial.spec.repeats is None and trial.spec.index not in done:
            return trial
    return None


@dataclass(frozen=True, slots=True)
class Growth:
    """Demand as a straight line through two measured sizes, and what lies on top of it."""

    size: int
    """The largest size that fitted."""
    demand: int
    other_size: int
    other_demand: int
    overhead: int
    """Peak less demand at `size`: fragmentation and cache."""

    @classmethod
    def through(
        cls, fits: Sequence[tuple[int, int, int]], failed: tuple[int, int] | None = None
    ) -> Growth | None:
        """Draw the line.

        The second point is the largest at or below half of the first: near enough to follow a
        curve, and far enough for noise to matter little.

        Args:
            fits: Size, demand and peak of the sizes that fitted, ascending.
            failed: Size and demand, at the least, of one that failed; used with a single fit.
        """
        if not fits:
            return None
        size, demand, peak = fits[-1]
        if len(fits) > 1:
            lower = [point for point in fits if 2 * point[0] <= size] or [fits[0]]
            other_size, other_demand, _ = lower[-1]
        elif failed is not None and failed[1] > demand:
            other_size, other_demand = failed
        else:
            return None
        return cls(size, demand, other_size, other_demand, max(0, peak - demand))

    @property
    def per_example(self) -> float:
        """Bytes that one more example takes."""
        return (self.demand - self.other_demand) / (self.size - self.other_size)

    def demand_at(self, size: int) -> int:
        """Predict the demand of a size."""
        rise = (self.demand - self.other_demand) * (size - self.size)
        return self.demand + rise // (self.size - self.other_size)

    def peak_at(self, size: int) -> int:
        """Predict what is compared with the limit."""
        return self.demand_at(size) + self.overhead

    def room(self, limit: int) -> int | None:
        """Return the largest size whose predicted peak is within the limit; None if all are."""
        if self.per_example <= 0:
            return None
        return self.size + int((limit - self.demand - self.overhead) / self.per_example)


def measured(outcomes: Iterable[Outcome], sizes: set[int]) -> list[tuple[int, int, int]]:
    """Return size, demand and peak of the sizes asked for, ascending: the most that each took."""
    most: dict[int, tuple[int, int]] = {}
    for outcome in outcomes:
        known = [b for b in (outcome.demand_bytes, outcome.peak_bytes) if b is not None]
        if outcome.microbatch in sizes and known:
            demand, peak = most.get(outcome.microbatch, (0, 0))
            most[outcome.microbatch] = (max(demand, known[0]), max(peak, known[-1]))
    return [(size, *most[size]) for size in sorted(most)]


def refuses(outcome: Outcome) -> bool:
    """Whether the host, a kernel or the model alone refuses, so that no larger size can do."""
    return outcome.verdict in (Verdict.HOST_OOM, Verdict.SIZE_LIMIT) or not outcome.size_mattered
