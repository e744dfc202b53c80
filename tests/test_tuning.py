"""Another setting of the allocator: what is taken over, and what has to run."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from memfit.afterwards import may_be_fragmented
from memfit.allocator import EXPANDABLE
from memfit.batch import Candidates, candidates
from memfit.records import Policy, TrialResult, Verdict
from memfit.search import Ask, outcomes_of
from memfit.tuning import carried_over, look_for_larger
from tests.sample import ENVIRONMENT, RTX_4090, gpu_trial

LIMIT = RTX_4090.limit_bytes
FRAGMENTED = LIMIT - 2**28


def sizes() -> Candidates:
    return candidates(logical_batch=480, replicas=1, policy=Policy.EXACT, max_microbatch=None)


def searched() -> tuple[TrialResult, ...]:
    """A search whose answer is 16: 20 failed by fragmentation, and 24 cannot fit at all."""
    return (
        gpu_trial(1, 1, fits=True),
        gpu_trial(2, 8, fits=True),
        gpu_trial(3, 24, fits=False),
        gpu_trial(4, 20, fits=False, demand=FRAGMENTED),
        gpu_trial(5, 16, fits=True, purpose="confirm"),
    )


def asked(fits: bool, max_trials: int = 12) -> tuple[list[Ask], TrialResult | None, int, bool]:
    asks: list[Ask] = []

    def run(ask: Ask) -> TrialResult:
        asks.append(ask)
        purpose: Literal["search", "confirm"] = ask.purpose
        trial = gpu_trial(
            5 + len(asks),
            ask.microbatch,
            fits=fits,
            purpose=purpose,
            demand=None if fits else FRAGMENTED,
        )
        return replace(trial, spec=replace(trial.spec, allocator=EXPANDABLE))

    larger = look_for_larger(
        sizes(),
        searched(),
        answer=16,
        limit_bytes=LIMIT,
        group_microbatches=2,
        max_trials=max_trials,
        run=run,
    )
    return asks, larger.best, len(larger.trials), larger.complete


def test_what_fitted_and_what_cannot_fit_is_taken_over_and_fragmentation_is_not() -> None:
    kept = {o.microbatch: o for o in carried_over(outcomes_of(searched()), limit_bytes=LIMIT)}

    assert set(kept) == {1, 8, 16, 24}
    assert kept[24].verdict is Verdict.OOM
    assert not kept[16].full_groups
    assert kept[16].peak_bytes == kept[16].demand_bytes == gpu_trial(9, 16, fits=True).demand_bytes


def test_a_size_that_failed_by_fragmentation_is_run_in_full_groups_and_found() -> None:
    asks, best, trials, complete = asked(fits=True)

    assert [ask.microbatch for ask in asks] == [20]
    assert best is not None
    assert best.spec.split.microbatch == 20
    assert best.spec.runs_full_groups
    assert (trials, complete) == (1, True)


def test_a_setting_that_changes_nothing_leaves_the_answer() -> None:
    asks, best, trials, complete = asked(fits=False)

    assert {ask.microbatch for ask in asks} == {20}
    assert best is None
    assert (trials, complete) == (len(asks), True)


def test_the_search_with_a_setting_spends_no_more_trials_than_are_left() -> None:
    assert asked(fits=True, max_trials=0) == ([], None, 0, False)


def test_a_larger_size_is_looked_for_only_where_memory_was_in_pieces() -> None:
    plain = replace(ENVIRONMENT, variables={})
    assert may_be_fragmented(searched(), plain)
    assert not may_be_fragmented(searched()[:3], plain)
    set_already = replace(ENVIRONMENT, variables={"PYTORCH_ALLOC_CONF": EXPANDABLE})
    assert not may_be_fragmented(searched(), set_already)


def test_the_search_with_a_setting_ends_where_time_is_up() -> None:
    larger = look_for_larger(
        sizes(),
        searched(),
        answer=16,
        limit_bytes=LIMIT,
        group_microbatches=2,
        max_trials=12,
        run=lambda _ask: None,
    )
    assert (larger.best, larger.trials, larger.complete) == (None, (), False)
