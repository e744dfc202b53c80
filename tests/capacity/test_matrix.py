"""The words of a plan: lists, rows, and what to try."""

from __future__ import annotations

import pytest

from memfit.capacity.matrix import (
    ALLOCATOR_VARIABLE,
    changes_of,
    counts_of,
    parameter_lists,
    precisions_of,
    settings_of,
    words_of,
)
from memfit.capacity.table import Setting
from memfit.errors import UsageError
from memfit.records import Precision

VALUES = {"seq_len": 1024, "checkpointing": False, "tied": True}
PLAIN = Setting(parameters={}, precision=Precision.FP32, replicas=1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "--on names nothing"),
        (" , ", "--on names nothing"),
        ("a,,b", "--on a,,b has an empty place"),
        ("a,b,a", "--on names a twice"),
    ],
)
def test_a_list_without_words_or_with_one_twice_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        words_of("--on", text)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["seq_len"], "is not NAME=VALUE,VALUE"),
        (["=3"], "is not NAME=VALUE,VALUE"),
        (["a=1", "a=2"], "--set a is given twice"),
        (["a="], "--set a names nothing"),
    ],
)
def test_a_setting_that_names_no_value_is_refused(settings: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parameter_lists(settings)


@pytest.mark.parametrize("text", ["0", "two", "1,-8", "1.5", "8,08"])
def test_counts_are_whole_numbers_from_one_on_and_each_once(text: str) -> None:
    with pytest.raises(UsageError):
        counts_of("--replicas", text)


def test_an_unknown_precision_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="'fp8'") as raised:
        precisions_of("bf16,fp8")
    assert raised.value.hint == "one of fp32, bf16, fp16"


def test_rows_are_every_combination_and_the_last_word_changes_first() -> None:
    rows = settings_of({"a": ("1", "2"), "b": ("x",)}, (Precision.BF16, Precision.FP32), (1, 8))

    assert len(rows) == 8
    assert rows[0] == Setting(parameters={"a": "1", "b": "x"}, precision=Precision.BF16, replicas=1)
    assert [row.replicas for row in rows[:4]] == [1, 8, 1, 8]
    assert [row.parameters["a"] for row in rows] == ["1"] * 4 + ["2"] * 4


def test_each_change_changes_one_thing() -> None:
    changes, said = changes_of(
        ("checkpointing", "allocator", "precision", "tied", "seq_len=512"), VALUES, allocator=""
    )

    assert said == ()
    assert [change.name for change in changes] == [
        "checkpointing=True",
        "expandable segments",
        "bf16",
        "tied=False",
        "seq_len=512",
    ]
    changed = [change.apply(PLAIN, VALUES) for change in changes]
    assert [row.parameters for row in changed if row] == [
        {"checkpointing": "True"},
        {},
        {},
        {"tied": "False"},
        {"seq_len": "512"},
    ]
    assert changed[2] == Setting(parameters={}, precision=Precision.BF16, replicas=1)


def test_what_is_so_already_is_not_tried_again() -> None:
    changes, _ = changes_of(("precision", "seq_len=1024"), VALUES, allocator="")
    half = Setting(parameters={}, precision=Precision.FP16, replicas=1)

    assert changes[0].apply(half, VALUES) is None
    assert changes[1].apply(PLAIN, VALUES) is None


def test_other_settings_of_the_allocator_are_kept() -> None:
    changes, _ = changes_of(("allocator",), VALUES, allocator="max_split_size_mb:128")

    assert changes[0].environment == {
        ALLOCATOR_VARIABLE: "max_split_size_mb:128,expandable_segments:True"
    }


def test_an_allocator_that_is_expandable_already_is_told() -> None:
    changes, said = changes_of(("allocator",), VALUES, allocator="expandable_segments:True")

    assert changes == ()
    assert said == ("--try allocator changes nothing: expandable_segments:True is set already",)


def test_a_workload_that_cannot_recompute_is_told_and_not_refused() -> None:
    changes, said = changes_of(("checkpointing",), {"width": 8}, allocator="")

    assert changes == ()
    assert "the workload has no such parameter" in said[0]


@pytest.mark.parametrize(("word", "near"), [("seq_length=3", "seq_len"), ("checkpoints", "check")])
def test_a_word_that_is_no_parameter_is_refused_with_the_nearest(word: str, near: str) -> None:
    with pytest.raises(UsageError, match="nothing of that name") as raised:
        changes_of((word,), VALUES, allocator="")
    assert raised.value.hint is not None
    assert near in raised.value.hint
