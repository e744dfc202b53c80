"""A probe in which nothing fits has an answer like any other: it is kept, told and shown."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from memfit.allocator import EXPANDABLE, AllocatorChoice
from memfit.errors import UsageError
from memfit.export.csv import trials_csv
from memfit.nothing import NothingFound
from memfit.plan import load
from memfit.probe import Unfit
from memfit.records import from_json, to_json
from memfit.report import render_nothing
from tests.made import OOM, Answer, Runner, probe
from tests.report.test_page import Outline

if TYPE_CHECKING:
    from pathlib import Path

NOTHING: dict[int, list[Answer]] = {m: [OOM] for m in (1, 2, 4, 8)}


def refused(monkeypatch: pytest.MonkeyPatch, folder: Path, **changes: object) -> Unfit:
    with pytest.raises(Unfit) as caught:
        probe(Runner(NOTHING), monkeypatch, folder, **changes)
    return caught.value


@pytest.fixture
def none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Unfit:
    return refused(monkeypatch, tmp_path / "out", allocator=AllocatorChoice.BOTH)


def test_the_record_is_saved_in_the_place_of_an_answer_and_ends_the_probe(
    none: Unfit, tmp_path: Path
) -> None:
    path = tmp_path / "out/memfit.json"
    assert from_json(path.read_bytes(), NothingFound, origin="it") == none.record
    assert none.record.message == none.message
    assert none.record.hint == none.hint
    assert none.exit_code == 3
    assert not (tmp_path / "out/memfit.progress.json").exists()


def test_trials_of_both_settings_are_in_the_record_and_the_table(none: Unfit) -> None:
    settings = [t.spec.allocator for t in none.record.every_trial]
    assert settings == [None] * 3 + [EXPANDABLE] * 3
    rows = list(csv.DictReader(io.StringIO(trials_csv(none.record))))
    assert [row["trial"] for row in rows] == list("123456")
    assert {row["is_answer"] for row in rows} == {"false"}


def test_no_plan_can_be_loaded_from_it_and_the_error_says_why(none: Unfit, tmp_path: Path) -> None:
    assert none.folder is not None
    with pytest.raises(UsageError, match="a probe in which nothing fits, so it has no micro"):
        load(tmp_path / "out/memfit.json")


def test_the_page_says_what_does_not_fit_what_to_do_and_what_was_tried(none: Unfit) -> None:
    page = render_nothing(none.record)
    outline = Outline(page)
    text = " ".join(" ".join(outline.text).split())

    assert "Microbatch 1 does not fit on CPU" in text
    assert "What to do." in text
    assert "Accumulation cannot help" in text
    assert text.count(EXPANDABLE) == 3
    assert outline.unbalanced == []
    assert not re.search(r"https?://|//cdn|@import|url\((?!#)", page)
    assert [a.get("type") for tag, a in outline.tags if tag == "script"] == ["application/json"]


def test_no_word_of_the_user_becomes_markup(none: Unfit) -> None:
    attack = "</script><script>alert('x')</script>"
    record = replace(none.record, message=attack, hint=attack, details=attack, command=attack)
    assert "<script>alert" not in render_nothing(record)
    assert from_json(to_json(record), NothingFound, origin="it") == record


def test_a_smallest_size_that_was_asked_for_is_named_with_the_way_below_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    none = refused(monkeypatch, tmp_path / "out", min_microbatch=2)
    assert none.message.startswith("no microbatch of 2 or more fits on CPU")
    assert (none.hint or "").startswith(
        "smaller microbatches are possible below --min-microbatch 2"
    )

    none = refused(monkeypatch, tmp_path / "large", min_microbatch=3)
    assert none.message.startswith("no microbatch of 4 or more fits on CPU")
    assert "below --min-microbatch 3 or with another --logical-batch" in (none.hint or "")


def test_a_setting_that_no_trial_was_left_for_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    both = AllocatorChoice.BOTH
    none = refused(monkeypatch, tmp_path / "out", allocator=both, max_trials=3)
    assert (none.hint or "").endswith(f"{EXPANDABLE} was not tried: raise --max-trials")
