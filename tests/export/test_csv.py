"""Trials as CSV."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from typing import TYPE_CHECKING

from memfit.export.csv import COLUMNS, trials_csv
from tests import sample

if TYPE_CHECKING:
    from memfit.records import ProbeResult


def rows(result: ProbeResult) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(trials_csv(result))))


def test_there_is_one_row_for_each_trial_and_device() -> None:
    result = sample.gpt2()
    two = replace(
        result.trials[0],
        devices=(*result.trials[0].devices, replace(result.trials[0].devices[0], rank=1)),
    )
    found = rows(replace(result, trials=(two, *result.trials[1:])))
    assert [(row["trial"], row["rank"]) for row in found[:3]] == [
        ("1", "0"),
        ("1", "1"),
        ("2", "0"),
    ]
    assert len(found) == 7


def test_columns_are_named_with_units_and_in_a_fixed_order() -> None:
    header = trials_csv(sample.gpt2()).split("\n", 1)[0]
    assert header == ",".join(COLUMNS)


def test_bytes_are_whole_numbers_beside_empty_cells() -> None:
    result = sample.gpt2()
    blind = replace(result.trials[0].devices[0], peak_allocated_bytes=None)
    found = rows(
        replace(result, trials=(replace(result.trials[0], devices=(blind,)), *result.trials[1:]))
    )
    assert found[0]["peak_allocated_bytes"] == ""
    assert found[1]["peak_allocated_bytes"] == str(result.trials[1].peak_allocated_bytes)


def test_every_row_says_where_its_figures_come_from() -> None:
    assert {row["source"] for row in rows(sample.gpt2())} == {"virtual"}
    assert {row["source"] for row in rows(sample.on_cpu())} == {"measured"}


def test_a_trial_without_a_device_still_has_a_row() -> None:
    result = sample.gpt2()
    bare = replace(result.trials[2], devices=())
    found = rows(replace(result, trials=(*result.trials[:2], bare, *result.trials[3:])))
    assert found[2]["verdict"] == "oom"
    assert found[2]["rank"] == ""
    assert found[2]["demand_bytes"] == str(bare.demand_bytes)


def test_only_the_certified_trial_is_the_answer() -> None:
    found = {row["trial"]: row["is_answer"] for row in rows(sample.gpt2())}
    assert [trial for trial, flag in found.items() if flag == "true"] == ["6"]


def test_commas_quotes_and_newlines_in_evidence_survive() -> None:
    result = sample.gpt2()
    text = 'tried "x", then\nfailed'
    odd = replace(result.trials[0], evidence=replace(result.trials[0].evidence, text=text))
    assert rows(replace(result, trials=(odd, *result.trials[1:])))[0]["evidence"] == text
