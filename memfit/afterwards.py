"""What is asked once there is an answer: does it stay good, and would another setting help?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from memfit.allocator import EXPANDABLE, includes, settings_of, variable_for
from memfit.question import ProbeListener
from memfit.records import (
    DeviceKind,
    Environment,
    Evaluation,
    Steadiness,
    TrialResult,
    TrialSpec,
    Tuned,
    Verdict,
)
from memfit.search import Ask
from memfit.steady import TRACED_GROUPS, judge, suspicious
from memfit.tuning import look_for_larger
from memfit.units import TIB

if TYPE_CHECKING:
    from memfit.batch import Candidates

UNLIMITED_BYTES = TIB
"""Size of the virtual card on which a trial runs that asks what is needed without a limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Afterwards:
    """Trials after the search; none of them is part of it."""

    run: Callable[[TrialSpec], TrialResult]
    listener: ProbeListener
    time_is_up: Callable[[], bool]

    def steadiness(self, answer: TrialResult, *, index: int) -> Steadiness:
        """Say whether the answer's memory grows; a suspicion is put to a trial of its own."""
        ends = answer.observed.allocated_after_groups_bytes
        if not suspicious(ends) or self.time_is_up():
            return judge(answer, None)
        spec = replace(
            unlimited(answer.spec),
            index=index,
            purpose="trace",
            reason="memory rose from group to group: where it comes from",
            groups=TRACED_GROUPS,
            record_timeline=False,
        )
        return judge(answer, self._tell(spec))

    def evaluation(self, answer: TrialResult, *, index: int) -> Evaluation | None:
        """Run the answer's group and an evaluation pass after it, in a trial of its own."""
        if self.time_is_up():
            return None
        spec = replace(
            answer.spec,
            index=index,
            purpose="evaluate",
            reason="an evaluation pass at the answer's microbatch",
            groups=2,
            group_microbatches=min(answer.spec.group_microbatches, 2),
            evaluate=True,
            record_timeline=False,
        )
        result = self._tell(spec)
        found = Evaluation(
            verdict=result.verdict,
            text=result.evidence.text,
            microbatch=spec.sizes[0],
            peak=result.observed.evaluation,
        )
        if result.verdict is not Verdict.FITS:
            self.listener.warned(
                f"an evaluation pass at microbatch {found.microbatch} did not come to its end: "
                f"{found.text}; evaluate with a smaller one"
            )
        return found

    def tuned(
        self,
        sizes: Candidates,
        trials: Sequence[TrialResult],
        answer: TrialResult,
        *,
        environment: Environment,
        group_microbatches: int,
        max_trials: int,
        make: Callable[[Ask], TrialSpec],
    ) -> tuple[Tuned, tuple[TrialResult, ...]]:
        """Look for a larger microbatch with expandable segments.

        Args:
            sizes: The candidates.
            trials: Those of the search.
            answer: The trial that the answer stands on.
            environment: That of the workers.
            group_microbatches: Cap on the microbatches of a search trial's group.
            max_trials: Trials that may still be spent.
            make: Makes the trial that the search asks for; settings and number are put in here.

        Returns:
            What was found, and the trials that were run.
        """
        ran = len(trials)

        def run(ask: Ask) -> TrialResult | None:
            nonlocal ran
            if self.time_is_up():
                return None
            ran += 1
            return self._tell(replace(make(ask), index=ran, allocator=EXPANDABLE))

        larger = look_for_larger(
            sizes,
            trials,
            answer=answer.spec.split.microbatch,
            limit_bytes=answer.spec.device.limit_bytes,
            group_microbatches=group_microbatches,
            max_trials=max_trials,
            run=run,
        )
        best = larger.best
        found = Tuned(
            allocator=EXPANDABLE,
            variable=variable_for(environment.torch),
            trials=len(larger.trials),
            complete=larger.complete,
            split=sizes.split(best.spec.split.microbatch) if best else None,
            trial=replace(best, timeline=None) if best else None,
        )
        return found, tuple(replace(trial, timeline=None) for trial in larger.trials)

    def _tell(self, spec: TrialSpec) -> TrialResult:
        self.listener.asked(spec)
        result = self.run(spec)
        self.listener.finished(result)
        return result


def unlimited(spec: TrialSpec) -> TrialSpec:
    """Take the limit off a trial where the card is virtual."""
    if spec.device.kind is not DeviceKind.VIRTUAL:
        return spec
    return replace(spec, device=replace(spec.device, limit_bytes=UNLIMITED_BYTES))


def may_be_fragmented(trials: Sequence[TrialResult], environment: Environment) -> bool:
    """Whether a size failed that expandable segments may let fit."""
    if includes(settings_of(environment.variables), EXPANDABLE):
        return False
    return any(
        t.verdict in (Verdict.OOM, Verdict.THRASH)
        and t.spec.allocator is None
        and t.demand_bytes is not None
        and t.demand_bytes <= t.spec.device.limit_bytes
        for t in trials
    )
