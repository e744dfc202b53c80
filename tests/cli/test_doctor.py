"""`memfit doctor`: what it finds, and the self-test whose peak is worked out on paper."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from memfit import selftest
from memfit.virtual import DEFAULT_CARD, find_card
from memfit.virtual.build import find_torch
from tests.cli.terminal import Ended, memfit

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.virtual,
    pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler"),
]


def lines(out: str) -> dict[str, str]:
    return {line[:14].strip(): line[14:] for line in out.splitlines()}


def test_the_expected_peak_is_a_sum_that_can_be_followed() -> None:
    parameters = 2 * 512 * 512 * 4
    workspaces = 2 * (2 * 4096 + 8 * 16) * 1024
    activations = 4 * 8 * 512 * 4

    assert sum(p.size_bytes for p in selftest.expected_peak()) == (
        parameters + parameters + 2 * parameters + parameters + workspaces + 512
    )
    assert sum(p.size_bytes for p in selftest.expected_forward()) == (
        2 * parameters + workspaces + activations + 2 * 512
    )


def test_the_card_of_the_self_test_is_older_than_hopper() -> None:
    assert find_card(DEFAULT_CARD).capability < (9, 0)


def test_a_workspace_that_is_configured_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    (workspaces,) = [p for p in selftest.expected_peak() if p.name == "cuBLAS workspaces"]

    assert workspaces.size_bytes == 2 * 16 * 8 * 1024


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that the first doctor fills."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def first(cache: Path) -> Ended:
    """The doctor on a machine where no driver was built yet."""
    return memfit("doctor", cwd=cache, MEMFIT_CACHE=cache)


def test_the_self_test_measures_what_was_worked_out(first: Ended) -> None:
    said = lines(first.out)

    assert (first.code, first.err) == (0, "")
    assert said["self-test"] == (
        "27,525,632 bytes expected, the same measured; "
        "21,300,224 bytes expected in the forward pass, the same measured"
    )


def test_the_driver_is_named_with_what_it_is_for(first: Ended, cache: Path) -> None:
    said = lines(first.out)
    torch = find_torch()

    assert torch is not None
    assert said["driver"].startswith(f"{cache}/driver-")
    assert said["driver"].endswith(f"(built just now, for CUDA {torch.cuda_major})")
    assert "workspaces" in said["cuDNN"]


def test_a_workspace_of_another_size_is_measured_as_expected(first: Ended, cache: Path) -> None:
    assert first.code == 0
    ended = memfit("doctor", cwd=cache, MEMFIT_CACHE=cache, CUBLAS_WORKSPACE_CONFIG=":1024:4")

    assert ended.code == 0, ended.out
    assert "18,874,880 bytes expected, the same measured" in lines(ended.out)["self-test"]
    assert "(found, " in lines(ended.out)["driver"]


def test_a_difference_is_shown_and_cannot_be_judged(tmp_path: Path) -> None:
    ended = memfit("doctor", cwd=tmp_path, PYTORCH_NO_CUDA_MEMORY_CACHING=1)

    assert ended.code == 5
    assert "27,525,632 bytes expected, 0 measured: 2,097,152 parameters + " in ended.out
    assert "does not measure what was worked out" in ended.error
    assert ended.hint.startswith("PYTORCH_NO_CUDA_MEMORY_CACHING may be why")
