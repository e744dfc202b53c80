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
    phases: tuple[tuple[str, int], ...] = ()
    """Demand of each phase, where the trial told it: the highest of them is `demand_bytes`."""

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
            phases=tuple(sorted(_demand_of_phases(result).items())),
        )


def _demand_of_phases(result: TrialResult) -> dict[str, int]:
    """What each phase needed on the device where it needed most."""
    found: dict[str, int] = {}
    for device in result.devices:
        outside = device.outside_allocator_bytes or 0
        for memory in device.phases:
            allocated = memory.peak_allocated_bytes
            if allocated is not None:
                name = f"{memory.phase} of {memory.groups}"
                found[name] = max(found.get(name, 0), allocated + outside)
    return found


def outcomes_of(trials: Iterable[TrialResult]) -> tuple[Outcome, ...]:
    """Return the outcomes of a probe's trials: those that count for the search.

    Diagnoses do not, nor does a doubtful trial: its repetition does. Where the repetition fits
    after all, it confirms nothing by itself, so that such a size has to fit twice.
    """
    known = [trial for trial in trials if trial.spec.purpose in ("search", "confirm")]
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
        searches = trial.spec.purpose in ("search", "confirm")
        waits = searches and trial.evidence.doubtful and trial.verdict.limits_size
        if waits and trial.spec.repeats is None and trial.spec.index not in done:
            return trial
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a size that fitted took, in bytes: the most of its trials."""

    size: int
    demand: int
    peak: int
    phases: dict[str, int]


_WHOLE = ""
"""Name of the line of the whole trial, among those of its phases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Demand as a straight line for each phase, through two measured sizes, and what lies on top.

    The phase that needs most at a small size need not be the one that grows: the optimizer step
    takes the same at every size, and hides how forward and backward grow until they pass it.
    """

    size: int
    """The largest size that fitted."""
    other_size: int
    lines: dict[str, tuple[int, int]]
    """Demand at `size` and at `other_size`, of each phase that both tell and of the whole."""
    overhead: int
    """Peak less demand at `size`: fragmentation and cache."""

    @classmethod
    def through(
        cls, fits: Sequence[Measured], failed: tuple[int, int] | None = None
    ) -> Growth | None:
        """Draw the lines.

        The second point is the largest at or below half of the first: near enough to follow a
        curve, and far enough for noise to matter little.

        Args:
            fits: The sizes that fitted, ascending.
            failed: Size and demand, at the least, of one that failed; used with a single fit.
        """
        if not fits:
            return None
        top = fits[-1]
        lines = {}
        if len(fits) > 1:
            other = next((fit for fit in reversed(fits) if 2 * fit.size <= top.size), fits[0])
            other_size = other.size
            both = [name for name in top.phases if name in other.phases]
            lines = {name: (top.phases[name], other.phases[name]) for name in both}
            lines[_WHOLE] = (top.demand, other.demand)
        elif failed is not None and failed[1] > top.demand:
            other_size = failed[0]
            lines = {_WHOLE: (top.demand, failed[1])}
        else:
            return None
        return cls(
            size=top.size,
            other_size=other_size,
            lines=lines,
            overhead=max(0, top.peak - top.demand),
        )

    @property
    def per_example(self) -> float:
        """Bytes that one more example takes, in the phase that grows fastest."""
        return max(
            (high - low) / (self.size - self.other_size) for high, low in self.lines.values()
        )

    def demand_at(self, size: int) -> int:
        """Predict the demand of a size: that of the phase that needs most there."""
        return max(self._at(size).values())

    def phases_at(self, size: int) -> tuple[tuple[str, int], ...]:
        """Predict the demand of each phase at a size."""
        return tuple(sorted((n, b) for n, b in self._at(size).items() if n != _WHOLE))

    def _at(self, size: int) -> dict[str, int]:
        away, between = size - self.size, self.size - self.other_size
        return {n: high + (high - low) * away // between for n, (high, low) in self.lines.items()}

    def peak_at(self, size: int) -> int:
        """Predict what is compared with the limit."""
        return self.demand_at(size) + self.overhead

    def room(self, limit: int) -> int | None:
        """Return the largest size whose predicted peak is within the limit; None if all are."""
        between = self.size - self.other_size
        rooms = [
            self.size + int((limit - high - self.overhead) * between / (high - low))
            for high, low in self.lines.values()
            if (high - low) * between > 0
        ]
        return min(rooms, default=None)


def measured(outcomes: Iterable[Outcome], sizes: set[int]) -> list[Measured]:
    """Return what each of the sizes asked for took, ascending."""
    most: dict[int, Measured] = {}
    for outcome in outcomes:
        known = [b for b in (outcome.demand_bytes, outcome.peak_bytes) if b is not None]
        if outcome.microbatch not in sizes or not known:
            continue
        seen = most.get(outcome.microbatch)
        phases = dict(outcome.phases)
        most[outcome.microbatch] = Measured(
            size=outcome.microbatch,
            demand=max(known[0], seen.demand if seen else 0),
            peak=max(known[-1], seen.peak if seen else 0),
            phases=phases
            if seen is None
            else {n: max(b, seen.phases.get(n, 0)) for n, b in {**seen.phases, **phases}.items()},
        )
    return [most[size] for size in sorted(most)]


def refuses(outcome: Outcome) -> bool:
    """Whether the host, a kernel or the model alone refuses, so that no larger size can do."""
    return outcome.verdict in (Verdict.HOST_OOM, Verdict.SIZE_LIMIT) or not outcome.size_mattered
