"""The report counts what it is given, and hides nothing that is off."""

from __future__ import annotations

from tests.accuracy import ladder, report
from tests.accuracy.rows import ALLOCATED, Result, Row


def row(label: str, torch: str, found: int | None, *, cause: str = "") -> Row:
    return Row(
        data_set="Some set",
        label=label,
        metric=ALLOCATED,
        measured=1000,
        found=found,
        torch=torch,
        recorded=6,
        exact=found == 1000,
        cause=cause,
    )


def written(*rows: Row) -> str:
    return report.markdown(
        [Result(data_set="Some set", rows=list(rows))], versions=["torch 2.7.1"], command="make it"
    )


def test_exact_rows_are_counted_and_not_listed():
    text = written(row("one", "2.7.1", 1000))

    assert "| 2.7.1 | allocated | 1 | 1 (100.0 %) | 0 | 0 | 0 |" in text
    assert "No row is off." in text


def test_a_row_that_is_off_is_listed_with_its_cause():
    text = written(row("one", "2.7.1", 990, cause="a reason"))

    assert "| one | 2.7.1 | peak allocated | 1,000 | 990 | -1.0000 % | a reason |" in text


def test_a_run_that_failed_is_counted_apart():
    text = written(row("one", "2.7.1", None, cause="RuntimeError"), row("two", "2.7.1", 1000))

    assert "| 2.7.1 | allocated | 2 (1 failed) | 1 (50.0 %)" in text
    assert "| failed | RuntimeError |" in text


def test_the_version_nearest_to_the_recorded_one_is_shown_apart():
    text = written(row("one", "2.7.1", 1000), row("one", "2.14.1", 960))

    assert "| **nearest to the recorded one** | allocated | 1 | 1 (100.0 %)" in text
    assert "exact with torch 2.7.1" in text


def test_a_figure_is_never_shown_without_the_word_virtual():
    assert "virtual GPU" in written(row("one", "2.7.1", 1000))


def test_a_shorter_sample_is_the_beginning_of_a_longer_one():
    rungs = [
        ladder.Rung(model=f"model{number}", image=224, batch=8, channels_last=True)
        for number in range(300)
    ]
    assert ladder.sample(rungs, 30) == ladder.sample(rungs, 200)[:30]


def test_the_next_rung_of_the_top_is_nothing():
    assert ladder.Rung(model="m", image=224, batch=512, channels_last=True).above is None
    assert ladder.Rung(model="m", image=224, batch=256, channels_last=True).above == 384


def rung(model: str, *, fitted_there: bool, **verdicts: str) -> dict[str, object]:
    here = verdicts["today"]
    contexts = dict.fromkeys(ladder.CONTEXTS, verdicts["then"])
    return {
        "model": model,
        "layout": "NHWC",
        "batch": 64,
        "fitted_there": fitted_there,
        "other_layout_there": 48,
        "verdict": here,
        ladder.TODAY: here,
        ladder.DESCENDING: verdicts.get("descending", verdicts["then"]),
        **contexts,
        "error": "",
        "retries": [0, 0, 0],
        "reserved": 24_000_000_000,
        "allocated": 23_000_000_000,
    }


def test_every_context_is_judged_in_a_line_of_its_own():
    tries = [
        rung("one", fitted_there=True, today="fits", then="thrash"),
        rung("one", fitted_there=False, today="fits", then="oom"),
    ]
    text = report.markdown(
        [Result(data_set=ladder.NAME, ladder=tries)], versions=["torch 2.14.1"], command="make it"
    )

    assert "| NHWC | today | 1 | 1 | 0 | 0 | 1 | 0 (0.0 %) | 0 (0.0 %) |" in text
    assert "| NHWC | torch 1.8.2 | 1 | 1 | 1 | 0 | 1 | 1 (100.0 %) | 1 (100.0 %) |" in text
    assert "| one | NHWC | 64 |" not in text


def test_what_runs_only_by_flushing_runs_as_the_benchmark_counts_and_is_told():
    tries = [rung("one", fitted_there=False, today="fits", then="thrash")]
    text = report.markdown(
        [Result(data_set=ladder.NAME, ladder=tries)], versions=["torch 2.14.1"], command="make it"
    )

    assert "| NHWC | torch 1.8.2 | 0 | 0 | 0 | 0 | 1 | 0 (0.0 %) | 1 (100.0 %) |" in text
    assert "runs by flushing in every step" in text


def test_a_rung_that_ends_as_there_once_the_ladder_is_descended_is_explained_by_that():
    tries = [rung("one", fitted_there=False, today="fits", then="fits", descending="oom")]
    text = report.markdown(
        [Result(data_set=ladder.NAME, ladder=tries)], versions=["torch 2.14.1"], command="make it"
    )

    assert "| oom | 21,934, 22,888 | ends as there when descended to" in text
