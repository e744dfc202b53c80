"""Where gradients are computed: on the CPU or a real GPU, and never on a virtual one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from memfit import virtual
from memfit.devices import select
from memfit.errors import CannotJudge, UsageError
from memfit.verify.protocol import Report, Task
from memfit.verify.run import VerifyRequest, _task
from memfit.verify.worker import __main__ as worker
from memfit.virtual import control


def task(device: str) -> Task:
    return _task(VerifyRequest(target=__file__, device=device))


def gpus(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    found = [SimpleNamespace(name=name) for name in names]
    monkeypatch.setattr(select, "Nvml", lambda: SimpleNamespace(gpus=lambda: found))


@pytest.mark.parametrize("word", ["cpu", "auto", " CPU "])
def test_the_cpu_is_what_is_used_unless_a_gpu_is_named(word: str) -> None:
    assert task(word).device == "cpu"


def test_a_gpu_that_is_there_is_used_when_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, "NVIDIA H100")
    assert task("cuda").device == "cuda"


def test_a_gpu_that_is_not_there_is_no_reason_to_name_a_virtual_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus(monkeypatch)
    with pytest.raises(CannotJudge, match="no CUDA device here") as caught:
        task("cuda")
    assert caught.value.hint == "use --device cpu, or cuda on a machine with a GPU"


@pytest.mark.parametrize("card", sorted(card.slug for card in virtual.cards()))
def test_every_virtual_gpu_is_refused_by_its_name(card: str) -> None:
    with pytest.raises(UsageError, match=f"{card} is a virtual GPU: its kernels compute nothing"):
        task(card)


def test_a_word_that_is_no_device_is_told_which_there_are() -> None:
    with pytest.raises(UsageError) as caught:
        task("banana")
    assert "--device cpu" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("available", "stand_in", "error", "said"),
    [
        (False, False, CannotJudge, "torch finds no CUDA device"),
        (True, True, UsageError, "the CUDA device here is virtual"),
    ],
)
def test_the_process_that_computes_looks_for_itself(
    available: bool,
    stand_in: bool,
    error: type[Exception],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(control, "active", lambda: stand_in)
    gpus(monkeypatch, "NVIDIA H100")
    with pytest.raises(error, match=said):
        worker._verify(task("cuda"), tmp_path, Report(), lambda _: None)
