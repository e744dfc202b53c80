"""What is said of a verification follows from what was compared."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from memfit.report import verified
from memfit.verification import Comparison, Finding, LoopSeen, Outcome, Verification
from memfit.verify.findings import decide, finding

Held = tuple[Literal["draws", "statistics"], ...]


def compared(*, worst: float = 1e-16, held: Held = ()) -> Comparison:
    return Comparison(
        sizes=(2, 2),
        dtype="float64",
        held=held,
        error=worst,
        tolerance=1e-10,
        worst_parameter="weight",
        worst_error=worst,
    )


def made(*comparisons: Comparison, findings: tuple[Finding, ...] = (), **more: Any) -> Verification:
    fields: dict[str, Any] = {
        "created": "2026-01-15T09:30:00+00:00",
        "command": "memfit verify work.py",
        "memfit": "0",
        "torch": "2",
        "target": "work.py",
        "workload": "Work",
        "sha256": None,
        "parameters": {},
        "device": "cpu",
        "outcome": decide(findings, compared=bool(comparisons)),
        "logical_batch": 4,
        "findings": findings,
        "comparisons": comparisons,
    }
    return Verification(**{**fields, **more})


@pytest.mark.parametrize("code", ["MF206", "MF304", "MF103"])
def test_where_nothing_was_compared_nothing_is_said_to_differ(code: str) -> None:
    found = finding(code, "what was seen")
    said = verified.answer(made(findings=(found,)))

    assert said == (
        f"No gradient could be compared with that of the logical batch: {found.title} ({code})."
    )


def test_layers_that_were_held_are_told_over_a_table_of_equals() -> None:
    held = compared(held=("statistics",))
    verification = made(held, findings=(finding("MF301", "what was seen"),))

    assert verification.outcome is Outcome.DIFFERENT
    assert verified.answer(verification) == (
        "Accumulation does not reproduce the logical batch (MF301): layers mix the examples of a "
        "microbatch. With these in eval mode it does."
    )
    assert verified.verdict(held) == "equal (eval)"


def test_what_differs_with_layers_held_as_well_is_not_said_to_be_equal() -> None:
    found = (finding("MF301", "seen"), finding("MF202", "seen"))
    held = compared(worst=0.5, held=("statistics",))

    said = verified.answer(made(held, findings=found))

    assert said == "Accumulation does not reproduce the logical batch (MF301, MF202)."
    assert verified.verdict(held) == "different (eval)"


def test_an_error_beside_layers_that_were_held_is_not_covered_up() -> None:
    found = (finding("MF301", "seen"), finding("MF601", "seen"))
    said = verified.answer(made(compared(held=("statistics",)), findings=found))
    assert said == "Accumulation does not reproduce the logical batch (MF301, MF601)."


def test_layers_that_were_accepted_are_told_with_the_equality() -> None:
    verification = made(compared(held=("draws", "statistics")))
    assert verified.answer(verification).startswith(
        "Accumulation reproduces the logical batch, with the layers that mix examples in eval "
        "mode: 4 examples split as 2+2 give"
    )


def test_held_draws_alone_change_no_word() -> None:
    verification = made(compared(held=("draws",)))
    assert "eval mode" not in verified.answer(verification)
    assert verified.verdict(verification.comparisons[0]) == "equal"


def test_a_loop_that_was_watched_was_compared() -> None:
    loop = LoopSeen(
        groups=(),
        group_count=2,
        backward_passes=4,
        steps_attempted=2,
        steps_applied=2,
        steps_skipped=0,
        schedule_steps=0,
        ended="by itself",
    )
    found = finding("MF202", "seen")
    said = verified.answer(made(findings=(found,), loop=loop))
    assert said == "Accumulation does not reproduce the logical batch (MF202)."
