"""Memory from group to group: a rise that goes on is told from what grows once and stops."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memfit.records import GrowthPlace, Observed, TrialResult
from memfit.steady import judge, suspicious
from tests.sample import RTX_4090, gpu_trial

PLACE = GrowthPlace(where="project/model.py:31", bytes_per_group=2**20)


def trial(*ends: int, places: tuple[GrowthPlace, ...] = ()) -> TrialResult:
    made = gpu_trial(1, 8, fits=True)
    seen = Observed(allocated_after_groups_bytes=ends, growth_places=places)
    return replace(made, observed=seen, groups_run=max(len(ends), 2))


@pytest.mark.parametrize(
    ("ends", "answer"),
    [
        ((), False),
        ((5, 9), False),
        ((5, 9, 9), False),
        ((5, 5, 9), False),
        ((5, 6, 7), True),
        ((5, 9, 8), False),
        ((5, 5, 6, 6, 7, 7, 8), True),
        ((5, 9, 9, 9, 9, 9, 9), False),
    ],
)
def test_memory_that_rises_in_both_halves_is_suspicious(
    ends: tuple[int, ...], answer: bool
) -> None:
    assert suspicious(ends) is answer


def test_a_rise_after_every_group_is_growth_with_its_bytes_places_and_end() -> None:
    mib = 2**20
    answer = trial(10 * mib, 11 * mib, 12 * mib)
    found = judge(answer, trial(*(k * mib for k in range(10, 19)), places=(PLACE,)))

    assert (found.verdict, found.bytes_per_group, found.places) == ("growing", mib, (PLACE,))
    assert answer.demand_bytes is not None
    room = RTX_4090.limit_bytes - answer.demand_bytes
    assert found.groups_until_limit == 3 + room // mib


def test_a_rise_that_stops_while_it_is_traced_is_none() -> None:
    found = judge(trial(10, 11, 12), trial(10, 11, 12, 13, 14, 15, 15, 15, 15))

    assert found.verdict == "steady"
    assert found.reason == "it rose at first and then stopped"


@pytest.mark.parametrize(
    ("answer", "traced", "reason"),
    [
        (trial(), None, "no allocator counts here what is in use"),
        (trial(1, 2), None, "2 groups are too few to tell"),
        (
            trial(1, 2, 3),
            None,
            "it rose from group to group, and the trial that was to trace it was not run",
        ),
        (
            trial(1, 2, 3),
            trial(1, 2),
            "it rose from group to group, and the trial that was to trace it ended too early "
            "(fits)",
        ),
    ],
)
def test_what_cannot_be_told_is_unknown(
    answer: TrialResult, traced: TrialResult | None, reason: str
) -> None:
    found = judge(answer, traced)
    assert (found.verdict, found.reason) == ("unknown", reason)


def test_a_rise_in_every_other_group_is_growth() -> None:
    found = judge(trial(10, 20, 30), trial(10, 20, 20, 30, 30, 40, 40, 50, 50))

    assert (found.verdict, found.bytes_per_group) == ("growing", 5)


def test_groups_that_end_alike_are_steady() -> None:
    assert judge(trial(10, 12, 12), None).verdict == "steady"
