"""How much is compared, by the time and the memory that it takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from memfit.errors import WorkloadError
from memfit.verify.worker import sizing
from memfit.verify.worker.subject import Subject
from memfit.workload import load
from tests.verify.checking import check, outcome, write
from tests.verify.test_workloads import REFERENCE

if TYPE_CHECKING:
    from pathlib import Path

SIZED = """
class Sized(memfit.Workload):
    width: int = 16
    deep: bool = True

    def model(self):
        return nn.Linear(self.width, 1)

    def batch(self, m):
        return torch.randn(m, self.width)

    def loss(self, model, batch):
        return model(batch).square().mean()
"""


def subject_of(folder: Path, source: str) -> Subject:
    return Subject(load(str(write(folder, source)), {}), "cpu", 0)


def test_eight_examples_are_compared_where_a_pass_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizing, "_time", lambda *_: 0.1)
    told: list[str] = []
    chosen = sizing.choose_size(subject_of(tmp_path, SIZED), 0, told.append)

    assert (chosen.size, chosen.note) == (8, None)
    assert told == ["timing a forward and backward pass of 2 examples"]


def test_three_are_compared_where_a_pass_is_long_and_what_to_do_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizing, "_time", lambda *_: 20.0)
    told: list[str] = []
    subject = subject_of(tmp_path, SIZED)

    assert sizing.choose_size(subject, 0, told.append).size == 3
    assert "3 examples are compared instead of 8, for a pass of 2 took 20.0 s" in told[-1]
    assert "about 10 min 50 s in all" in told[-1]
    assert told[-1].endswith("--set, or verify_with (width=16)")
    assert sizing.choose_size(subject, 5, told.append).size == 5


def test_a_first_pass_that_is_slow_for_reasons_of_its_own_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter((20.0, 0.1))
    monkeypatch.setattr(sizing, "_time", lambda *_: next(times))
    assert sizing.choose_size(subject_of(tmp_path, SIZED), 0, lambda _: None).size == 8


def test_memory_that_is_short_leads_to_float32_and_then_to_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = subject_of(tmp_path, SIZED)
    for free, answer in ((10_000, True), (1_000, False)):
        monkeypatch.setattr(sizing, "_free_bytes", lambda _, free=free: free)
        assert sizing.fits_in_float64(subject, 100) is answer

    monkeypatch.setattr(sizing, "_free_bytes", lambda _: 500)
    with pytest.raises(WorkloadError, match="17 parameters takes about 848 B in float32") as caught:
        sizing.fits_in_float64(subject, 100)
    assert "--set, or verify_with (width=16)" in (caught.value.hint or "")


def test_what_is_compared_in_float32_for_want_of_memory_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memfit.verify.worker.workload.fits_in_float64", lambda *_: False)
    found = check(tmp_path, REFERENCE)

    assert {c.dtype for c in found.comparisons} == {"float32"}
    assert "too little memory to compare in float64" in found.notes[0]
    assert outcome(found).value == "equal"


def test_the_memory_of_a_pass_is_its_peak() -> None:
    memory = sizing.PassMemory(torch.device("cpu"))
    torch.ones(2**24)  # freed at once
    assert memory.peak_bytes() > 60 * 2**20
