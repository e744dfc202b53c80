"""A question that is asked again over a finished folder: nothing is replaced, and why is said."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from memfit.allocator import AllocatorChoice
from memfit.errors import UsageError
from memfit.folder import default_folder
from memfit.probe import Unfit
from memfit.records import Precision
from memfit.resume import answer_words
from tests import sample
from tests.made import OOM, Answer, Runner, probe

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NOTHING: dict[int, list[Answer]] = {m: [OOM] for m in (1, 2, 4, 8)}


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def ask(
        table: dict[int, list[Answer]] | None = None,
        tuned: dict[int, list[Answer]] | None = None,
        **changes: Any,
    ) -> Runner:
        runner = Runner(table or {}, tuned=tuned)
        probe(runner, monkeypatch, tmp_path / "out", **changes)
        return runner

    return ask


def refused(ask: Callable[..., Any], **changes: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        ask(**changes)
    assert caught.value.exit_code == 2
    return caught.value


def test_the_same_question_is_told_its_answer_and_where_the_report_is(
    ask: Any, tmp_path: Path
) -> None:
    ask()
    before = (tmp_path / "out/memfit.json").read_bytes()

    said = refused(ask)

    assert said.message.startswith("this question was answered on 20")
    assert f": microbatch 8 with 1 accumulation step (see {tmp_path}/out/report" in said.message
    assert said.hint == "--force asks it again and replaces the answer, --out keeps both"
    assert (tmp_path / "out/memfit.json").read_bytes() == before


def test_no_trial_runs_for_a_question_that_was_answered(
    ask: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask()
    runner = Runner({})
    with pytest.raises(UsageError):
        probe(runner, monkeypatch, tmp_path / "out")
    assert runner.asked == []


def test_another_question_is_told_by_what_is_different(ask: Any) -> None:
    ask()
    said = refused(ask, logical_batch=4, min_microbatch=2, precision=Precision.BF16)

    assert "holds the answer to another question: logical batch was 8, is 4; " in said.message
    assert "precision was fp32, is bf16" in said.message
    assert "min microbatch was 1, is 2" in said.message
    assert said.hint == "--out names another folder; --force replaces that answer"


def test_how_long_to_search_makes_no_other_question_and_an_early_end_is_told(ask: Any) -> None:
    ask({8: [OOM]}, max_trials=2)
    said = refused(ask, max_trials=20)
    assert "microbatch 1 with 8 accumulation steps, where the search ended after 2" in said.message


def test_a_question_to_which_nothing_fits_was_answered_as_well(ask: Any) -> None:
    with pytest.raises(Unfit):
        ask(NOTHING)
    said = refused(ask)
    assert "this question was answered on" in said.message
    assert ": microbatch 1 does not fit on CPU" in said.message


def test_an_answer_that_needs_a_setting_answers_the_question_for_both(ask: Any) -> None:
    ask(NOTHING, {}, allocator=AllocatorChoice.BOTH)
    assert "was answered on" in refused(ask, allocator=AllocatorChoice.BOTH).message


def test_force_asks_again(ask: Any) -> None:
    ask()
    assert ask(force=True).asked


@pytest.mark.parametrize(
    ("precision", "parameters", "name"),
    [
        (Precision.FP32, {}, "gpt2-rtx-4090"),
        (Precision.BF16, {}, "gpt2-rtx-4090_bf16"),
        (
            Precision.FP32,
            {"seq_len": "2048", "p": "a/../b c"},
            "gpt2-rtx-4090_seq_len-2048_p-a-..-b-c",
        ),
    ],
)
def test_a_folder_that_nobody_named_is_named_after_the_question(
    precision: Precision, parameters: dict[str, str], name: str
) -> None:
    folder = default_folder("GPT2", "rtx-4090", precision, parameters)
    assert folder.as_posix() == f"reports/{name}"


def test_a_folder_has_no_longer_name_than_systems_take() -> None:
    folder = default_folder("GPT2", "cpu", Precision.FP32, {"x": "y" * 500})
    assert len(folder.name) == 120


def test_a_virtual_answer_is_told_as_one() -> None:
    said = answer_words(sample.gpt2())

    assert said.endswith("accumulation steps on a virtual NVIDIA GeForce RTX 4090")
