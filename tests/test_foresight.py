"""What is tried ahead of the search is what the search then asks for."""

from __future__ import annotations

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


def ahead(
    outcomes: Sequence[Outcome], ask: Decision, *ended: Outcome
) -> list[int | tuple[str, int]]:
    """Return the sizes that are foreseen, and `("answer", size)` for what follows an answer."""
    assert isinstance(ask, Ask)
    following = foresee(
        SIZES,
        outcomes,
        ask,
        ended={(o.microbatch, "search"): o for o in ended},
        limit_bytes=LIMIT,
        group_microbatches=2,
        decide=search,
    )
    return [
        each.microbatch if isinstance(each, Ask) else ("answer", each.certificate.microbatch)
        for each in following
    ]


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


def refused(*sizes: int) -> list[Outcome]:
    """Sizes that ran out of memory though their demand is below the limit."""
    return [
        Outcome(trial=m, microbatch=m, full_groups=True, verdict=Verdict.OOM, demand_bytes=20 * GIB)
        for m in sizes
    ]


def run(demand: Callable[[int], int]) -> tuple[list[int], int]:
    """Search to the end; return what was asked for, and how often that had been foreseen."""
    outcomes: list[Outcome] = []
    seen: set[object] = set()
    foreseen = 0
    while isinstance(ask := search(outcomes), Ask):
        foreseen += ask.microbatch in seen
        seen |= set(ahead(outcomes, ask))
        outcomes.append(trial(ask.microbatch, demand(ask.microbatch)))
    assert isinstance(ask, Found)
    return [o.microbatch for o in outcomes], foreseen


def test_the_size_that_measures_growth_is_foreseen_and_nothing_beyond_it() -> None:
    one, two = trial(1, 3 * GIB), trial(2, 4 * GIB)

    assert ahead([], search([])) == [2]
    assert ahead([], search([]), two) == []
    assert ahead([one], search([one])) == []


def test_on_a_straight_line_everything_after_the_second_size_is_foreseen() -> None:
    asked, foreseen = run(lambda m: 2 * GIB + m * GIB)

    assert asked[:2] == [1, 2]
    assert foreseen == len(asked) - 2  # but for the first, and the first that uses growth


def test_the_run_after_the_answer_comes_before_sizes_that_only_close_the_search() -> None:
    outcomes = [trial(1, 3 * GIB), trial(2, 4 * GIB), trial(22, LIMIT)]
    ask = search(outcomes)

    assert isinstance(ask, Ask)
    assert ask.microbatch == 23
    assert ahead(outcomes, ask) == [("answer", 22)]


def test_beside_a_likely_answer_comes_the_run_that_follows_it() -> None:
    outcomes = [trial(1, 3 * GIB), trial(2, 4 * GIB)]
    ask = search(outcomes)

    assert isinstance(ask, Ask)
    assert ask.microbatch == 22
    assert ahead(outcomes, ask)[:2] == [("answer", 22), 23]


def test_below_a_size_that_fragmentation_refused_the_next_is_expected_to_fail() -> None:
    outcomes = [trial(1, 3 * GIB), trial(2, 4 * GIB), *refused(22)]
    ask = search(outcomes)

    assert isinstance(ask, Ask)
    assert ask.microbatch == 21
    assert ahead(outcomes, ask)[0] == 20


def test_above_a_size_that_was_refused_nothing_is_expected_to_fit() -> None:
    outcomes = [trial(1, 3 * GIB), trial(2, 4 * GIB), *refused(21, 20, 19), trial(18, 20 * GIB)]

    assert ahead(outcomes, search(outcomes))[0] == ("answer", 18)


def test_what_has_ended_ahead_is_taken_as_it_ended() -> None:
    outcomes = [trial(1, 3 * GIB), trial(2, 4 * GIB)]
    ask = search(outcomes)

    assert 40 not in ahead(outcomes, ask)
    # 23 needed less than growth said, and so does what follows it.
    assert ahead(outcomes, ask, trial(23, 15 * GIB))[0] == 40


def test_what_is_hardly_ever_asked_for_is_not_tried() -> None:
    outcomes = [trial(1, 3 * GIB), trial(2, 4 * GIB), trial(22, LIMIT)]
    ask = search(outcomes)

    assert 24 not in ahead(outcomes, ask)  # only where 23 fits, which needs more than there is
