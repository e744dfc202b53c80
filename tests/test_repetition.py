"""A doubtful trial is repeated once before it counts: whole probes over trials that are made up."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from memfit.errors import Interrupted, WorkloadError
from memfit.records import (
    ProbeProgress,
    Verdict,
    from_json,
)
from memfit.report import render, words
from tests.made import DOUBTFUL, ERROR, FITS, HOST, OOM, SIZE, Answer, Runner, probe

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from memfit.records import ProbeResult


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def ask(table: dict[int, list[Answer]], **changes: Any) -> tuple[ProbeResult, Runner]:
        runner = Runner(table, changes.pop("interrupt_at", None))
        return probe(runner, monkeypatch, tmp_path / "out", **changes), runner

    return ask


def test_a_doubtful_failure_that_comes_again_counts_and_both_are_kept(ask: Any) -> None:
    result, runner = ask({8: [DOUBTFUL]})

    assert result.split.microbatch == 4
    assert runner.asked.count(8) == 2
    first, again = [t for t in result.trials if t.spec.split.microbatch == 8]
    assert again.spec.repeats == first.spec.index
    assert "once more: cuDNN internal has other causes too" in again.spec.reason
    assert result.certificate.tried_above[0].trial == again.spec.index
    assert result.notes == ()


def test_a_doubtful_failure_that_does_not_come_again_is_told_and_the_size_has_to_fit_twice(
    ask: Any,
) -> None:
    result, runner = ask({8: [DOUBTFUL, FITS]})

    assert result.split.microbatch == 8
    assert runner.asked.count(8) == 3
    assert result.answer.spec.repeats is None
    assert any("did not come out the same twice" in note for note in result.notes)
    assert any("looked like a lack of device memory (cuDNN internal)" in n for n in result.notes)


def test_a_size_that_fails_again_after_its_repetition_is_no_answer(ask: Any) -> None:
    result, _ = ask({8: [DOUBTFUL, FITS, OOM]})

    assert result.split.microbatch == 4
    assert result.certificate.tried_above[0].microbatch == 8


def test_a_repetition_that_fails_without_any_doubt_counts(ask: Any) -> None:
    result, runner = ask({8: [DOUBTFUL, OOM]})

    assert result.split.microbatch == 4
    assert runner.asked.count(8) == 2


def test_a_failure_without_doubt_is_not_repeated(ask: Any) -> None:
    _, runner = ask({8: [OOM]})
    assert runner.asked.count(8) == 1


def test_a_repetition_that_fails_otherwise_stops_the_probe_and_tells_of_both(
    ask: Any, tmp_path: Path
) -> None:
    with pytest.raises(WorkloadError) as caught:
        ask({8: [DOUBTFUL, ERROR]})

    assert "failed at microbatch 8 in forward, group 1, microbatch 1" in caught.value.message
    assert "looked like a lack of device memory" in (caught.value.hint or "")
    assert "its last line" in (caught.value.details or "")
    saved = from_json(
        (tmp_path / "out/memfit.progress.json").read_bytes(), ProbeProgress, origin="progress"
    )
    assert [t.verdict for t in saved.trials] == [Verdict.FITS, Verdict.FITS, Verdict.OOM]
    assert saved.stopped_by is not None
    assert saved.stopped_by.verdict is Verdict.ERROR


@pytest.mark.parametrize("verdict", [Verdict.ERROR, Verdict.CRASH, Verdict.TIMEOUT])
def test_what_says_nothing_about_the_size_stops_the_probe_and_is_saved(
    ask: Any, tmp_path: Path, verdict: Verdict
) -> None:
    with pytest.raises(WorkloadError) as caught:
        ask({8: [(verdict, False)]})

    path = tmp_path / "out/memfit.progress.json"
    saved = from_json(path.read_bytes(), ProbeProgress, origin="progress")
    assert saved.stopped_by is not None
    assert (saved.stopped_by.verdict, saved.stopped_by.spec.split.microbatch) == (verdict, 8)
    assert saved.stopped_by.evidence.output_tail == ("its last line",)
    assert "--max-microbatch 7 leaves them out" in (caught.value.hint or "")

    result, runner = ask({})  # mended without a change to the file: it goes on
    assert result.split.microbatch == 8
    assert runner.asked == [8]
    assert not path.exists()


def test_an_interrupted_repetition_is_run_when_the_probe_goes_on(ask: Any) -> None:
    with pytest.raises(Interrupted):
        ask({8: [DOUBTFUL]}, interrupt_at=4)
    result, runner = ask({8: [DOUBTFUL]})

    assert runner.asked == [8, 4]
    assert result.split.microbatch == 4
    assert [trial.spec.repeats for trial in result.trials] == [None, None, None, 3, None]


@pytest.mark.parametrize(
    ("answer", "verdict", "said"),
    [
        (HOST, Verdict.HOST_OOM, "microbatch 16: out of host memory (trial 3)"),
        (SIZE, Verdict.SIZE_LIMIT, "microbatch 16: index limit (trial 3)"),
    ],
)
def test_the_certificate_says_which_verdict_set_the_ceiling(
    ask: Any, answer: Answer, verdict: Verdict, said: str
) -> None:
    result, _ = ask({16: [answer]}, logical_batch=16)

    closed = result.certificate.closed_by
    assert closed is not None
    assert (closed.microbatch, closed.verdict) == (16, verdict)
    assert words.ceiling(result) == said
    assert "16 set the ceiling, because" in words.certificate(result)
    assert words.verdict(verdict) in render(result)


def test_where_no_trial_closed_the_search_none_is_named(ask: Any) -> None:
    result, _ = ask({})

    assert result.certificate.closed_by is None
    assert words.ceiling(result) == "none: no larger candidate exists"


def test_the_search_is_a_story_in_the_record_and_on_the_page(ask: Any, tmp_path: Path) -> None:
    result, _ = ask({8: [DOUBTFUL, FITS]})
    stored = json.loads((tmp_path / "out/memfit.json").read_bytes())["story"]
    page = render(result)

    assert [c["trial"] for c in stored] == [t.spec.index for t in result.trials]
    assert set(stored[0]) == {"trial", "microbatch", "verdict", "reason", "evidence", "change"}
    changes = [c["change"] for c in stored]
    assert "Doubtful, so it does not count: repeated as trial 4." in changes
    assert any(c.startswith("Disagrees with trial 3, which it repeats; this one") for c in changes)
    assert all(c["change"] in page for c in stored)
    assert "Decided by: cuDNN internal, doubtful." in page
