"""`--max-trials` counts every trial that looks for a size, and every one of them is kept."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING, Any

import pytest

from memfit.allocator import EXPANDABLE, AllocatorChoice
from memfit.errors import CannotJudge, Interrupted
from memfit.export.csv import trials_csv
from memfit.records import ProbeProgress, from_json
from memfit.report import render, staying, words
from tests.made import DOUBTFUL, FITS, OOM, Answer, Runner, probe

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from memfit.records import ProbeResult

BOTH = AllocatorChoice.BOTH
NOTHING: dict[int, list[Answer]] = {m: [OOM] for m in (1, 2, 4, 8)}


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def ask(
        table: dict[int, list[Answer]], tuned: dict[int, list[Answer]], **changes: Any
    ) -> tuple[ProbeResult, Runner]:
        runner = Runner(table, changes.pop("interrupt_at", None), tuned=tuned)
        return probe(runner, monkeypatch, tmp_path / "out", allocator=BOTH, **changes), runner

    return ask


def rows(result: ProbeResult) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(trials_csv(result))))


def test_trials_that_look_for_a_larger_size_with_another_setting_are_kept_and_numbered_on(
    ask: Any,
) -> None:
    result, runner = ask({8: [OOM]}, {8: [FITS]})

    assert result.tuned is not None
    assert result.tuned.split is not None
    assert result.tuned.split.microbatch == 8
    assert result.tuned.trials == len(result.other_trials) >= 1
    found = rows(result)
    assert [int(row["trial"]) for row in found] == list(range(1, len(runner.asked) + 1))
    assert [row["allocator"] for row in found].count(EXPANDABLE) == result.tuned.trials
    assert [row["is_answer"] for row in found].count("true") == 1
    page = render(result)
    assert f"{len(runner.asked)} trials in " in page
    assert page.count(f"with {EXPANDABLE}") >= result.tuned.trials


@pytest.mark.parametrize("most", range(1, 8))
def test_no_more_trials_run_than_were_allowed_with_both_settings_together(
    ask: Any, most: int
) -> None:
    result, runner = ask({8: [OOM], 4: [OOM]}, {8: [FITS]}, max_trials=most)

    assert len(runner.asked) == len(result.trials) + len(result.other_trials) <= most


def test_another_setting_that_no_trial_was_left_for_is_told_as_unknown(ask: Any) -> None:
    whole, runner = ask({8: [OOM]}, {8: [FITS]})
    searched = len(whole.trials)
    assert len(runner.asked) > searched

    result, _ = ask({8: [OOM]}, {8: [FITS]}, max_trials=searched, force=True)

    assert len(result.trials) == searched
    assert result.other_trials == ()
    assert "is not known: trials or time were over before a trial with it" in (
        staying.tuned(result) or ""
    )


def test_a_search_that_goes_on_with_another_setting_keeps_the_trials_before_it(ask: Any) -> None:
    result, runner = ask(NOTHING, {})

    assert result.spec.allocator == EXPANDABLE
    assert {t.spec.allocator for t in result.other_trials} == {None}
    assert {t.spec.allocator for t in result.trials} == {EXPANDABLE}
    assert [int(row["trial"]) for row in rows(result)] == list(range(1, len(runner.asked) + 1))
    assert words.holes(result) == ()


def test_a_search_that_goes_on_with_another_setting_has_only_the_trials_that_are_left(
    ask: Any,
) -> None:
    with pytest.raises(CannotJudge, match="confirmed by full groups in 4 trials") as caught:
        ask(NOTHING, {m: [OOM] for m in (1, 2)}, max_trials=4)
    assert "--max-trials above 4" in (caught.value.hint or "")


def test_an_interrupted_search_with_another_setting_still_counts_those_before_it(
    ask: Any, tmp_path: Path
) -> None:
    with pytest.raises(Interrupted):
        ask(NOTHING, {}, interrupt_at=5)
    data = (tmp_path / "out/memfit.progress.json").read_bytes()
    saved = from_json(data, ProbeProgress, origin="progress")
    assert (len(saved.other_trials), len(saved.trials)) == (3, 1)

    result, _ = ask(NOTHING, {})
    whole = [*result.other_trials, *result.trials]
    assert [t.spec.index for t in whole] == list(range(1, len(whole) + 1))


@pytest.mark.parametrize("most", range(2, 8))
def test_a_doubtful_trial_and_its_repetition_are_two_and_the_answer_stays_confirmed(
    ask: Any, most: int
) -> None:
    result, runner = ask({8: [DOUBTFUL]}, {8: [OOM]}, max_trials=most)

    assert len(runner.asked) <= most
    assert result.answer.verdict.value == "fits"
    tried = {t.microbatch for t in result.certificate.tried_above}
    assert (8 in tried) == (runner.asked.count(8) >= 2)


def test_a_doubtful_trial_that_could_not_be_repeated_is_told_so(ask: Any) -> None:
    result, runner = ask({8: [DOUBTFUL]}, {8: [OOM]}, max_trials=4)

    assert runner.asked == [1, 2, 8, 2]
    assert 8 in result.certificate.untried
    assert result.story[2].change.endswith("does not count: no trial was left to repeat it.")
