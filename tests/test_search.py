"""The search against simulated memory: tables for typical devices, and random ones."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.batch import Candidates, candidates
from memfit.errors import InternalError
from memfit.records import Certificate, Evidence, Policy, TrialSpec, Verdict
from memfit.search import (
    Ask,
    Decision,
    Exhausted,
    Found,
    NoFit,
    Outcome,
    decide,
    expected_room,
    outcomes_of,
    story,
)
from tests import sample

GIB = 2**30
MIB = 2**20
LIMIT = 24 * GIB
PLENTY = 10_000


@dataclass(frozen=True, kw_only=True)
class Memory:
    """A device and a workload: what a trial at a size would show."""

    fixed: int = 2 * GIB
    per_example: int = GIB
    curve: float = 0.0
    """Growth of the slope with the size: 0 is a straight line."""
    gradients: int = 0
    """Held from the second microbatch of a group on."""
    step: int = 1
    """Demand is rounded up to a multiple of this."""
    overhead: float = 0.0
    """Reserved memory above the demand, as a part of it."""
    noise: int = 0
    full_extra: int = 0
    """What full groups need above short ones."""
    holes: frozenset[int] = frozenset()
    kernel_limit: int | None = None
    cpu: bool = False
    thrashes: bool = False
    """Whether sizes between the limit on demand and on the peak run, but thrash."""
    blind: bool = False
    """Whether out-of-memory errors come early, with a demand below the limit."""
    limit: int = LIMIT

    def demand(self, m: int, *, held: bool, full: bool) -> int:
        growth = self.per_example * m * (1 + self.curve * m)
        raw = self.fixed + int(growth) + (self.gradients if held else 0)
        raw += self.full_extra if full else 0
        rounded = -(-raw // self.step) * self.step
        return rounded + (m * 7919 % 13 * self.noise // 13 if self.noise else 0)

    def run(self, m: int, *, steps: int, full: bool, trial: int) -> Outcome:
        """Run one trial."""
        demand = self.demand(m, held=steps > 1, full=full)
        peak = int(demand * (1 + self.overhead))
        first = self.demand(m, held=False, full=full)
        outcome = Outcome(
            trial=trial,
            microbatch=m,
            full_groups=full,
            verdict=Verdict.FITS,
            demand_bytes=demand,
            peak_bytes=peak,
        )
        if self.kernel_limit is not None and m > self.kernel_limit:
            return replace(outcome, verdict=Verdict.SIZE_LIMIT, demand_bytes=None, peak_bytes=None)
        if demand > self.limit:
            verdict = Verdict.HOST_OOM if self.cpu else Verdict.OOM
            over = -(self.limit // 200) if self.blind else self.limit // 100
            reported = min(demand, self.limit + over)
            return replace(
                outcome,
                verdict=verdict,
                demand_bytes=reported,
                peak_bytes=None,
                gradients_held=first <= self.limit,
            )
        if m in self.holes:
            return replace(outcome, verdict=Verdict.OOM, peak_bytes=None)
        if peak > self.limit:
            verdict = Verdict.THRASH if self.thrashes else Verdict.OOM
            return replace(outcome, verdict=verdict, peak_bytes=self.limit)
        return outcome


@dataclass
class Search:
    """A whole search on one memory, with what it asked."""

    sizes: Candidates
    memory: Memory
    max_trials: int = 40
    group: int = 2
    asked: list[Ask] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)

    def next(self) -> Decision:
        return decide(
            self.sizes,
            self.outcomes,
            limit_bytes=self.memory.limit,
            max_trials=self.max_trials,
            group_microbatches=self.group,
        )

    def full(self, ask: Ask) -> bool:
        steps = self.sizes.split(ask.microbatch).accumulation_steps
        return ask.purpose == "confirm" or steps <= self.group

    def run(self) -> Decision:
        while isinstance(decision := self.next(), Ask):
            self.asked.append(decision)
            assert len(self.asked) <= PLENTY
            self.outcomes.append(
                self.memory.run(
                    decision.microbatch,
                    steps=self.sizes.accumulation_steps(decision.microbatch),
                    full=self.full(decision),
                    trial=len(self.asked),
                )
            )
        return decision

    def fits(self, m: int) -> bool:
        steps = self.sizes.accumulation_steps(m)
        return self.memory.run(m, steps=steps, full=True, trial=0).verdict is Verdict.FITS

    def scan(self, *, but: int | None = None) -> int | None:
        """Try everything, as no search would."""
        return max((m for m in self.sizes.sizes if m != but and self.fits(m)), default=None)


def exact(logical_batch: int, **options: Any) -> Candidates:
    return of(logical_batch=logical_batch, **options)


def ragged(logical_batch: int, **options: Any) -> Candidates:
    return of(logical_batch=logical_batch, policy=Policy.RAGGED, **options)


def of(
    *,
    logical_batch: int | None = None,
    replicas: int = 1,
    policy: Policy = Policy.EXACT,
    min_microbatch: int = 1,
    max_microbatch: int | None = None,
) -> Candidates:
    return candidates(
        logical_batch=logical_batch,
        replicas=replicas,
        policy=policy,
        min_microbatch=min_microbatch,
        max_microbatch=max_microbatch,
    )


def certificate_of(decision: Decision) -> Certificate:
    assert isinstance(decision, Found)
    return decision.certificate


# Tables -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "per_example", "answer", "trials"),
    [
        (exact(480), 1.4, 15, 4),
        (exact(480), 1.1, 16, 4),
        (exact(480), 0.9, 20, 4),
        (exact(480), 0.13, 160, 5),
        (exact(480), 0.02, 480, 4),
        (exact(1920), 0.9, 20, 5),
        (ragged(480), 1.1, 19, 4),
        (ragged(480), 0.9, 23, 4),
        (of(), 1.4, 15, 4),
        (of(), 0.9, 23, 4),
        (of(), 0.13, 164, 5),
        (of(), 0.02, 1072, 5),
        (exact(1024, replicas=4), 0.2, 64, 4),
    ],
)
def test_few_trials_on_a_straight_line(
    sizes: Candidates, per_example: float, answer: int, trials: int
) -> None:
    search = Search(sizes, Memory(per_example=int(per_example * GIB), gradients=GIB // 2))
    assert certificate_of(search.run()).microbatch == answer == search.scan()
    assert len(search.asked) == trials


@pytest.mark.parametrize(
    ("memory", "sizes", "answer", "most"),
    [
        pytest.param(Memory(noise=50 * MIB, cpu=True), of(), 21, 6, id="noise"),
        pytest.param(
            Memory(noise=50 * MIB, cpu=True, per_example=20 * MIB), of(), 1120, 7, id="more noise"
        ),
        pytest.param(Memory(overhead=0.02), of(), 21, 6, id="fragmentation"),
        pytest.param(Memory(overhead=0.08), ragged(480), 20, 7, id="much fragmentation"),
        pytest.param(Memory(blind=True), exact(480), 20, 6, id="early errors"),
        pytest.param(Memory(blind=True, overhead=0.01), of(), 21, 6, id="early errors, fragments"),
        pytest.param(Memory(curve=0.02, per_example=GIB // 20), of(), 125, 12, id="curve"),
        pytest.param(Memory(full_extra=3 * GIB), exact(480), 16, 6, id="confirmation fails"),
        pytest.param(Memory(kernel_limit=100, per_example=MIB), of(), 100, 14, id="index limit"),
        pytest.param(Memory(holes=frozenset({21, 22})), of(), 20, 6, id="holes"),
        pytest.param(Memory(holes=frozenset({14, 21})), of(), 22, 4, id="hole below"),
    ],
)
def test_unruly_memory(memory: Memory, sizes: Candidates, answer: int, most: int) -> None:
    search = Search(sizes, memory)
    found = certificate_of(search.run())
    assert found.microbatch == answer == search.scan()
    assert found.ceiling == "tried"
    assert len(search.asked) <= most


def test_the_search_goes_above_a_hole() -> None:
    # The prediction leads to 22, which does not fit; neither does 21, and 20 does.
    search = Search(of(), Memory(holes=frozenset({21, 22})))
    found = certificate_of(search.run())
    assert [ask.microbatch for ask in search.asked] == [1, 2, 22, 21, 20, 23]
    assert [(t.microbatch, t.trial, t.demand_exceeds_limit) for t in found.tried_above] == [
        (21, 4, False),
        (22, 3, False),
        (23, 6, True),
    ]
    assert found.untried == ()


def test_thrash_is_a_hole_and_everything_in_its_zone_is_tried() -> None:
    search = Search(of(), Memory(overhead=0.1, thrashes=True))
    found = certificate_of(search.run())
    assert found.microbatch == 19
    assert [(t.microbatch, t.verdict.value) for t in found.tried_above] == [
        (20, "thrash"),
        (21, "thrash"),
        (22, "thrash"),
        (23, "oom"),
    ]


def test_a_prime_batch_has_two_sizes() -> None:
    search = Search(exact(479), Memory())
    found = certificate_of(search.run())
    assert [(a.microbatch, a.purpose) for a in search.asked] == [
        (1, "search"),
        (479, "search"),
        (1, "confirm"),
    ]
    assert (found.microbatch, found.trial, found.ceiling) == (1, 3, "tried")


def test_the_cap_is_tried_when_it_is_predicted_to_fit() -> None:
    search = Search(of(max_microbatch=300), Memory(per_example=10 * MIB))
    found = certificate_of(search.run())
    assert (found.microbatch, found.ceiling, found.cap) == (300, "cap", 300)
    assert [ask.microbatch for ask in search.asked] == [1, 2, 64, 300]


def test_flat_memory_is_climbed_in_bounded_jumps() -> None:
    search = Search(of(), Memory(per_example=0))
    assert certificate_of(search.run()).ceiling == "cap"
    assert [ask.microbatch for ask in search.asked] == [1, 2, 64, 2048, 65536]


def test_one_microbatch_may_fit_where_smaller_ones_do_not() -> None:
    # Four examples fail with the gradients of another microbatch held; eight at once hold none.
    memory = Memory(fixed=12 * GIB, gradients=10 * GIB)
    search = Search(exact(8), memory)
    assert certificate_of(search.run()).microbatch == 8 == search.scan()
    assert [ask.microbatch for ask in search.asked] == [1, 2, 4, 8]


def test_one_microbatch_out_of_proportion_is_left_out_with_a_note() -> None:
    search = Search(exact(480), Memory(fixed=12 * GIB, gradients=10 * GIB))
    decision = search.run()
    assert certificate_of(decision).microbatch == 2
    assert isinstance(decision, Found)
    assert "microbatch 480, the whole group at once" in decision.notes[0]


def test_a_ceiling_by_growth_is_told() -> None:
    search = Search(of(), Memory(blind=True))
    decision = search.run()
    assert isinstance(decision, Found)
    assert not any(t.demand_exceeds_limit for t in decision.certificate.tried_above)
    assert decision.notes == (
        (
            "nothing above microbatch 23 was tried: it ran out of memory, and growth from 2 to 22 "
            "puts its demand at 25.00 GiB of 24.00 GiB"
        ),
    )


def test_nothing_fits() -> None:
    search = Search(exact(480), Memory(fixed=30 * GIB))
    assert search.run() == NoFit(microbatch=1, trial=1)
    # The errors come early, so that nothing says how much too large the sizes are.
    search = Search(exact(480), Memory(fixed=30 * GIB, blind=True))
    assert search.run() == NoFit(microbatch=1, trial=1)
    assert [ask.microbatch for ask in search.asked] == [1, 2, 4]


def test_a_model_that_does_not_fit_ends_the_search() -> None:
    outcome = Outcome(
        trial=1,
        microbatch=1,
        full_groups=False,
        verdict=Verdict.OOM,
        demand_bytes=LIMIT - 1,
        gradients_held=False,
        size_mattered=False,
    )
    decision = decide(exact(8), [outcome], limit_bytes=LIMIT, max_trials=40, group_microbatches=2)
    assert decision == NoFit(microbatch=1, trial=1)


def test_the_last_trial_confirms() -> None:
    search = Search(exact(1920), Memory(), max_trials=4)
    found = certificate_of(search.run())
    assert [(a.microbatch, a.purpose) for a in search.asked] == [
        (1, "search"),
        (2, "search"),
        (20, "search"),
        (20, "confirm"),
    ]
    assert (found.microbatch, found.ceiling) == (20, "budget")
    assert found.untried[0] == 24


def test_a_single_trial_can_answer() -> None:
    search = Search(exact(480), Memory(), max_trials=1)
    found = certificate_of(search.run())
    assert (found.microbatch, found.ceiling) == (1, "budget")
    assert search.asked[0].purpose == "confirm"


def test_a_failed_confirmation_on_the_last_trial_leaves_no_answer() -> None:
    search = Search(exact(1920), Memory(full_extra=3 * GIB), max_trials=4)
    decision = search.run()
    assert isinstance(decision, Exhausted)
    assert decision.trials == 4


def test_after_a_failed_confirmation_groups_are_full_at_once() -> None:
    search = Search(exact(1920), Memory(full_extra=3 * GIB))
    search.run()
    assert [(a.microbatch, a.purpose) for a in search.asked][3:] == [
        (24, "search"),
        (20, "confirm"),
        (16, "confirm"),
    ]


def test_an_expected_answer_runs_full_groups_at_once_where_they_are_not_long() -> None:
    search = Search(exact(480), Memory())
    search.run()
    assert [(a.microbatch, a.purpose) for a in search.asked] == [
        (1, "search"),
        (2, "search"),
        (20, "confirm"),
        (24, "search"),
    ]


def test_short_groups_that_are_whole_need_no_confirmation() -> None:
    search = Search(exact(480), Memory(), group=480)
    search.run()
    assert {ask.purpose for ask in search.asked} == {"search"}


def outcome_of(
    trial: int, m: int, verdict: Verdict, demand: float, *, peak: float = 0, full: bool = True
) -> Outcome:
    """One outcome, in GiB."""
    return Outcome(
        trial=trial,
        microbatch=m,
        full_groups=full,
        verdict=verdict,
        demand_bytes=int(demand * GIB),
        peak_bytes=int(max(demand, peak) * GIB) if verdict is Verdict.FITS else None,
    )


def next_of(sizes: Candidates, *outcomes: Outcome, max_trials: int = 40) -> Decision:
    return decide(sizes, outcomes, limit_bytes=LIMIT, max_trials=max_trials, group_microbatches=2)


def test_thrash_is_no_ceiling_however_fast_memory_grew() -> None:
    decision = next_of(
        of(),
        outcome_of(1, 1, Verdict.FITS, 5),
        outcome_of(2, 2, Verdict.FITS, 15),
        outcome_of(3, 3, Verdict.THRASH, 23),
    )
    assert isinstance(decision, Ask)
    assert decision.microbatch == 4


def test_a_fit_above_a_ceiling_refutes_it() -> None:
    decision = next_of(
        of(),
        outcome_of(1, 1, Verdict.FITS, 1),
        outcome_of(2, 2, Verdict.FITS, 2),
        outcome_of(3, 4, Verdict.OOM, 25),
        outcome_of(4, 8, Verdict.FITS, 8),
    )
    assert isinstance(decision, Ask)
    assert decision.microbatch == 24


def test_below_the_ceiling_the_largest_size_is_tried_first() -> None:
    decision = next_of(
        of(),
        outcome_of(1, 1, Verdict.FITS, 2.1),
        outcome_of(2, 2, Verdict.FITS, 2.2),
        outcome_of(3, 100, Verdict.FITS, 12, peak=23.95),
        outcome_of(4, 106, Verdict.OOM, 25),
    )
    assert isinstance(decision, Ask)
    assert decision.microbatch == 105


def test_a_fit_without_full_groups_is_no_answer() -> None:
    decision = next_of(
        exact(480),
        outcome_of(1, 1, Verdict.FITS, 3),
        outcome_of(2, 20, Verdict.FITS, 22, full=False),
        max_trials=2,
    )
    found = certificate_of(decision)
    assert (found.microbatch, found.trial, found.ceiling) == (1, 1, "budget")
    assert found.untried == (20, 24, 30, 32, 40, 48, 60, 80, 96, 120, 160, 240, 480)


@pytest.mark.parametrize("verdict", [Verdict.ERROR, Verdict.CRASH, Verdict.TIMEOUT])
def test_a_trial_that_says_nothing_about_a_size_is_refused(verdict: Verdict) -> None:
    outcome = Outcome(trial=1, microbatch=1, full_groups=True, verdict=verdict)
    with pytest.raises(InternalError, match="trial 1"):
        decide(exact(8), [outcome], limit_bytes=LIMIT, max_trials=9, group_microbatches=2)


def test_a_size_that_is_no_candidate_is_refused() -> None:
    outcome = Outcome(trial=1, microbatch=3, full_groups=True, verdict=Verdict.FITS)
    with pytest.raises(InternalError, match="3"):
        decide(exact(8), [outcome], limit_bytes=LIMIT, max_trials=9, group_microbatches=2)


def test_sizes_without_figures_are_searched_by_halving() -> None:
    class Unmeasured(Memory):
        def run(self, m: int, **options: Any) -> Outcome:
            return replace(super().run(m, **options), demand_bytes=None, peak_bytes=None)

    search = Search(exact(4096), Unmeasured(per_example=GIB // 20))
    found = certificate_of(search.run())
    assert found.microbatch == 256
    assert len(search.asked) <= 16


def test_the_story_gives_a_reason_for_each_trial() -> None:
    search = Search(exact(480), Memory())
    search.run()
    told = story(
        search.sizes, search.outcomes, limit_bytes=LIMIT, max_trials=40, group_microbatches=2
    )
    assert told == tuple(ask.reason for ask in search.asked)
    assert told[2] == "predicted to fit: 22.00 GiB of 24.00 GiB, from sizes 1 and 2"


def test_expected_room() -> None:
    search = Search(exact(480), Memory())
    assert expected_room(search.sizes, (), limit_bytes=LIMIT) is None
    search.run()
    assert expected_room(search.sizes, search.outcomes, limit_bytes=LIMIT) == 22


def test_one_size_that_fits_and_one_that_fails_early_tell_no_room() -> None:
    search = Search(exact(479), Memory(blind=True))
    assert certificate_of(search.run()).microbatch == 1
    assert expected_room(search.sizes, search.outcomes, limit_bytes=LIMIT) is None


def test_outcomes_are_taken_from_trials() -> None:
    result = sample.gpt2()
    trials = result.trials
    assert [o.microbatch for o in outcomes_of(trials)] == [t.spec.split.microbatch for t in trials]
    fitting = Outcome.of(result.answer)
    assert fitting.full_groups
    assert fitting.verdict is Verdict.FITS
    assert fitting.demand_bytes == result.answer.demand_bytes
    diagnosing = replace(result.answer, spec=as_purpose(result.answer.spec, "diagnose"))
    assert outcomes_of([diagnosing]) == ()


def as_purpose(spec: TrialSpec, purpose: Literal["search", "confirm", "diagnose"]) -> TrialSpec:
    return replace(spec, purpose=purpose)


@pytest.mark.parametrize(
    ("phase", "index", "expected"),
    [
        ("forward", 1, (False, True)),
        ("backward", 2, (True, True)),
        ("forward", None, (True, True)),
        ("optimizer_step", None, (False, True)),
        ("imported", None, (False, False)),
        (None, None, (True, True)),
    ],
)
def test_where_a_trial_ended_tells_what_it_held(
    phase: str | None, index: int | None, expected: tuple[bool, bool]
) -> None:
    evidence = Evidence(rule="r", text="t", phase=phase, microbatch_index=index)
    outcome = Outcome.of(replace(sample.gpt2().answer, verdict=Verdict.OOM, evidence=evidence))
    assert (outcome.gradients_held, outcome.size_mattered) == expected


# Random devices -----------------------------------------------------------------------------

sizes_strategy = st.one_of(
    st.builds(
        of,
        logical_batch=st.integers(1, 3000),
        policy=st.sampled_from(Policy),
        max_microbatch=st.none() | st.integers(1, 3000),
    ),
    st.builds(of, max_microbatch=st.none() | st.integers(1, 3000)),
)
shape = {
    "fixed": st.integers(0, 26 * GIB),
    "per_example": st.integers(MIB, 6 * GIB),
    "curve": st.sampled_from([0.0, 0.0, 0.001, 0.05]),
    "gradients": st.just(0) | st.integers(0, 8 * GIB),
    "full_extra": st.just(0) | st.integers(0, GIB),
    "kernel_limit": st.none() | st.integers(1, 500),
}
gpu_strategy = st.builds(
    Memory,
    **shape,
    step=st.sampled_from([1, 2 * MIB]),
    overhead=st.sampled_from([0.0, 0.01, 0.03, 0.1]),
    holes=st.frozensets(st.integers(2, 200), max_size=40),
    thrashes=st.booleans(),
    blind=st.booleans(),
)
cpu_strategy = st.builds(Memory, **shape, noise=st.integers(0, 64 * MIB), cpu=st.just(value=True))
memory_strategy = st.one_of(gpu_strategy, cpu_strategy)


def left_out(search: Search, decision: Decision) -> int | None:
    """The size of a whole group that the search did not try, where it may leave it out."""
    largest = search.sizes.largest
    if search.sizes.accumulation_steps(largest) > 1 or largest in {
        o.microbatch for o in search.outcomes
    }:
        return None
    told = isinstance(decision, Found) and any("whole group" in note for note in decision.notes)
    return largest if told or isinstance(decision, NoFit) else None


@settings(max_examples=400, deadline=None)
@given(sizes=sizes_strategy, memory=memory_strategy, group=st.sampled_from([1, 2, 5]))
def test_a_finished_search_equals_the_exhaustive_one(
    sizes: Candidates, memory: Memory, group: int
) -> None:
    search = Search(sizes, memory, max_trials=PLENTY, group=group)
    decision = search.run()
    expected = search.scan(but=left_out(search, decision))
    if expected is None:
        assert isinstance(decision, NoFit)
    elif isinstance(decision, NoFit):
        assert not search.fits(sizes.smallest)
        assert len(search.asked) >= min(3, len(sizes.sizes))
    else:
        assert certificate_of(decision).ceiling != "budget"
        assert certificate_of(decision).microbatch == expected


@settings(max_examples=400, deadline=None)
@given(
    sizes=sizes_strategy,
    memory=memory_strategy,
    max_trials=st.integers(1, 40),
    group=st.sampled_from([1, 2, 5]),
)
def test_what_holds_for_every_search(
    sizes: Candidates, memory: Memory, max_trials: int, group: int
) -> None:
    search = Search(sizes, memory, max_trials=max_trials, group=group)
    decision = search.run()
    assert len(search.asked) <= max_trials
    runs = [(ask.microbatch, search.full(ask)) for ask in search.asked]
    assert len(set(runs)) == len(runs)
    for ask in search.asked:
        if sizes.accumulation_steps(ask.microbatch) <= group:
            assert ask.purpose == "search"
    fitted = [o.microbatch for o in search.outcomes if o.verdict is Verdict.FITS]
    for position, ask in enumerate(search.asked):
        before = search.outcomes[:position]
        if any(o.verdict is Verdict.FITS for o in before):
            best = max(o.microbatch for o in before if o.verdict is Verdict.FITS)
            open_sizes = set(sizes.sizes) - {o.microbatch for o in before}
            following = min((m for m in open_sizes if m > best), default=best)
            assert ask.microbatch <= max(32 * best, following)
    if isinstance(decision, Exhausted):
        assert len(search.asked) == max_trials
        assert memory.full_extra or not fitted
    if isinstance(decision, Found):
        check_certificate(search, decision)


def check_certificate(search: Search, decision: Found) -> None:
    found = decision.certificate
    by_trial = {o.trial: o for o in search.outcomes}
    answer = by_trial[found.trial]
    assert (answer.microbatch, answer.verdict) == (found.microbatch, Verdict.FITS)
    assert answer.full_groups
    assert (found.ceiling == "budget") == bool(found.untried)
    for above in found.tried_above:
        assert above.microbatch > found.microbatch
        assert by_trial[above.trial].microbatch == above.microbatch
        assert by_trial[above.trial].verdict is above.verdict
    accounted = {t.microbatch for t in found.tried_above} | set(found.untried)
    highest = max((t.microbatch for t in found.tried_above), default=0)
    for size in search.sizes.sizes:
        if found.microbatch < size < highest and size != search.sizes.largest:
            assert (
                size in accounted
                or any(
                    t.microbatch < size
                    and (t.demand_exceeds_limit or t.verdict.value in ("host_oom", "size_limit"))
                    for t in found.tried_above
                )
                or decision.notes
            )


@settings(max_examples=100, deadline=None)
@given(sizes=sizes_strategy, memory=memory_strategy, max_trials=st.integers(1, 40))
def test_a_search_resumes_where_it_stopped(
    sizes: Candidates, memory: Memory, max_trials: int
) -> None:
    search = Search(sizes, memory, max_trials=max_trials)
    search.run()
    for position, ask in enumerate(search.asked):
        resumed = Search(sizes, memory, max_trials=max_trials)
        resumed.outcomes = [replace(outcome) for outcome in search.outcomes[:position]]
        assert resumed.next() == ask
