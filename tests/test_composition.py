"""A ledger becomes the parts of the peak, where both are of the same peak."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memfit.composition import composition_of, with_ledger, with_near_ledger
from memfit.records import Category, Ledger, LedgerPeak, LedgerRow, TrialResult, Verdict
from tests import sample


def row(category: Category, forward: int, backward: int) -> LedgerRow:
    return LedgerRow(
        category=category,
        module="",
        place=None,
        function="",
        text="",
        bytes=(forward, backward),
        blocks=(1, 1),
    )


def ledger(peak: int) -> Ledger:
    return Ledger(
        peaks=(
            LedgerPeak(phase="forward", groups="later", allocated_bytes=peak - 1),
            LedgerPeak(phase="backward", groups="later", allocated_bytes=peak),
        ),
        rows=(
            row("parameters", 10, 10),
            row("activations", peak - 18, peak - 30),
            row("temporary", 1, 13),
            row("workspace", 4, 4),
            row("inputs", 2, 3),
        ),
    )


def measured() -> TrialResult:
    return sample.gpt2().answer


def test_the_parts_are_those_of_the_highest_peak_and_sum_to_it() -> None:
    made = composition_of(ledger(1000))

    assert made.phase == "backward"
    assert made.total_bytes == 1000
    assert (made.activations_bytes, made.temporary_bytes, made.other_bytes) == (970, 13, 7)
    assert made.dominant == "activations"


def test_a_trial_takes_the_ledger_of_one_with_the_same_peaks() -> None:
    answer = measured()
    noted = replace(answer, ledger=ledger(1000), composition=None)

    assert with_ledger(answer, noted).ledger == noted.ledger
    assert with_ledger(answer, noted).composition == composition_of(ledger(1000))


@pytest.mark.parametrize(("verdict", "taken"), [(Verdict.THRASH, True), (Verdict.OOM, False)])
def test_a_ledger_is_taken_of_a_trial_that_ran_its_groups_however_they_were_laid_out(
    verdict: Verdict, *, taken: bool
) -> None:
    answer = measured()
    noted = replace(answer, ledger=ledger(1000), verdict=verdict)

    assert (with_ledger(answer, noted).ledger is noted.ledger) is taken


def test_a_trial_keeps_what_it_had_where_the_peaks_are_others() -> None:
    answer = measured()
    memory = answer.devices[0]
    phase = replace(memory.phases[0], peak_allocated_bytes=1)
    other = replace(memory, phases=(phase, *memory.phases[1:]))
    noted = replace(answer, ledger=ledger(1000), devices=(other,))

    assert with_ledger(answer, noted) == answer


def test_a_trial_keeps_what_it_had_where_the_other_has_no_ledger() -> None:
    answer = measured()

    assert with_ledger(answer, replace(answer, composition=None)) == answer


@pytest.mark.parametrize(
    ("off", "taken"), [(0, True), (-0.009, True), (0.009, True), (0.02, False)]
)
def test_a_shorter_group_with_nearly_the_same_peak_tells_its_lines_and_no_parts(
    off: float, taken: bool
) -> None:
    answer = measured()
    assert answer.composition is not None
    assert answer.peak_allocated_bytes is not None
    assert answer.composition.phase == "backward"
    noted = replace(answer, ledger=ledger(int(answer.peak_allocated_bytes * (1 + off))))
    told = with_near_ledger(answer, noted)

    assert told.ledger == (noted.ledger if taken else None)
    assert told.composition == answer.composition


def test_a_shorter_group_that_peaks_in_another_phase_tells_nothing() -> None:
    answer = measured()
    assert answer.composition is not None
    elsewhere = replace(answer, composition=replace(answer.composition, phase="forward"))
    noted = replace(answer, ledger=ledger(answer.peak_allocated_bytes or 0))

    assert with_near_ledger(elsewhere, noted) == elsewhere
