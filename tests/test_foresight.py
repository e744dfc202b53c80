"""What is tried ahead of the search is what the search then asks for."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from memfit.batch import candidates
from memfit.foresight import foresee
from memfit.outcomes import Outcome
from memfit.records import Policy, Verdict
from memfit.search import Ask, Found, decide

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from memfit.search import Decision

GIB = 2**30
LIMIT = 24 * GIB
SIZES = candidates(logical_batch=None, replicas=1, policy=Policy.EXACT, max_microbatch=None)


def search(outcomes: Sequence[Outcome]) -> Decision:
    return decide(SIZES, outcomes, limit_bytes=LIMIT, max_trials=400, group_microbatches=2)


ahead = partial(foresee, SIZES, limit_bytes=LIMIT, group_microbatches=2, decide=search)


def trial(microbatch: int, demand: int, *, limit: int = LIMIT) -> Outcome:
    fits = demand <= limit
    return Outcome(
        trial=microbatch,
        microbatch=microbatch,
        full_groups=True,
        verdict=Verdict.FITS if fits else Verdict.OOM,
        demand_bytes=demand,
        peak_bytes=demand if fits else None,
    )


def run(demand: Callable[[int], int]) -> tuple[list[int], int]:
    """Search to the end; return what was asked for, and how often that had been foreseen."""
    outcomes: list[Outcome] = []
    seen: set[int] = set()
    foreseen = 0
    while isinstance(ask := search(outcomes), Ask):
        foreseen += ask.microbatch in seen
        seen |= {a.microbatch for a in ahead(outcomes, ask) if isinstance(a, Ask)}
        outcomes.append(trial(ask.microbatch, demand(ask.microbatch)))
    assert isinstance(ask, Found)
    return [o.microbatch for o in outcomes], foreseen


def test_the_size_that_measures_growth_is_foreseen_and_nothing_beyond_it() -> None:
    first = search([])
    assert isinstance(first, Ask)
    (second,) = ahead([], first)
    assert isinstance(second, Ask)
    assert (first.microbatch, second.microbatch) == (1, 2)

    assert list(ahead([trial(1, 3 * GIB)], second)) == []


def test_on_a_straight_line_everything_after_the_second_size_is_foreseen() -> None:
    asked, foreseen = run(lambda m: 2 * GIB + m * GIB)

    assert asked[:2] == [1, 2]
    assert foreseen == len(asked) - 2  # but for the first, and the first that uses growth


def test_the_end_is_foreseen_with_the_size_that_it_stands_on() -> None:
    outcomes = [trial(1, 3 * GIB), trial(2, 4 * GIB), trial(22, LIMIT)]
    ask = search(outcomes)
    assert isinstance(ask, Ask)

    *_, last = ahead(outcomes, ask)
    assert isinstance(last, Found)
    assert last.certificate.microbatch == 22


def test_below_a_size_that_fragmentation_refused_the_next_is_expected_to_fail() -> None:
    refused = Outcome(
        trial=3, microbatch=22, full_groups=True, verdict=Verdict.OOM, demand_bytes=20 * GIB
    )
    outcomes = [trial(1, 3 * GIB), trial(2, 4 * GIB), refused]
    below = Ask(microbatch=21, purpose="search", reason="")

    following = next(ahead(outcomes, below))
    assert isinstance(following, Ask)
    assert following.microbatch < 21


def test_what_would_be_the_answer_comes_before_what_follows_if_it_is_not() -> None:
    refused = [
        Outcome(trial=m, microbatch=m, full_groups=True, verdict=Verdict.OOM, demand_bytes=demand)
        for m, demand in ((23, 25 * GIB), (22, 23 * GIB), (21, 22 * GIB))
    ]
    outcomes = [trial(1, 3 * GIB), trial(2, 4 * GIB), trial(18, 20 * GIB), *refused]
    ask = search(outcomes)
    assert isinstance(ask, Ask)
    assert ask.microbatch == 20

    answer, below, *_ = ahead(outcomes, ask)
    assert isinstance(answer, Found)
    assert isinstance(below, Ask)
    assert (answer.certificate.microbatch, below.microbatch) == (20, 19)
