"""The cells of a plan: their order, their folders, what is not asked twice, and their command."""

from __future__ import annotations

from dataclasses import replace

from memfit.capacity.cells import Ask, Column, answered_cell, asks_of, probe_command, refused_cell
from memfit.capacity.matrix import changes_of, settings_of
from memfit.capacity.table import CellStatus, Tried
from memfit.errors import CannotJudge, MemfitError, NothingFits, WorkloadError
from memfit.question import ProbeRequest
from memfit.records import Precision
from tests import sample

SMALL = Column(word="4090", device=sample.RTX_4090, environment={})
LARGE = Column(
    word="h100",
    device=replace(sample.RTX_4090, slug="h100-80gb", total_bytes=80 * 2**30),
    environment={},
)
VALUES = {"width": 8, "checkpointing": False}


def cells(*tries: str, precisions=(Precision.FP32, Precision.BF16)) -> tuple[Ask, ...]:
    rows = settings_of({"width": ("8", "9")}, precisions, (1,))
    values = [{**VALUES, "width": int(row.parameters["width"])} for row in rows]
    changes, _ = changes_of(tries, VALUES, allocator="")
    return asks_of((SMALL, LARGE), rows, values, changes)


def test_cells_stand_row_by_row_from_the_smallest_device() -> None:
    asks = cells()

    assert [ask.index for ask in asks] == list(range(1, 9))
    assert [ask.column.device.slug for ask in asks[:3]] == ["rtx-4090", "h100-80gb", "rtx-4090"]
    assert [ask.row for ask in asks] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_folder_is_named_after_its_question_and_its_own() -> None:
    asks = cells("allocator", "checkpointing")
    names = [ask.folder for ask in asks]

    assert names[0] == "cells/rtx-4090_width-8_fp32"
    assert len(set(names)) == len(names)
    assert "cells/rtx-4090_width-8_fp32_expandable-segments" in names
    assert "cells/h100-80gb_width-9_checkpointing-True_bf16" in names


def test_a_folder_keeps_apart_what_letters_cannot() -> None:
    rows = settings_of({"name": ("a/b", "a:b", "../a")}, (Precision.FP32,), (1, 8))
    asks = asks_of((SMALL,), rows, [{}] * 6, ())

    assert len({ask.folder for ask in asks}) == 6
    assert all(ask.folder.count("/") == 1 for ask in asks)


def test_a_change_that_leads_to_another_cell_of_the_matrix_is_not_asked_twice() -> None:
    asks = cells("precision")

    assert len(asks) == 8
    assert asks[0].tries == (Tried(change="bf16", cell=3),)
    assert asks[2].tries == ()


def test_a_change_that_leads_out_of_the_matrix_is_a_cell_of_its_own() -> None:
    asks = cells("checkpointing", precisions=(Precision.FP32,))

    assert len(asks) == 8
    assert asks[0].tries == (Tried(change="checkpointing=True", cell=5),)
    assert (asks[4].base, asks[4].row, asks[4].column) == (1, 0, SMALL)
    assert asks[4].setting.parameters == {"width": "8", "checkpointing": "True"}


def test_the_command_of_a_cell_asks_what_differs_from_a_plain_probe_and_no_more() -> None:
    request = ProbeRequest(
        target="work.py",
        parameters={"width": "8"},
        device="rtx-4090",
        precision=Precision.BF16,
        logical_batch=512,
        replicas=8,
        headroom="5%",
    )
    assert probe_command(request, {"A": "b c"}) == (
        "A='b c' memfit probe work.py --set width=8 --device rtx-4090 --precision bf16 "
        "--replicas 8 --logical-batch 512 --headroom 5%"
    )


def test_the_bounds_of_a_cells_sizes_are_in_its_command() -> None:
    request = ProbeRequest(target="work.py", min_microbatch=2, max_microbatch=16)
    assert probe_command(request, {}).endswith(" --min-microbatch 2 --max-microbatch 16")


def test_a_cell_takes_its_figures_from_its_probe() -> None:
    result = sample.gpt2()
    cell = answered_cell(cells()[0], result)

    assert cell.status is CellStatus.FITS
    assert (cell.split, cell.certificate) == (result.split, result.certificate)
    assert cell.peak_bytes == result.answer.peak_bytes
    assert cell.headroom_left_bytes == result.spec.device.limit_bytes - (cell.peak_bytes or 0)
    assert len(cell.points) == len(result.trials)
    assert cell.fit is not None


def test_a_cell_without_an_answer_says_why() -> None:
    def status(error: MemfitError) -> CellStatus:
        cell = refused_cell(cells()[0], error, (), command="memfit probe", wall_s=1)
        assert (cell.message, cell.hint, cell.microbatch) == ("why", "then", None)
        return cell.status

    assert status(NothingFits("why", hint="then")) is CellStatus.NOTHING_FITS
    assert status(WorkloadError("why", hint="then")) is CellStatus.FAILED
    assert status(CannotJudge("why", hint="then")) is CellStatus.CANNOT_JUDGE
