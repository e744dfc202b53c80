"""`--need`: which devices are asked, and which one is the smallest that does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.capacity.cells import Ask, Column, asks_of, skipped_cell
from memfit.capacity.matrix import settings_of
from memfit.capacity.needs import Agenda, has_room, needed_of
from memfit.capacity.table import CapacityCell, CellStatus
from memfit.records import Certificate, Precision, Split, TriedAbove, Verdict
from tests import sample

NEED = 32
GB = 10**9


def columns(sizes: list[int]) -> tuple[Column, ...]:
    return tuple(
        Column(
            word=f"card-{index}",
            device=replace(sample.RTX_4090, slug=f"card-{index}", total_bytes=size),
            environment={},
        )
        for index, size in enumerate(sorted(sizes))
    )


def asks(sizes: list[int], rows: int = 1) -> tuple[Ask, ...]:
    lines = settings_of({"a": tuple(str(n) for n in range(rows))}, (Precision.FP32,), (1,))
    return asks_of(columns(sizes), lines, [{}] * rows, ())


def cell(ask: Ask, microbatch: int | None, *, ceiling: str = "tried", tried: bool = True):
    found: dict[str, Any] = {"status": CellStatus.NOTHING_FITS, "message": "it is too large"}
    if microbatch is not None:
        above = TriedAbove(microbatch=NEED, trial=2, verdict=Verdict.OOM, demand_exceeds_limit=True)
        found = {
            "status": CellStatus.FITS,
            "split": Split(microbatch=microbatch, accumulation_steps=2),
            "certificate": Certificate(
                microbatch=microbatch,
                trial=1,
                ceiling=ceiling,  # type: ignore[arg-type]
                tried_above=(above,) if tried and microbatch < NEED else (),
            ),
        }
    return CapacityCell(
        index=ask.index, device=ask.column.device, setting=ask.setting, command="", **found
    )


def run(todo: tuple[Ask, ...], answers: dict[int, int | None]) -> dict[int, CapacityCell]:
    """Ask one cell after the other, as the agenda says."""
    agenda, cells = Agenda(todo, need=NEED), {}
    while (ask := agenda.next()) is not None:
        cells[ask.index] = cell(ask, answers[ask.index])
        agenda.ended(ask, cells[ask.index])
    for ask in agenda.left:
        cells[ask.index] = skipped_cell(ask, command="")
    return cells


def test_devices_are_asked_from_the_least_memory_on_until_one_does() -> None:
    todo = asks([8 * GB, 16 * GB, 24 * GB, 80 * GB])
    cells = run(todo, {1: None, 2: 16, 3: 32, 4: 32})
    (need,) = needed_of(todo, cells, need=NEED)

    assert (need.device, need.cell, need.below) == ("card-2", 3, 2)
    assert cells[4].status is CellStatus.NOT_PROBED
    assert not need.alike
    assert not need.undecided


def test_devices_of_about_the_same_memory_are_asked_as_well() -> None:
    todo = asks([8 * GB, 24 * GB, 24 * GB + 1, 24 * GB + 2, 40 * GB])
    cells = run(todo, {1: None, 2: 32, 3: 16, 4: 32, 5: 32})
    (need,) = needed_of(todo, cells, need=NEED)

    assert (need.device, need.alike) == ("card-1", ("card-3",))
    assert cells[5].status is CellStatus.NOT_PROBED


def test_a_device_with_more_memory_that_does_not_do_is_passed_over() -> None:
    todo = asks([8 * GB, 16 * GB, 24 * GB])
    cells = run(todo, {1: None, 2: None, 3: 32})

    assert needed_of(todo, cells, need=NEED)[0].device == "card-2"


def test_where_none_does_the_largest_is_below() -> None:
    todo = asks([8 * GB, 16 * GB])
    (need,) = needed_of(todo, run(todo, {1: None, 2: 31}), need=NEED)

    assert (need.device, need.cell, need.below) == (None, None, 2)


def test_a_device_that_could_not_be_judged_is_named() -> None:
    todo = asks([8 * GB, 16 * GB])
    cells = {
        1: replace(cell(todo[0], None), status=CellStatus.FAILED),
        2: cell(todo[1], NEED),
    }
    (need,) = needed_of(todo, cells, need=NEED)

    assert (need.device, need.below, need.undecided) == ("card-1", None, (1,))


@pytest.mark.parametrize(
    ("microbatch", "ceiling", "tried", "room"),
    [
        (NEED, "cap", False, True),
        (16, "tried", True, False),
        (16, "tried", False, False),
        (16, "budget", True, False),
        (16, "budget", False, None),
        (16, "time", False, None),
        (None, "tried", False, False),
    ],
)
def test_room_is_said_only_of_what_a_certificate_shows(microbatch, ceiling, tried, room) -> None:
    ask = asks([8 * GB])[0]
    assert has_room(cell(ask, microbatch, ceiling=ceiling, tried=tried), NEED) is room


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(1, 3))
def test_the_answer_is_the_first_that_does_whatever_lies_above(does: list[bool], rows: int) -> None:
    todo = asks([(n + 1) * 10 * GB for n in range(len(does))], rows)
    answers = {a.index: NEED if does[(a.index - 1) % len(does)] else None for a in todo}
    cells = run(todo, answers)

    for need in needed_of(todo, cells, need=NEED):
        assert need.device == (f"card-{does.index(True)}" if any(does) else None)
    asked = sum(c.status is not CellStatus.NOT_PROBED for c in cells.values())
    assert asked == rows * (does.index(True) + 1 if any(does) else len(does))
