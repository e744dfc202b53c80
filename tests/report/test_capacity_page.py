"""The page of a plan."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from memfit.capacity.cells import Ask, Column, answered_cell, asks_of, refused_cell
from memfit.capacity.matrix import changes_of, settings_of
from memfit.capacity.table import CapacityCell, CapacitySpec, CapacityTable, CellStatus, Needed
from memfit.errors import NothingFits, WorkloadError
from memfit.export.capacity import capacity_csv
from memfit.records import Parameter, Precision, from_json, to_json
from memfit.report import capacity_words, render_capacity
from memfit.report.capacity_page import OF_MANY, heat
from tests import sample
from tests.report.test_page import BUDGET, Outline

HOSTILE = '<script>alert("1")</script>'


def column(slug: str, gib: int) -> Column:
    device = replace(
        sample.RTX_4090, slug=slug, total_bytes=gib * 2**30, limit_bytes=gib * 2**30 - 2**29
    )
    return Column(word=slug, device=device, environment={})


def table(
    devices: int = 3, values: tuple[str, ...] = ("1024", "2048"), *tries: str
) -> CapacityTable:
    """A made-up plan in which the second cell has no room and the third fails."""
    columns = tuple(column(f"card-{n}", 8 * (n + 1)) for n in range(devices))
    rows = settings_of({"seq_len": values}, (Precision.BF16,), (1,))
    known: list[dict[str, Parameter]] = [
        {"seq_len": row.parameters["seq_len"], "checkpointing": False} for row in rows
    ]
    changes, _ = changes_of(tries, known[0], allocator="")
    asks = asks_of(columns, rows, known, changes)
    return CapacityTable(
        created="2026-01-01T00:00:00+00:00",
        command="memfit plan work.py --on card-0,card-1",
        workload=sample.gpt2().workload,
        spec=CapacitySpec(
            target="work.py",
            devices=tuple(c.device.slug for c in columns),
            limits_bytes=tuple(c.device.limit_bytes for c in columns),
            settings=rows,
            tries=tries,
            logical_batch=480,
        ),
        cells=tuple(cell(ask) for ask in asks),
        environment=sample.ENVIRONMENT,
        wall_s=12.0,
    )


def cell(ask: Ask) -> CapacityCell:
    if ask.index == 2:
        error = NothingFits("microbatch 1 does not fit", hint="a larger device is needed")
        return refused_cell(ask, error, (), command="memfit probe", wall_s=1)
    if ask.index == 3:
        failed = WorkloadError(f"it failed: {HOSTILE}", details=f"line 3: {HOSTILE}")
        return refused_cell(ask, failed, (), command="memfit probe", wall_s=1)
    made = answered_cell(ask, sample.gpt2())
    return replace(made, device=ask.column.device)


TABLES = {
    "plain": table(),
    "tries": table(3, ("1024", "2048"), "checkpointing", "allocator"),
    "large": table(37, tuple(str(n) for n in range(16))),
}
PAGES = {name: render_capacity(made) for name, made in TABLES.items()}
every_page = pytest.mark.parametrize("name", list(PAGES))


@every_page
def test_a_page_is_one_small_file_that_needs_nothing_and_runs_nothing(name: str) -> None:
    page, outline = PAGES[name], Outline(PAGES[name])

    assert len(page.encode()) < BUDGET
    assert outline.unbalanced == []
    assert not outline.values("src")
    assert all(value.startswith("#") for value in outline.values("href"))
    assert not re.search(r"https?://|@import|url\((?!#)", page)
    assert {a.get("type") for tag, a in outline.tags if tag == "script"} <= {"application/json"}
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in page
    ids = outline.values("id")
    assert len(ids) == len(set(ids))


@every_page
def test_the_same_table_gives_the_same_bytes(name: str) -> None:
    assert render_capacity(TABLES[name]) == PAGES[name]


@every_page
def test_links_lead_to_what_is_there(name: str) -> None:
    outline = Outline(PAGES[name])
    missing = {value[1:] for value in outline.values("href")} - set(outline.values("id"))

    assert not missing


@every_page
def test_every_table_says_virtual(name: str) -> None:
    captions = re.findall(r"<caption>(.*?)</caption>", PAGES[name], re.DOTALL)
    figures = [caption for caption in captions if "Folder and command" not in caption]

    assert figures
    assert all("virtual" in caption for caption in figures)


def test_the_map_has_every_cell_and_says_where_there_is_none() -> None:
    page = PAGES["plain"]
    heat_map = page[page.index('id="map"') : page.index('id="cells"')]

    assert heat_map.count("<b>") == 6
    assert "nothing fits" in heat_map
    assert ">failed<" in heat_map
    for index in range(1, 7):
        assert f'href="#cell-{index}"' in heat_map


def test_what_the_users_code_said_is_shown_as_text() -> None:
    assert HOSTILE not in PAGES["plain"]
    assert "&lt;script&gt;" in PAGES["plain"]


def test_shades_follow_doublings() -> None:
    made = TABLES["plain"]
    sizes = (1, 2, 8, 32)
    cells = tuple(
        replace(made.cells[0], index=n, split=replace(sample.gpt2().split, microbatch=m))
        for n, m in enumerate(sizes, start=1)
    )
    many = replace(made, cells=cells)
    assert [heat(many, cell) for cell in cells] == [1, 2, 4, 6]


def test_a_large_plan_tells_cells_without_an_answer_and_says_what_it_left_out() -> None:
    page = PAGES["large"]

    assert f"{37 * 16 - OF_MANY} cells of this plan are only in" in page
    assert 'id="cell-2"' in page
    assert "The record is <code>capacity.json</code> beside this file" in page


def test_what_was_tried_stands_beside_what_was_there() -> None:
    page = PAGES["tries"]
    room = page[page.index('id="room"') : page.index('id="cells"')]

    assert room.count("checkpointing=True") == 6
    assert room.count("expandable segments") == 6


def test_the_line_stands_beside_its_points_with_its_residual() -> None:
    made = TABLES["plain"].cells[0]
    assert made.fit is not None
    page = PAGES["plain"]

    assert f'<data value="{made.fit.slope_bytes}"' in page
    assert capacity_words.residual(made.fit) in page
    for point in made.points:
        assert f'<td class="n">{point.trial}</td><td class="n">{point.microbatch}</td>' in page


def test_the_smallest_card_is_told_with_the_one_below() -> None:
    made = TABLES["plain"]
    need = Needed(setting=made.cells[0].setting, microbatch=20, device="card-0", cell=1, below=2)
    page = render_capacity(replace(made, needed=(need,)))

    assert "the smallest device for microbatch 20 is card-0" in page
    assert "The next smaller, card-1: microbatch 1 does not fit." in page
    assert "by memory" in page
    assert "smallest" in re.findall(r'<td class="h\d( smallest)?"', page)[0]


def test_a_table_of_values_has_a_row_for_each_cell_and_whole_numbers() -> None:
    lines = capacity_csv(TABLES["tries"]).splitlines()

    assert len(lines) == 1 + len(TABLES["tries"].cells)
    names = lines[0].split(",")
    first = dict(zip(names, lines[1].split(","), strict=False))
    assert (first["cell"], first["set_seq_len"], first["status"]) == ("1", "1024", "fits")
    assert first["peak_bytes"].isdecimal()
    assert dict(zip(names, lines[2].split(","), strict=False))["microbatch"] == ""


def test_a_cell_that_was_not_probed_is_no_failure() -> None:
    made = TABLES["plain"]
    skipped = replace(made.cells[5], status=CellStatus.NOT_PROBED, split=None, message="later")
    page = render_capacity(replace(made, cells=(*made.cells[:5], skipped)))

    assert "not probed" in page
    assert 'id="cell-6"' not in page


def test_a_table_survives_its_file() -> None:
    made = TABLES["tries"]
    assert from_json(to_json(made), CapacityTable, origin="capacity.json") == made
